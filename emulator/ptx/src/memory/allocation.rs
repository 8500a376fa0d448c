//! One allocation: where it is, and its contents.

use super::Contents;

/// A range of addresses with contents.
#[derive(Debug)]
pub(crate) struct Allocation {
    /// The first address.
    pub(crate) start: u64,
    /// How many bytes it has.
    pub(crate) bytes: u64,
    pub(crate) contents: Contents,
}

impl Allocation {
    /// An allocation whose bytes count as never written.
    pub(crate) fn new(start: u64, bytes: u64) -> Allocation {
        Allocation { start, bytes, contents: Contents::new(bytes as usize) }
    }

    /// Whether `bytes` bytes from `address` on are all in it.
    pub(crate) fn holds(&self, address: u64, bytes: u64) -> bool {
        address >= self.start && bytes <= self.bytes && address - self.start <= self.bytes - bytes
    }

    /// Where an address that it holds is in its contents.
    pub(crate) fn offset(&self, address: u64) -> usize {
        (address - self.start) as usize
    }
}
