//! [`MappedFile`]: a file in which tensors of CPU devices have their elements, mapped into memory.
//!
//! ```text
//! file      │ exp_avg of a │ exp_avg_sq of a │ exp_avg of b │ free │ ...     ranges of whole pages, each mapped by itself
//! memory         map              map             map                       a page is read when it is used, and written back later
//! ```
//! The system's page cache holds of the file what fits into memory.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

use memmap2::{MmapMut, MmapOptions};

use super::atomic::is_at;
use crate::sync::lock;
use crate::{Error, Result};

/// Ranges begin at multiples of this many bytes: a page, and more than any alignment of elements.
const PAGE: u64 = 4096;
/// The file grows by this many bytes at a time.
const WRITE: usize = 1 << 20;

/// All files that are open, by number.
static OPEN: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// A file for tensors' elements. It is removed when this and all tensors in it are dropped.
#[derive(Debug)]
pub struct MappedFile {
    inner: Arc<Inner>,
    number: u32,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    file: File,
    ranges: Mutex<Ranges>,
}

/// Which bytes of the file are used.
#[derive(Debug, Default)]
struct Ranges {
    end: u64,
    /// The lengths of the ranges that are not used, by their starts. No two of them touch.
    free: BTreeMap<u64, u64>,
}

impl Ranges {
    /// The start of an unused range of so many bytes, out of the smallest that has room.
    fn take(&mut self, length: u64) -> Option<u64> {
        let fitting = self.free.iter().filter(|&(_, &free)| free >= length);
        let (start, free) = fitting.map(|(&start, &free)| (start, free)).min_by_key(|&(_, free)| free)?;
        self.free.remove(&start);
        if free > length {
            self.free.insert(start + length, free - length);
        }
        Some(start)
    }

    /// A range is not used any more: joins it to those beside it.
    fn give_back(&mut self, (mut start, mut length): (u64, u64)) {
        if let Some(after) = self.free.remove(&(start + length)) {
            length += after;
        }
        if let Some((&before, &free)) = self.free.range(..start).next_back()
            && before + free == start
        {
            (start, length) = (before, free + length);
        }
        self.free.insert(start, length);
    }
}

/// How often a file is opened that another process removes meanwhile.
const ATTEMPTS: usize = 100;

impl MappedFile {
    /// An empty file, in place of one that an earlier process has left there.
    ///
    /// # Errors
    /// If it cannot be made or written, or another process uses it.
    pub fn create(path: impl Into<PathBuf>) -> Result<MappedFile> {
        let path = path.into();
        let open = || {
            for _ in 0..ATTEMPTS {
                let file =
                    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
                if let Err(TryLockError::WouldBlock) = file.try_lock() {
                    return Err(std::io::Error::other(
                        "another process, or another run in this one, uses it",
                    ));
                }
                // A process that ends removes the file, perhaps after this one has opened it.
                if is_at(&file, &path)? {
                    file.set_len(0)?;
                    return Ok(file);
                }
            }
            Err(std::io::Error::other("other files take its name again and again"))
        };
        let file = open().map_err(|error| failed(&path, "cannot hold tensors", &error))?;
        let inner = Arc::new(Inner { path, file, ranges: Mutex::default() });
        let mut open = lock(&OPEN);
        let number = match open.iter().position(|known| known.strong_count() == 0) {
            Some(free) => free,
            None => {
                open.push(Weak::new());
                open.len() - 1
            }
        };
        open[number] = Arc::downgrade(&inner);
        Ok(MappedFile { inner, number: number as u32 })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // If it is gone already, nothing is left to do. Another file of its name is another process's.
        if is_at(&self.file, &self.path).unwrap_or(false) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn failed(path: &Path, what: &str, error: &std::io::Error) -> Error {
    Error::File { path: path.display().to_string(), why: format!("{what}: {error}") }
}

/// A part of a [`MappedFile`] in memory.
#[derive(Debug)]
pub(crate) struct FileBlock {
    map: MmapMut,
    range: (u64, u64),
    inner: Arc<Inner>,
}

impl FileBlock {
    /// At least `bytes` bytes of the open file of this number. The disk has room for them.
    pub(crate) fn obtain(number: u32, bytes: usize) -> Result<FileBlock> {
        let inner = lock(&OPEN).get(number as usize).and_then(Weak::upgrade);
        let closed =
            || Error::invalid("host_memory", "got the memory of a file that is closed, wanted an open one");
        let inner = inner.ok_or_else(closed)?;
        let length = (bytes as u64).next_multiple_of(PAGE);
        let start = inner.take(length).map_err(|error| {
            failed(&inner.path, &format!("has no room for {bytes} bytes of tensors"), &error)
        })?;
        // SAFETY: the range is this block's alone, and the file is locked: other processes of Phalanx leave it as it is.
        let map = unsafe { MmapOptions::new().offset(start).len(length as usize).map_mut(&inner.file) };
        match map {
            Ok(map) => Ok(FileBlock { map, range: (start, length), inner }),
            Err(error) => {
                let failed = failed(&inner.path, "cannot be mapped", &error);
                inner.give_back((start, length));
                Err(failed)
            }
        }
    }

    /// The first byte.
    pub(crate) fn start(&mut self) -> Option<NonNull<u8>> {
        NonNull::new(self.map.as_mut_ptr())
    }

    /// Takes its pages out of the process's memory. The file has them, and the system reads them again when they are used.
    pub(crate) fn release_pages(&self) {
        // SAFETY: of a shared map of a file the system keeps what was written; only the process's view of it goes.
        #[cfg(unix)]
        let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }
}

impl Drop for FileBlock {
    fn drop(&mut self) {
        self.inner.give_back(self.range);
    }
}

impl Inner {
    /// A range of so many bytes that the disk has.
    fn take(&self, length: u64) -> std::io::Result<u64> {
        let mut ranges = lock(&self.ranges);
        if let Some(start) = ranges.take(length) {
            return Ok(start);
        }
        let start = ranges.end;
        // A page that the disk has no room for would end the process when it is first written. So the room is taken here.
        if let Err(error) = self.grow(start, length) {
            let _ = self.file.set_len(start);
            return Err(error);
        }
        ranges.end += length;
        Ok(start)
    }

    fn grow(&self, start: u64, length: u64) -> std::io::Result<()> {
        let zeros = vec![0; WRITE.min(length as usize)];
        let mut file = &self.file;
        file.seek(SeekFrom::Start(start))?;
        let mut left = length as usize;
        while left > 0 {
            let part = left.min(zeros.len());
            file.write_all(&zeros[..part])?;
            left -= part;
        }
        Ok(())
    }

    fn give_back(&self, range: (u64, u64)) {
        lock(&self.ranges).give_back(range);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn a_file_that_has_taken_the_name_is_not_removed() {
        let path = std::env::temp_dir().join(format!("phalanx-renamed-{}", std::process::id()));
        let file = MappedFile::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let other = MappedFile::create(&path).unwrap();
        drop(file);
        assert!(path.exists());
        drop(other);
        assert!(!path.exists());
    }

    #[test]
    fn state_that_is_dropped_and_made_again_takes_no_more_of_the_file() {
        let path = std::env::temp_dir().join(format!("phalanx-mapped-{}", std::process::id()));
        let file = MappedFile::create(&path).unwrap();
        let obtain = |pages: &[usize]| -> Vec<FileBlock> {
            let block = |&pages: &usize| FileBlock::obtain(file.number(), pages * PAGE as usize).unwrap();
            pages.iter().map(block).collect()
        };
        let state = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3];
        let size = || lock(&file.inner.ranges).end / PAGE;
        let mut blocks = obtain(&state);
        assert_eq!(size(), 39);
        for step in [7, 3, 9] {
            // They are given back in other orders than they were taken.
            while !blocks.is_empty() {
                drop(blocks.swap_remove(step % blocks.len()));
            }
            assert_eq!(lock(&file.inner.ranges).free.len(), 1);
            blocks = obtain(&state);
            assert_eq!(size(), 39);
        }
        // A small block takes the smallest range with room, so that large blocks find theirs.
        drop(blocks.remove(9));
        drop(blocks.remove(5));
        let again = obtain(&[3, 9]);
        assert_eq!(size(), 39);
        drop(again);
    }
}
