//! [`Stream`]: a rank's file while it is written.

use std::fs::File;
use std::io::{self, Write};

use super::index::checksum;

/// Bytes that the system may hold back. A bound keeps the sync at the end of a file short.
const UNSYNCED_MAX: usize = 64 << 20;

/// An open file, and the checksums of the blocks written to it.
pub(super) struct Stream {
    file: File,
    buffer: Vec<u8>,
    unsynced: usize,
    /// Of the blocks, in order.
    pub(super) checksums: Vec<u64>,
}

impl Stream {
    /// Into an empty file, with a buffer of that many bytes.
    ///
    /// # Errors
    /// If the header cannot be written.
    pub(super) fn new(mut file: File, header: &[u8], buffer: usize) -> io::Result<Stream> {
        file.write_all(header)?;
        Ok(Stream { file, buffer: Vec::with_capacity(buffer), unsynced: 0, checksums: Vec::new() })
    }

    /// Adds a block. Small ones are written together.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn add(&mut self, block: &[u8]) -> io::Result<()> {
        self.checksums.push(checksum(block));
        if self.buffer.len() + block.len() > self.buffer.capacity() {
            self.flush()?;
        }
        if block.len() >= self.buffer.capacity() {
            return self.write(block);
        }
        self.buffer.extend_from_slice(block);
        Ok(())
    }

    /// Puts everything on disk; the checksums.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn finish(mut self) -> io::Result<Vec<u64>> {
        self.flush()?;
        self.file.sync_all()?;
        Ok(self.checksums)
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        self.write(&buffer)?;
        buffer.clear();
        self.buffer = buffer;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.unsynced += bytes.len();
        if self.unsynced > UNSYNCED_MAX {
            self.file.sync_data()?;
            self.unsynced = 0;
        }
        Ok(())
    }
}
