//! Tensors in files: safetensors, NumPy's npy, and atomic replacement of any file.
//!
//! All formats are little-endian, and so must the machine be.

pub mod atomic;
mod map;
mod npy;
mod safetensors;

pub use npy::{load_npy, load_npy_as, read_npy, save_npy, write_npy};
pub use safetensors::{SafeTensors, save_safetensors};

const _: () = assert!(cfg!(target_endian = "little"), "files are little-endian");

/// Bytes of a tensor of that shape, if there can be one: its sizes but for zeros are counted even where one is 0.
fn bytes_of(shape: &[usize], dtype: crate::DType) -> Option<usize> {
    let sizes = shape.iter().filter(|&&n| n > 0);
    let bytes = sizes.copied().try_fold(dtype.size(), usize::checked_mul)?;
    (bytes <= isize::MAX as usize).then_some(if shape.contains(&0) { 0 } else { bytes })
}
