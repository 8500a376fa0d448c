//! A device's memory: a virtual address space with allocations in it.
//!
//! ```text
//! Memory ── a lock ── AddressSpace ── Allocation ── Contents: bytes, which were written, which a copy has yet to write,
//!                                                             and the shadow with the last accesses (while a kernel runs)
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::Fault;
use crate::memory::shadow::Shadow;

pub(crate) mod shadow;
mod space;

pub(crate) use space::AddressSpace;

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
/// Memories made so far: each has addresses of its own, so peers can be told apart. The first begins at 2^44, so that
/// no small number is an address.
static SPACES: AtomicU64 = AtomicU64::new(1);
/// Numbers of memories that there are before the windows of other spaces begin at 2^56.
const SPACES_MAX: u64 = (1 << (56 - SPACE_BITS)) - 1;

/// Where allocations are placed among the addresses of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// In the order in which they are made.
    Ascending,
    /// At random addresses: two allocations are as good as never at the distance that a wrong index leads to.
    Random {
        /// The same seed gives the same addresses to the same allocations.
        seed: u64,
    },
}

/// A device's memory: addresses are 64-bit and never those of the host, allocations are aligned to 256 bytes with
/// unmapped gaps between them that are at least as large as the allocation before and 1 MiB, and every byte knows
/// whether it was ever written.
///
/// All methods take `&self`; a launch holds the memory until the kernel has ended.
#[derive(Debug)]
pub struct Memory {
    space: Mutex<AddressSpace>,
    order: u64,
}

impl Memory {
    /// A memory of that many bytes, all free.
    pub fn new(capacity_bytes: u64) -> Memory {
        Memory::placed(capacity_bytes, Placement::Ascending)
    }

    /// A memory of that many bytes, all free, and how its allocations are to be placed.
    pub fn placed(capacity_bytes: u64, placement: Placement) -> Memory {
        let order = SPACES.fetch_add(1, Ordering::Relaxed);
        // Past the last number addresses repeat: memories 2^12 apart could then not be peers.
        let base = (1 + (order - 1) % SPACES_MAX) << SPACE_BITS;
        Memory {
            space: Mutex::new(AddressSpace::new(base, 1 << SPACE_BITS, capacity_bytes, placement)),
            order,
        }
    }

    /// A memory without contents: allocations are counted and accesses from the host checked as in any other, writes are
    /// lost, and reads give zeros. So it may be larger than the host's. No kernel can run on it.
    pub fn without_contents(capacity_bytes: u64) -> Memory {
        let memory = Memory::new(capacity_bytes);
        memory.lock().has_contents = false;
        memory
    }

    /// Allocates; the contents count as never written.
    ///
    /// # Errors
    /// If that many bytes are not free.
    pub fn allocate(&self, bytes: u64) -> Result<u64, OutOfMemory> {
        self.lock().allocate(bytes)
    }

    /// As [`Memory::allocate`], without counting the bytes as allocated: they are part of what was [reserved](Memory::reserve).
    ///
    /// # Errors
    /// If there is no room in the address space.
    pub fn allocate_reserved(&self, bytes: u64) -> Result<u64, OutOfMemory> {
        self.lock().allocate_reserved(bytes)
    }

    /// Counts bytes as allocated for allocations that share them one after the other.
    ///
    /// # Errors
    /// If that many bytes are not free.
    pub fn reserve(&self, bytes: u64) -> Result<(), OutOfMemory> {
        self.lock().reserve(bytes)
    }

    /// Takes back what was reserved.
    pub fn release(&self, bytes: u64) {
        let mut space = self.lock();
        space.used = space.used.saturating_sub(bytes);
    }

    /// An allocation of reserved bytes counts from now on like any other.
    pub fn count(&self, address: u64) {
        self.lock().count(address);
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

    /// Whether all of the bytes were written.
    ///
    /// # Errors
    /// If they were not: the fault names the first that was not, and where a kernel stored what depends on such bytes.
    pub fn check_written(&self, address: u64, bytes: u64) -> Result<(), Fault> {
        self.lock().check_written(address, bytes)
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

    /// Copies bytes within this memory; what was never written counts as never written at its new place too. The
    /// ranges may overlap.
    ///
    /// # Errors
    /// If the bytes of either end are not all in one allocation.
    pub fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), Fault> {
        self.copy_from(to, self, from, bytes)
    }

    /// Copies bytes from another memory, like [`Memory::copy`].
    ///
    /// # Errors
    /// If the bytes of either end are not all in one allocation.
    pub fn copy_from(&self, to: u64, other: &Memory, from: u64, bytes: u64) -> Result<(), Fault> {
        let taken = other.lock().take(from, bytes)?;
        self.lock().put(to, bytes, &taken)
    }

    /// The start and the bytes of the allocation that an address is in.
    pub fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        self.lock().find(address, 1).map(|a| (a.start, a.bytes))
    }

    /// Bytes allocated.
    pub fn used(&self) -> u64 {
        self.lock().used
    }

    /// The most bytes that were allocated at a time since [`Memory::restart_peak`].
    pub fn peak(&self) -> u64 {
        self.lock().peak
    }

    /// The peak is what is allocated now.
    pub fn restart_peak(&self) {
        let mut space = self.lock();
        space.peak = space.used;
    }

    /// Bytes of the device.
    pub fn capacity(&self) -> u64 {
        self.lock().capacity
    }

    /// The contents. A panic under the lock left them as valid as any kernel's end does.
    pub(crate) fn lock(&self) -> MutexGuard<'_, AddressSpace> {
        self.space.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The order in which several memories are locked.
    pub(crate) fn order(&self) -> u64 {
        self.order
    }
}

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

/// The bytes of an allocation, or of a block's shared memory.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub(crate) data: Vec<u8>,
    /// Which bytes were ever written.
    pub(crate) written: Bits,
    /// Bytes that an asynchronous copy has still to write; `None` if there never was one.
    pub(crate) pending: Option<Bits>,
    /// The last accesses, while a kernel runs.
    pub(crate) shadow: Shadow,
    /// Where a kernel first stored what depends on bytes that nothing has written.
    pub(crate) unwritten_by: Option<Box<str>>,
}

impl Contents {
    /// That many bytes, none written.
    pub(crate) fn new(len: usize) -> Contents {
        let (data, written) = (vec![0; len], Bits::new(len));
        Contents { data, written, pending: None, shadow: Shadow::default(), unwritten_by: None }
    }

    /// All bytes count as never written again.
    pub(crate) fn forget(&mut self) {
        self.written.clear(self.data.len());
        self.pending = None;
        self.unwritten_by = None;
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

/// A row of bits, with the number of those that are not set.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bits {
    words: Vec<u64>,
    unset: usize,
}

/// The bits `start..end` of a word; `end` is at most 64.
fn span(start: usize, end: usize) -> u64 {
    let below = if end == 64 { u64::MAX } else { (1 << end) - 1 };
    below & !((1u64 << start) - 1)
}

impl Bits {
    /// `len` bits, none set.
    pub(crate) fn new(len: usize) -> Bits {
        Bits { words: vec![0; len.div_ceil(64)], unset: len }
    }

    /// Whether every bit there is is set: then nothing needs to be looked up.
    pub(crate) fn full(&self) -> bool {
        self.unset == 0
    }

    /// Unsets all.
    pub(crate) fn clear(&mut self, len: usize) {
        self.words.clear();
        self.words.resize(len.div_ceil(64), 0);
        self.unset = len;
    }

    /// Calls `f` with every word that `start..end` touches and the bits of it that are meant.
    fn spans(start: usize, end: usize, mut f: impl FnMut(usize, u64)) {
        let mut at = start;
        while at < end {
            let word = at / 64;
            let stop = end.min((word + 1) * 64);
            f(word, span(at % 64, stop - word * 64));
            at = stop;
        }
    }

    /// Sets `start..end`.
    pub(crate) fn set(&mut self, start: usize, end: usize) {
        if self.full() {
            return;
        }
        let (words, mut fresh) = (&mut self.words, 0);
        Bits::spans(start, end, |word, mask| {
            fresh += (mask & !words[word]).count_ones() as usize;
            words[word] |= mask;
        });
        self.unset -= fresh;
    }

    /// Unsets `start..end`.
    pub(crate) fn unset(&mut self, start: usize, end: usize) {
        let (words, mut gone) = (&mut self.words, 0);
        Bits::spans(start, end, |word, mask| {
            gone += (mask & words[word]).count_ones() as usize;
            words[word] &= !mask;
        });
        self.unset += gone;
    }

    /// Whether all of `start..end` are set.
    pub(crate) fn all(&self, start: usize, end: usize) -> bool {
        if self.full() {
            return true;
        }
        let mut all = true;
        Bits::spans(start, end, |word, mask| all &= self.words[word] & mask == mask);
        all
    }

    /// One bit.
    pub(crate) fn get(&self, at: usize) -> bool {
        self.full() || self.words[at / 64] >> (at % 64) & 1 == 1
    }

    /// Whether any of `start..end` is set.
    pub(crate) fn any(&self, start: usize, end: usize) -> bool {
        let mut any = false;
        Bits::spans(start, end, |word, mask| any |= self.words[word] & mask != 0);
        any
    }

    /// The bits `start..start + n` as the low bits of a number; `n` is at most 8.
    pub(crate) fn few(&self, start: usize, n: usize) -> u8 {
        (0..n).fold(0, |bits, i| bits | (self.get(start + i) as u8) << i)
    }
}

#[cfg(test)]
mod tests {
    use super::Bits;

    #[test]
    fn ranges_over_words_are_set_counted_and_unset() {
        let mut bits = Bits::new(200);
        bits.set(3, 130);
        assert!(bits.all(3, 130) && !bits.all(2, 4) && !bits.all(129, 131));
        assert!(bits.any(100, 131) && !bits.any(130, 200));
        bits.set(0, 200);
        assert!(bits.full());
        bits.unset(63, 65);
        assert!(!bits.full() && !bits.get(63) && !bits.get(64) && bits.get(62) && bits.get(65));
        assert_eq!(bits.few(62, 4), 0b1001);
        bits.set(63, 65);
        assert!(bits.full());
    }
}
