//! [`Stream`]: a rank's file while it is written.

use std::fs::File;
use std::io::{self, ErrorKind, Write};

use super::chunk::{Chunk, PAGE};

/// Bytes that the system's cache may hold back. A bound keeps the sync at the end of a file short.
const UNSYNCED_MAX: usize = 64 << 20;

/// An open file. Where the system can, the disk reads chunks from our memory. The system's cache would cost a copy, and fresh
/// pages, of what is not read soon: most of a save's time.
pub(super) struct Stream {
    file: File,
    direct: bool,
    unsynced: usize,
}

impl Stream {
    /// Into an empty file.
    pub(super) fn new(file: File) -> Stream {
        let direct = set_direct(&file, true).is_ok();
        Stream { file, direct, unsynced: 0 }
    }

    /// Writes the next chunk, of which only the last may be short.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn add(&mut self, chunk: &Chunk) -> io::Result<()> {
        let mut rest = chunk.bytes();
        while !rest.is_empty() {
            let pages = rest.len() / PAGE * PAGE;
            if self.direct && (pages == 0 || !rest.as_ptr().addr().is_multiple_of(PAGE)) {
                self.use_cache()?;
            }
            match self.file.write(if self.direct { &rest[..pages] } else { rest }) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => rest = &rest[written..],
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // Some file systems find out only now that they cannot.
                Err(e) if self.direct && e.kind() == ErrorKind::InvalidInput => self.use_cache()?,
                Err(e) => return Err(e),
            }
        }
        if !self.direct {
            self.unsynced += chunk.bytes().len();
        }
        if self.unsynced > UNSYNCED_MAX {
            self.file.sync_data()?;
            self.unsynced = 0;
        }
        Ok(())
    }

    /// Puts everything on disk.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn finish(self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn use_cache(&mut self) -> io::Result<()> {
        self.direct = false;
        set_direct(&self.file, false)
    }
}

/// Whether writes go past the system's cache.
#[cfg(target_os = "linux")]
fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};

    let mut flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    flags.set(OFlag::O_DIRECT, direct);
    fcntl(file, FcntlArg::F_SETFL(flags))?;
    Ok(())
}

/// Other systems have other ways.
#[cfg(not(target_os = "linux"))]
fn set_direct(_: &File, direct: bool) -> io::Result<()> {
    if direct { Err(ErrorKind::Unsupported.into()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::super::chunk::CHUNK;
    use super::*;

    #[test]
    fn files_of_every_length_are_whole_with_the_cache_and_without() {
        let path = std::env::temp_dir().join(format!("phalanx-stream-{}", std::process::id()));
        for bytes in [0, 1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, 2 * CHUNK + 3 * PAGE + 77] {
            let wanted: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
            for may_be_direct in [true, false] {
                let mut stream = Stream::new(File::create(&path).unwrap());
                if !may_be_direct {
                    stream.use_cache().unwrap();
                }
                let mut rest = &wanted[..];
                while !rest.is_empty() {
                    let mut chunk = Chunk::with_room();
                    rest = chunk.fill(rest);
                    stream.add(&chunk).unwrap();
                }
                stream.finish().unwrap();
                assert!(std::fs::read(&path).unwrap() == wanted, "{bytes} bytes");
            }
        }
        std::fs::remove_file(&path).unwrap();
    }
}
