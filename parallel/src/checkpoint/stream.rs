//! [`Stream`]: a rank's file, written block by block through one buffer.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;

use phalanx_tensor::DType;

use super::assign::Described;
use super::xxh64::xxh64;
use crate::part::Part;
use crate::{Error, Result};

/// Bytes that the system may hold back, so that the end of a file is not the end of a long wait.
const UNSYNCED_MAX: usize = 64 << 20;

/// A part that must not change while it is written.
pub(super) struct Pinned {
    part: Part,
    version: u64,
}

impl Pinned {
    /// As it is now; a buffer is copied, since passes change it.
    ///
    /// # Errors
    /// If a buffer cannot be copied.
    pub(super) fn new(part: Part) -> Result<Pinned> {
        let values = if part.buffer { part.values.copy()? } else { part.values };
        let version = values.version();
        Ok(Pinned { part: Part { values, ..part }, version })
    }

    /// What other ranks are told of it.
    ///
    /// # Errors
    /// If it is not well-formed or has no elements to write.
    pub(super) fn describe(&self) -> Result<Described> {
        let Part { name, values, buffer, .. } = &self.part;
        if values.device().is_meta() {
            return Err(Error::Config(format!("save: {name} is on meta and has no elements")));
        }
        let place = self.part.place()?;
        Ok(Described { name: name.clone(), dtype: values.dtype(), place, buffer: *buffer })
    }

    /// Adds the bytes of some elements to a buffer. The tensor is held for reading only meanwhile.
    ///
    /// # Errors
    /// If the tensor has been written since it was pinned, or cannot be read.
    pub(super) fn append(&self, elements: Range<usize>, buffer: &mut Vec<u8>) -> Result<()> {
        let values = &self.part.values;
        let (size, count) = (values.dtype().size(), elements.len());
        let here = values.view_into(elements.start, &[count])?;
        // A GPU's elements are waited for.
        let here = if here.device().is_cuda() { here.to_device(here.device().host(), true)? } else { here };
        let bytes = here.read_bytes("save")?;
        let bytes = &bytes[here.offset() * size..][..count * size];
        match values.dtype() {
            // Any byte but 0 is true, which other readers need not know.
            DType::Bool => buffer.extend(bytes.iter().map(|&byte| u8::from(byte != 0))),
            _ => buffer.extend_from_slice(bytes),
        }
        if values.version() != self.version {
            let why = "it was written while it was being saved; wait for the save first";
            return Err(phalanx_nn::Error::invalid(format!("saving {}", self.part.name), why).into());
        }
        Ok(())
    }
}

/// An open file, and the checksums of what went there.
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

    /// Adds a block, which is not larger than the buffer.
    ///
    /// # Errors
    /// As [`Pinned::append`], or if the file cannot be written.
    pub(super) fn add(&mut self, tensor: &Pinned, elements: Range<usize>) -> Result<(), String> {
        let bytes = elements.len() * tensor.part.values.dtype().size();
        if self.buffer.len() + bytes > self.buffer.capacity() {
            self.flush().map_err(|e| e.to_string())?;
        }
        let start = self.buffer.len();
        tensor.append(elements, &mut self.buffer).map_err(|e| e.to_string())?;
        self.checksums.push(xxh64(&self.buffer[start..]));
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
        self.file.write_all(&self.buffer)?;
        self.unsynced += self.buffer.len();
        self.buffer.clear();
        if self.unsynced > UNSYNCED_MAX {
            self.file.sync_data()?;
            self.unsynced = 0;
        }
        Ok(())
    }
}
