//! Bytes with what is known of each: whether it was written, is under way, and who touched it last.

use super::Bits;
use crate::machine::Shadow;

/// The bytes of an allocation, or of a block's shared memory.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub(crate) data: Vec<u8>,
    /// Which bytes were ever written.
    pub(crate) written: Bits,
    /// Bytes that an asynchronous copy has still to write; `None` if there never was one.
    pub(crate) pending: Option<Bits>,
    /// Who touched what, while a kernel runs.
    pub(crate) shadow: Shadow,
}

impl Contents {
    /// That many bytes, none written.
    pub(crate) fn new(len: usize) -> Contents {
        let (data, written) = (vec![0; len], Bits::new(len));
        Contents { data, written, pending: None, shadow: Shadow::default() }
    }

    /// All bytes count as never written again.
    pub(crate) fn forget(&mut self) {
        self.written.clear(self.data.len());
        self.pending = None;
    }

    /// Up to eight bytes as a number.
    #[inline(always)]
    pub(crate) fn number(&self, at: usize, size: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(&self.data[at..at + size]);
        u64::from_le_bytes(bytes)
    }

    /// Writes the low bytes of a number.
    #[inline(always)]
    pub(crate) fn set_number(&mut self, at: usize, size: usize, value: u64) {
        self.data[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        self.written.set(at, at + size);
    }

    /// Bytes will be written by an asynchronous copy, and count as unwritten until then.
    pub(crate) fn announce(&mut self, start: usize, end: usize) {
        let len = self.data.len();
        self.pending.get_or_insert_with(|| Bits::new(len)).set(start, end);
        self.written.unset(start, end);
    }

    /// An asynchronous copy has written bytes, of which `written` says whether each ever was at its source.
    pub(crate) fn land(&mut self, start: usize, data: &[u8], written: impl Fn(usize) -> bool) {
        let end = start + data.len();
        self.data[start..end].copy_from_slice(data);
        if let Some(pending) = &mut self.pending {
            pending.unset(start, end);
        }
        if (0..data.len()).all(&written) {
            self.written.set(start, end);
            return;
        }
        self.written.unset(start, end);
        for byte in (0..data.len()).filter(|&byte| written(byte)) {
            self.written.set(start + byte, start + byte + 1);
        }
    }

    /// Whether one of the bytes is still under way.
    pub(crate) fn under_way(&self, start: usize, end: usize) -> bool {
        self.pending.as_ref().is_some_and(|pending| pending.any(start, end))
    }
}
