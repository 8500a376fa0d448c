//! The address space behind a memory's lock: its allocations, the host's reads and writes, and what a launch touched.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Allocation, Contents, Memory, OutOfMemory, Placement};
use crate::{Fault, FaultKind, Touched};

/// Allocations begin at multiples of this, and at least as many bytes between two of them belong to neither.
const ALIGN: u64 = 256;
/// As long as there are addresses, so many bytes behind an allocation belong to none, or as many as it has.
const GAP: u64 = 1 << 20;
/// How often a random address is tried before the first free one is taken.
const DRAWS: usize = 64;
/// How many freed allocations are remembered, so that a use after free can be named.
const FREED_MAX: usize = 256;

/// Bytes of a range, on their way to another. Without contents there are none.
#[derive(Default)]
pub(crate) struct Taken {
    data: Vec<u8>,
    /// The parts that were ever written: start and end.
    written: Vec<(usize, usize)>,
    unwritten_by: Option<Box<str>>,
}

/// The allocations of a memory.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    /// Where each allocation is in `slots`, by its start.
    starts: BTreeMap<u64, usize>,
    slots: Vec<Option<Allocation>>,
    empty: Vec<usize>,
    freed: VecDeque<(u64, u64)>,
    base: u64,
    next: u64,
    end: u64,
    /// The generator of random addresses, if they are wanted.
    random: Option<u64>,
    /// The next number of a race record; those of earlier launches are smaller.
    pub(crate) record: u32,
    /// Bytes allocated.
    pub(crate) used: u64,
    /// The most of them.
    pub(crate) peak: u64,
    /// Allocations whose bytes are not counted: they are part of what was reserved.
    reserved: BTreeSet<u64>,
    /// Whether allocations have bytes that can be read and written.
    pub(crate) has_contents: bool,
    /// Bytes that may be allocated.
    pub(crate) capacity: u64,
}

impl AddressSpace {
    /// Addresses from `base` on, `room` of them, of which `capacity` bytes may be allocated at a time.
    pub(crate) fn new(base: u64, room: u64, capacity: u64, placement: Placement) -> AddressSpace {
        let (starts, slots, empty, freed) = (BTreeMap::new(), Vec::new(), Vec::new(), VecDeque::new());
        AddressSpace {
            starts,
            slots,
            empty,
            freed,
            base,
            next: base + ALIGN,
            end: base + room,
            random: match placement {
                Placement::Ascending => None,
                Placement::Random { seed } => Some(seed),
            },
            record: 1,
            used: 0,
            peak: 0,
            reserved: BTreeSet::new(),
            has_contents: true,
            capacity,
        }
    }

    /// Whether an address is one of this space, allocated or not.
    pub(crate) fn owns(&self, address: u64) -> bool {
        (self.base..self.end).contains(&address)
    }

    pub(crate) fn allocate(&mut self, bytes: u64) -> Result<u64, OutOfMemory> {
        if bytes > self.left() || bytes == 0 && self.capacity == 0 {
            return Err(self.refused(bytes));
        }
        let start = self.allocate_uncounted(bytes)?;
        self.add(bytes);
        Ok(start)
    }

    pub(crate) fn allocate_reserved(&mut self, bytes: u64) -> Result<u64, OutOfMemory> {
        let start = self.allocate_uncounted(bytes)?;
        self.reserved.insert(start);
        Ok(start)
    }

    pub(crate) fn reserve(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        if bytes > self.left() {
            return Err(self.refused(bytes));
        }
        self.add(bytes);
        Ok(())
    }

    pub(crate) fn count(&mut self, address: u64) {
        if self.reserved.remove(&address)
            && let Some(&slot) = self.starts.get(&address)
        {
            self.add(self.bytes(slot));
        }
    }

    fn left(&self) -> u64 {
        self.capacity.saturating_sub(self.used)
    }

    fn refused(&self, wanted: u64) -> OutOfMemory {
        OutOfMemory { wanted, left: self.left(), capacity: self.capacity }
    }

    fn add(&mut self, bytes: u64) {
        self.used += bytes;
        self.peak = self.peak.max(self.used);
    }

    fn allocate_uncounted(&mut self, bytes: u64) -> Result<u64, OutOfMemory> {
        let refused = self.refused(bytes);
        let taken = bytes.max(1).checked_next_multiple_of(ALIGN).ok_or(refused)?;
        let start = self.place(taken).ok_or(refused)?;
        let allocation = Some(match self.has_contents {
            true => Allocation::new(start, bytes),
            false => Allocation { start, bytes, contents: Contents::default() },
        });
        let slot = self.empty.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = allocation;
        self.starts.insert(start, slot);
        Ok(start)
    }

    /// A free range of so many bytes: addresses are used again only when all have been used once, or drawn again.
    fn place(&mut self, bytes: u64) -> Option<u64> {
        let taken = bytes + bytes.max(GAP);
        if self.random.is_some() {
            if let Some(start) = (0..DRAWS).find_map(|_| self.draw(taken)) {
                return Some(start);
            }
        } else if taken <= self.end - self.next {
            let start = self.next;
            self.next += taken;
            return Some(start);
        }
        self.first_free(bytes + ALIGN)
    }

    /// A random address with so many free bytes behind it, and a gap before it.
    fn draw(&mut self, taken: u64) -> Option<u64> {
        let state = self.random?.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random = Some(state);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let places = (self.end - self.base).checked_sub(taken)? / ALIGN;
        let start = self.base + (1 + (mixed ^ mixed >> 31) % places.max(1)) * ALIGN;
        let behind = self.starts.range(start..).next().is_none_or(|(&next, _)| start + taken <= next);
        let before = self.starts.range(..start).next_back().is_none_or(|(&other, &slot)| {
            let bytes = self.bytes(slot);
            other + bytes + bytes.max(GAP) <= start
        });
        (behind && before && start + taken <= self.end).then_some(start)
    }

    fn first_free(&self, taken: u64) -> Option<u64> {
        let mut at = self.base + ALIGN;
        for (&start, &slot) in &self.starts {
            if start >= at + taken {
                break;
            }
            let bytes = self.slots[slot].as_ref().map_or(0, |a| a.bytes);
            at = start + bytes.max(1).next_multiple_of(ALIGN) + ALIGN;
        }
        (at + taken <= self.end).then_some(at)
    }

    pub(crate) fn free(&mut self, address: u64) -> Result<(), Fault> {
        let Some(slot) = self.starts.remove(&address) else {
            let why = format!("{address:#x} is no allocation's start{}", self.near(address));
            return Err(Fault::outside(FaultKind::InvalidFree, why));
        };
        if let Some(allocation) = self.slots[slot].take() {
            if !self.reserved.remove(&address) {
                self.used -= allocation.bytes;
            }
            self.freed.push_back((allocation.start, allocation.bytes));
            if self.freed.len() > FREED_MAX {
                self.freed.pop_front();
            }
        }
        self.empty.push(slot);
        Ok(())
    }

    /// The slot of the allocation that holds all of the bytes.
    pub(crate) fn slot(&self, address: u64, bytes: u64) -> Option<usize> {
        let (_, &slot) = self.starts.range(..=address).next_back()?;
        self.slots[slot].as_ref().filter(|a| a.holds(address, bytes)).map(|_| slot)
    }

    /// The allocation in a slot.
    pub(crate) fn at(&mut self, slot: usize) -> Option<&mut Allocation> {
        self.slots.get_mut(slot)?.as_mut()
    }

    /// All allocations.
    pub(crate) fn allocations(&self) -> impl Iterator<Item = &Allocation> {
        self.slots.iter().flatten()
    }

    /// The bytes of the allocation in a slot.
    pub(crate) fn bytes(&self, slot: usize) -> u64 {
        self.slots.get(slot).and_then(Option::as_ref).map_or(0, |a| a.bytes)
    }

    /// Forgets the last accesses.
    pub(crate) fn forget_shadows(&mut self) {
        for allocation in self.slots.iter_mut().flatten() {
            allocation.contents.shadow = Default::default();
        }
    }

    /// The allocation that holds all of the bytes.
    pub(crate) fn find(&mut self, address: u64, bytes: u64) -> Option<&mut Allocation> {
        let slot = self.slot(address, bytes)?;
        self.slots[slot].as_mut()
    }

    /// Says what is around an address that no allocation holds.
    pub(crate) fn near(&self, address: u64) -> String {
        if let Some((start, bytes)) =
            self.freed.iter().rev().find(|(start, bytes)| (*start..start + bytes).contains(&address))
        {
            return format!(", offset {} of an allocation of {bytes} bytes that was freed", address - start);
        }
        let bytes = |slot: usize| self.bytes(slot);
        let before =
            self.starts.range(..=address).next_back().map(|(&start, &slot)| (address - start, bytes(slot)));
        let after =
            self.starts.range(address + 1..).next().map(|(&start, &slot)| (start - address, bytes(slot)));
        match (before, after) {
            (Some((offset, bytes)), after)
                if after.is_none_or(|(gap, _)| offset < bytes || offset - bytes <= gap) =>
            {
                format!(" at offset {offset} of an allocation of {bytes} bytes")
            }
            (_, Some((gap, bytes))) => format!(" at {gap} bytes before an allocation of {bytes} bytes"),
            _ => String::new(),
        }
    }

    fn missing(&self, what: &str, address: u64, bytes: u64) -> Fault {
        let near = self.near(address);
        let place = if near.is_empty() { format!(" at {address:#x} outside every allocation") } else { near };
        Fault::outside(FaultKind::OutOfBounds, format!("{what} of {bytes} bytes{place}"))
    }

    fn range(&mut self, what: &str, address: u64, bytes: u64) -> Result<&mut Allocation, Fault> {
        match self.slot(address, bytes) {
            // `slot` has looked into it.
            Some(slot) if self.slots[slot].is_some() => {}
            _ => return Err(self.missing(what, address, bytes)),
        }
        let found = self.find(address, bytes);
        found.ok_or_else(|| Fault::outside(FaultKind::OutOfBounds, format!("{what} of {bytes} bytes")))
    }

    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        if bytes.is_empty() {
            return Ok(());
        }
        let has_contents = self.has_contents;
        let allocation = self.range("write", address, bytes.len() as u64)?;
        if !has_contents {
            return Ok(());
        }
        let at = allocation.offset(address);
        allocation.contents.data[at..at + bytes.len()].copy_from_slice(bytes);
        allocation.contents.written.set(at, at + bytes.len());
        Ok(())
    }

    pub(crate) fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        if bytes.is_empty() {
            return Ok(());
        }
        let has_contents = self.has_contents;
        let allocation = self.range("read", address, bytes.len() as u64)?;
        if !has_contents {
            bytes.fill(0);
            return Ok(());
        }
        let at = allocation.offset(address);
        bytes.copy_from_slice(&allocation.contents.data[at..at + bytes.len()]);
        if !allocation.contents.written.all(at, at + bytes.len()) {
            for (i, byte) in bytes.iter_mut().enumerate() {
                if !allocation.contents.written.get(at + i) {
                    *byte = Memory::POISON;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn fill(&mut self, address: u64, pattern: &[u8], count: u64) -> Result<(), Fault> {
        let bytes = (pattern.len() as u64).saturating_mul(count);
        if bytes == 0 {
            return Ok(());
        }
        let has_contents = self.has_contents;
        let allocation = self.range("fill", address, bytes)?;
        if !has_contents {
            return Ok(());
        }
        let (at, len) = (allocation.offset(address), bytes as usize);
        for chunk in allocation.contents.data[at..at + len].chunks_exact_mut(pattern.len()) {
            chunk.copy_from_slice(pattern);
        }
        allocation.contents.written.set(at, at + len);
        Ok(())
    }

    /// The bytes of a range, and the parts of it that were written.
    pub(crate) fn take(&mut self, from: u64, bytes: u64) -> Result<Taken, Fault> {
        if bytes == 0 {
            return Ok(Taken::default());
        }
        let has_contents = self.has_contents;
        let allocation = self.range("copy", from, bytes)?;
        if !has_contents {
            return Ok(Taken::default());
        }
        let (at, len) = (allocation.offset(from), bytes as usize);
        let data = allocation.contents.data[at..at + len].to_vec();
        if allocation.contents.written.all(at, at + len) {
            return Ok(Taken { data, written: vec![(0, len)], unwritten_by: None });
        }
        let mut written: Vec<(usize, usize)> = Vec::new();
        for i in (0..len).filter(|i| allocation.contents.written.get(at + i)) {
            match written.last_mut() {
                Some((_, end)) if *end == i => *end = i + 1,
                _ => written.push((i, i + 1)),
            }
        }
        Ok(Taken { data, written, unwritten_by: allocation.contents.unwritten_by.clone() })
    }

    /// Puts down what `take` gave for so many bytes.
    pub(crate) fn put(&mut self, to: u64, bytes: u64, taken: &Taken) -> Result<(), Fault> {
        let Taken { data, written, unwritten_by } = taken;
        if bytes == 0 {
            return Ok(());
        }
        let allocation = self.range("copy", to, bytes)?;
        if data.is_empty() {
            return Ok(());
        }
        let at = allocation.offset(to);
        let contents = &mut allocation.contents;
        contents.data[at..at + data.len()].copy_from_slice(data);
        contents.written.unset(at, at + data.len());
        for (start, end) in written {
            contents.written.set(at + start, at + end);
        }
        if contents.unwritten_by.is_none() {
            contents.unwritten_by.clone_from(unwritten_by);
        }
        Ok(())
    }

    pub(crate) fn check_written(&mut self, address: u64, bytes: u64) -> Result<(), Fault> {
        if bytes == 0 {
            return Ok(());
        }
        let allocation = self.range("read", address, bytes)?;
        let (at, size, contents) = (allocation.offset(address), allocation.bytes, &allocation.contents);
        let end = at + bytes as usize;
        if contents.written.all(at, end) {
            return Ok(());
        }
        let first = (at..end).find(|&i| !contents.written.get(i)).unwrap_or(at);
        let missing = (first..end).find(|&i| contents.written.get(i)).unwrap_or(end) - first;
        let by = contents.unwritten_by.as_ref().map_or(String::new(), |by| format!("; {by}"));
        let message = format!(
            "read of {bytes} bytes at offset {at} of an allocation of {size} bytes, of which nothing has written \
             {missing} at offset {first}{by}"
        );
        Err(Fault::outside(FaultKind::Uninitialised, message))
    }
}

/// The most ranges of one allocation that a report has; of a launch that touches more it has the first ones.
const RANGES_MAX: usize = 64;

impl AddressSpace {
    /// What the launch whose records begin at `launch` touched.
    pub(crate) fn touched(&self, launch: u32) -> Vec<Touched> {
        let of_one = |allocation: &crate::memory::Allocation| {
            let (start, bytes) = (allocation.start, allocation.bytes);
            let ranges = allocation.contents.shadow.touched(launch).take(RANGES_MAX);
            let touched = move |(range, written): (std::ops::Range<usize>, bool)| Touched {
                start: start + range.start as u64,
                end: start + (range.end as u64).min(bytes),
                written,
            };
            ranges.map(touched).collect::<Vec<_>>()
        };
        self.allocations().flat_map(of_one).collect()
    }
}
