//! Files that are read a part at a time, and files that are written completely or not at all.
//!
//! Parts are read at a position (`pread`) rather than through a memory map. This needs no unsafe code, and a file that another program
//! truncates while it is open is an error instead of a bus error. Both ways use the system's page cache.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use phalanx_tensor::io::atomic;

use super::wrong;
use crate::{Error, Result};

/// An open file. Any number of threads read it.
#[derive(Debug)]
pub(super) struct RandomAccessFile {
    file: File,
    path: PathBuf,
    len: u64,
}

impl RandomAccessFile {
    /// Opens a regular file that is not empty.
    pub(super) fn open(path: &Path) -> Result<RandomAccessFile> {
        let refuse = |why: io::Error| wrong(path.display(), why);
        // The type is checked before opening, because opening a pipe would wait for a writer.
        let about = std::fs::metadata(path).map_err(refuse)?;
        if !about.is_file() {
            return Err(wrong(path.display(), "got no regular file, wanted one"));
        }
        let file = File::open(path).map_err(refuse)?;
        let len = file.metadata().map_err(refuse)?.len();
        match len {
            0 => Err(wrong(path.display(), "got an empty file, wanted data")),
            _ => Ok(RandomAccessFile { file, path: path.into(), len }),
        }
    }

    /// Bytes in the file when it was opened.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// An error about this file.
    pub(super) fn wrong(&self, why: impl std::fmt::Display) -> Error {
        wrong(self.path.display(), why)
    }

    /// Fills `to` with the bytes from `at` on.
    pub(super) fn read(&self, at: u64, to: &mut [u8]) -> Result<()> {
        read_exact_at(&self.file, at, to)
            .map_err(|e| self.wrong(format!("got no {} bytes at byte {at} of {}: {e}", to.len(), self.len)))
    }

    /// The bytes from `at` on.
    pub(super) fn bytes<const N: usize>(&self, at: u64) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read(at, &mut bytes)?;
        Ok(bytes)
    }

    /// Calls `f` with the bytes of a range, block by block in order; every block but the last has `block` bytes.
    pub(super) fn each_block(
        &self,
        range: std::ops::Range<u64>,
        block: usize,
        mut f: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut buffer = vec![0; (range.end.saturating_sub(range.start)).min(block as u64) as usize];
        let mut at = range.start;
        while at < range.end {
            let part = (range.end - at).min(block as u64) as usize;
            self.read(at, &mut buffer[..part])?;
            f(at, &buffer[..part])?;
            at += part as u64;
        }
        Ok(())
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, at: u64, to: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, to, at)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut at: u64, mut to: &mut [u8]) -> io::Result<()> {
    while !to.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, to, at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                at += n as u64;
                to = &mut to[n..];
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Replaces the file at `path` by what `fill` writes, once all of it is on disk. After an error the old file is unchanged.
pub(super) fn write_whole<R>(path: &Path, fill: impl FnOnce(&mut dyn Write) -> Result<R>) -> Result<R> {
    let mut outcome = None;
    let written = atomic::write(path, |out| match outcome.insert(fill(out)) {
        Ok(_) => Ok(()),
        // This only ends the write; the error itself is returned below.
        Err(error) => Err(io::Error::other(error.to_string())),
    });
    match outcome {
        Some(Err(error)) => Err(error),
        Some(Ok(value)) => written.map(|()| value).map_err(Error::from),
        None => Err(wrong(path.display(), written.err().map_or(String::new(), |e| e.to_string()))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Folder;
    use super::*;

    #[test]
    fn parts_are_read_where_they_lie() {
        let folder = Folder::new();
        let bytes = RandomAccessFile::open(&folder.file("a", b"0123456789")).unwrap();
        assert_eq!(&bytes.bytes::<3>(4).unwrap(), b"456");
        let mut blocks = Vec::new();
        let see = |at: u64, block: &[u8]| {
            blocks.push((at, block.to_vec()));
            Ok(())
        };
        bytes.each_block(1..8, 3, see).unwrap();
        assert_eq!(blocks, [(1, b"123".to_vec()), (4, b"456".to_vec()), (7, b"7".to_vec())]);
    }

    #[test]
    fn a_file_that_was_cut_short_is_an_error() {
        let folder = Folder::new();
        let path = folder.file("a", b"0123456789");
        let bytes = RandomAccessFile::open(&path).unwrap();
        std::fs::write(&path, b"01").unwrap();
        let error = bytes.bytes::<4>(6).unwrap_err().to_string();
        assert!(error.contains("got no 4 bytes at byte 6 of 10"), "{error}");
    }

    #[test]
    fn what_is_no_file_with_bytes_is_refused() {
        let folder = Folder::new();
        let error = |path: &Path| RandomAccessFile::open(path).unwrap_err().to_string();
        assert!(error(&folder.path("none")).starts_with(&folder.path("none").display().to_string()));
        assert!(error(folder.as_ref()).ends_with("got no regular file, wanted one"));
        assert!(error(&folder.file("empty", b"")).ends_with("got an empty file, wanted data"));
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = Folder::new();
        let path = folder.file("a", b"old");
        let error = write_whole(&path, |out| {
            out.write_all(b"new").map_err(|e| wrong("a", e))?;
            Err::<(), _>(wrong("mine", "no more"))
        });
        assert_eq!(error.unwrap_err().to_string(), "mine: no more");
        assert_eq!((std::fs::read(&path).unwrap(), folder.names()), (b"old".to_vec(), vec!["a".to_string()]));
        assert_eq!(
            write_whole(&path, |out| out.write_all(b"new").map_err(|e| wrong("a", e)).map(|()| 7)).unwrap(),
            7
        );
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        let nowhere = write_whole(&folder.path("no/such"), |_| Ok(())).unwrap_err().to_string();
        assert!(nowhere.contains("such"), "{nowhere}");
    }
}
