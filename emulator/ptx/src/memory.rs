//! A device's memory: a virtual address space with allocations in it.

mod allocation;
mod bits;
mod contents;
mod space;

pub(crate) use allocation::Allocation;
pub(crate) use bits::Bits;
pub(crate) use contents::Contents;
pub(crate) use space::Space;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::Fault;

/// An allocation that does not fit into what is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {wanted} bytes wanted, {left} of {capacity} are left")]
pub struct OutOfMemory {
    /// The bytes asked for.
    pub wanted: u64,
    /// The bytes left.
    pub left: u64,
    /// The bytes of the device.
    pub capacity: u64,
}

/// Bits of an address below the number of its memory.
const SPACE_BITS: u32 = 44;
/// Memories made so far: each has addresses of its own, so peers can be told apart. The first begins at 2^44, so that no small
/// number is an address.
static SPACES: AtomicU64 = AtomicU64::new(1);
/// Numbers of memories that there are before the windows of other spaces begin at 2^56.
const SPACES_MAX: u64 = (1 << (56 - SPACE_BITS)) - 1;

/// A device's memory: addresses are 64-bit and never those of the host, allocations are aligned to 256 bytes with unmapped gaps
/// between them, and every byte knows whether it was ever written.
///
/// All methods take `&self`; a launch holds the memory until the kernel has ended.
#[derive(Debug)]
pub struct Memory {
    space: Mutex<Space>,
    order: u64,
}

impl Memory {
    /// A memory of that many bytes, all free.
    pub fn new(capacity_bytes: u64) -> Memory {
        let order = SPACES.fetch_add(1, Ordering::Relaxed);
        // Past the last number addresses repeat: memories 2^12 apart could then not be peers.
        let base = (1 + (order - 1) % SPACES_MAX) << SPACE_BITS;
        Memory { space: Mutex::new(Space::new(base, 1 << SPACE_BITS, capacity_bytes)), order }
    }

    /// Allocates; the contents count as never written.
    ///
    /// # Errors
    /// If that many bytes are not free.
    pub fn allocate(&self, bytes: u64) -> Result<u64, OutOfMemory> {
        self.lock().allocate(bytes)
    }

    /// Frees an allocation.
    ///
    /// # Errors
    /// If no allocation begins at `address`.
    pub fn free(&self, address: u64) -> Result<(), Fault> {
        self.lock().free(address)
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// If they are not all in one allocation.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.lock().write(address, bytes)
    }

    /// Reads bytes. Those never written read as [`Memory::POISON`].
    ///
    /// # Errors
    /// If they are not all in one allocation.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        self.lock().read(address, bytes)
    }

    /// What a byte reads as that was never written: such a float is no number a kernel computes with by accident.
    pub const POISON: u8 = 0xfb;

    /// Writes `pattern` `count` times, one after the other.
    ///
    /// # Errors
    /// If the bytes are not all in one allocation.
    pub fn fill(&self, address: u64, pattern: &[u8], count: u64) -> Result<(), Fault> {
        self.lock().fill(address, pattern, count)
    }

    /// Copies bytes within this memory; what was never written counts as never written at its new place too. The ranges may overlap.
    ///
    /// # Errors
    /// If the bytes of either end are not all in one allocation.
    pub fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), Fault> {
        let (data, written) = self.lock().take(from, bytes)?;
        self.lock().put(to, &data, &written)
    }

    /// Copies bytes from another memory, like [`Memory::copy`].
    ///
    /// # Errors
    /// If the bytes of either end are not all in one allocation.
    pub fn copy_from(&self, to: u64, other: &Memory, from: u64, bytes: u64) -> Result<(), Fault> {
        let (data, written) = other.lock().take(from, bytes)?;
        self.lock().put(to, &data, &written)
    }

    /// The start and the bytes of the allocation that an address is in.
    pub fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        self.lock().find(address, 1).map(|a| (a.start, a.bytes))
    }

    /// Bytes allocated.
    pub fn used(&self) -> u64 {
        self.lock().used
    }

    /// Bytes of the device.
    pub fn capacity(&self) -> u64 {
        self.lock().capacity
    }

    /// The contents. Whoever panicked with the lock left them as valid as any kernel's end does.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The order in which several memories are locked.
    pub(crate) fn order(&self) -> u64 {
        self.order
    }
}
