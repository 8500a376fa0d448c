//! Tensors in files: safetensors, NumPy's npy, and atomic replacement of any file; a file in place of memory.
//!
//! All formats are little-endian, and so must the machine be.
#![allow(unsafe_code)]

pub mod atomic;
mod mapped;
mod npy;
mod safetensors;

use std::fs::File;
use std::path::Path;

use crate::{DType, Error, Result};

pub(crate) use mapped::FileBlock;
pub use mapped::MappedFile;
pub use npy::{load_npy, load_npy_as, read_npy, save_npy, write_npy};
pub use safetensors::{SafeTensors, TensorEntry, save_safetensors, write_safetensors};

const _: () = assert!(cfg!(target_endian = "little"), "files are little-endian");

/// Bytes of a tensor of that shape, if there can be one: its sizes but for zeros are counted even where one is 0.
fn bytes_of(shape: &[usize], dtype: DType) -> Option<usize> {
    let sizes = shape.iter().filter(|&&n| n > 0);
    let bytes = sizes.copied().try_fold(dtype.size(), usize::checked_mul)?;
    (bytes <= isize::MAX as usize).then_some(if shape.contains(&0) { 0 } else { bytes })
}

/// A file's bytes, mapped.
///
/// Safe Rust cannot rule out one thing: a process that changes or truncates the file *in place* while it is mapped changes these bytes, or
/// takes them away (a bus error). Files written by [`atomic::write`] are replaced, never changed in place, and a mapping of the old file
/// keeps the old bytes. The map is private and read-only; the crate copies out of it and hands out no reference to it.
#[derive(Debug)]
struct Map(memmap2::Mmap);

impl Map {
    /// Maps a regular file.
    fn open(path: &Path) -> Result<Map> {
        let wrong = |why: std::io::Error| Error::file(path, why);
        // Asked before opening: opening a pipe would wait for a writer.
        if !std::fs::metadata(path).map_err(wrong)?.is_file() {
            return Err(Error::file(path, "not a regular file"));
        }
        let file = File::open(path).map_err(wrong)?;
        // SAFETY: the mapping is private and read-only, so nothing in this process writes to it; that no other
        // process changes the file in place while it is mapped is the documented condition of the callers.
        let map = unsafe { memmap2::MmapOptions::new().map_copy_read_only(&file) };
        Ok(Map(map.map_err(wrong)?))
    }

    /// All bytes.
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}
