//! A file mapped into memory to be read.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;

use crate::{Error, Result};

/// A file's bytes, mapped.
///
/// The one thing safe Rust cannot rule out: somebody who changes or truncates the file *in place* while it is
/// mapped changes these bytes, or takes them away (a bus error). Files written by [`crate::io::atomic::write`] are
/// replaced, never changed in place, and a mapping of the old file keeps the old bytes. The map is private and
/// read-only, the crate copies out of it and hands out no reference to it.
#[derive(Debug)]
pub(crate) struct Map(memmap2::Mmap);

impl Map {
    /// Maps a regular file.
    pub(crate) fn open(path: &Path) -> Result<Map> {
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
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
