//! What loads, stores, copies and matrices have in common: from an address to checked bytes.
//!
//! The machine finds an address in its space, checks it against bounds and alignment, and its bytes against races and
//! against reads of what nothing has written. Strong accesses publish what their warp knows.
//!
//! Loads and stores take lanes in runs ([`super::runs`]). Copies and matrices take a [`Site`] and ranges.

use std::sync::MutexGuard;

use super::clocks::Clocks;
use super::state::{
    Block, ByteRange, CachedAllocation, Machine, Outcome, RANK_SHIFT, Region, SHARED_WINDOW, Warp, space_of,
    within,
};
use crate::code::{Instruction, Order, Scope, Space};
use crate::lanes::{LANES, Lanes, lanes};
use crate::memory::shadow::{Cell, IN_BLOCK, IN_CLUSTER, STRONG, cell};
use crate::memory::{AddressSpace, Contents};
use crate::{Checks, FaultKind, shared_variable};

/// The kind of a race in a space, if races there are looked for.
pub(super) fn race_kind(checks: &Checks, space: Space) -> Option<FaultKind> {
    match space {
        Space::Shared if checks.shared_races => Some(FaultKind::SharedRace),
        Space::Global if checks.global_races => Some(FaultKind::GlobalRace),
        _ => None,
    }
}

/// An access of neighbouring lanes, as the race check takes it.
#[derive(Clone, Copy)]
pub(crate) struct Touch {
    pub(crate) pc: u32,
    pub(crate) resident: usize,
    pub(crate) lane: usize,
    pub(crate) lanes: usize,
    pub(crate) offset: usize,
    /// Bytes of a lane.
    pub(crate) bytes: usize,
    pub(crate) flags: Cell,
    pub(crate) shared: bool,
}

impl Touch {
    fn cell(&self, clocks: &mut Clocks) -> Cell {
        cell(clocks.record(self.resident), self.pc, self.lane as u32, self.flags)
    }

    /// The access of one of its lanes.
    pub(super) fn lane_of_run(self, n: usize) -> Touch {
        Touch { lane: self.lane + n, lanes: 1, offset: self.offset + n * self.bytes, ..self }
    }

    /// Notes a write of one lane without looking for races.
    pub(super) fn note_write(&self, clocks: &mut Clocks, contents: &mut Contents, flags: Cell) {
        let me = self.cell(clocks) | flags;
        contents.shadow.overwrite(self.offset, self.bytes, me);
    }

    /// Notes a read. What it races with, if anything: the access, the lane, and that it was a write.
    #[inline(always)]
    pub(crate) fn read(&self, clocks: &mut Clocks, contents: &mut Contents) -> Option<(Cell, usize, bool)> {
        let me = self.cell(clocks);
        let past = if self.shared { clocks.past_shared(self.resident) } else { clocks.past() };
        contents.shadow.prepare(contents.data.len(), self.bytes);
        let found = contents.shadow.read(self.offset, self.bytes, self.lanes, me, past, |other, me| {
            clocks.unordered(self.resident, other, me, true)
        });
        found.map(|(cell, lane)| (cell, self.lane + lane, true))
    }

    /// Notes a write. What it races with: the access, the lane, and whether that was a write.
    #[inline(always)]
    pub(crate) fn write(&self, clocks: &mut Clocks, contents: &mut Contents) -> Option<(Cell, usize, bool)> {
        let me = self.cell(clocks);
        let past = if self.shared { clocks.past_shared(self.resident) } else { clocks.past() };
        contents.shadow.prepare(contents.data.len(), self.bytes);
        let found = contents.shadow.write(self.offset, self.bytes, self.lanes, me, past, |other, me| {
            clocks.unordered(self.resident, other, me, false)
        });
        found.map(|(cell, lane, wrote)| (cell, self.lane + lane, wrote))
    }
}

/// The flags of an access of an order and a scope.
pub(super) fn strength(order: Order, scope: Scope) -> Cell {
    match scope {
        _ if order == Order::Weak => 0,
        Scope::Device => STRONG,
        Scope::Cluster => STRONG | IN_CLUSTER,
        Scope::Block => STRONG | IN_BLOCK,
    }
}

impl Machine<'_> {
    pub(super) fn addresses(&self, warp: &Warp, i: &Instruction) -> Lanes {
        let mut addresses = *warp.get(i.a);
        if i.offset != 0 {
            addresses.iter_mut().for_each(|a| *a = a.wrapping_add(i.offset as u64));
        }
        addresses
    }

    /// The lanes whose address is of the same space as the first one's, and their addresses in it.
    #[inline(always)]
    pub(crate) fn same_space(&self, space: Space, addresses: &mut Lanes, mask: u32) -> (Space, u32) {
        if space != Space::Generic {
            return (space, mask);
        }
        let found = space_of(addresses[mask.trailing_zeros() as usize]);
        let mut same = 0;
        for l in 0..LANES {
            if mask >> l & 1 == 1 && space_of(addresses[l]) == found {
                same |= 1 << l;
                addresses[l] = within(found, addresses[l]);
            }
        }
        (found, same)
    }

    #[cold]
    pub(crate) fn misaligned<T>(
        &self,
        warp: &Warp,
        i: &Instruction,
        lane: usize,
        verb: &str,
        bytes: usize,
        address: u64,
    ) -> Outcome<T> {
        let over = address % bytes as u64;
        let message = format!("{verb} of {bytes} bytes at {address:#x}, {over} past a multiple of {bytes}");
        self.fault(FaultKind::Misaligned, warp, i, lane, message)
    }

    /// The name under which the clocks know an address.
    pub(crate) fn flag(&self, warp: &Warp, space: Space, address: u64) -> Option<u64> {
        match space {
            Space::Global => Some(address),
            Space::Shared => {
                let (block, offset) = self.shared(warp, address)?;
                Some(self.shared_flag(block, offset))
            }
            _ => None,
        }
    }

    /// The name of an offset in a block's shared memory: no other block of the grid has the same.
    pub(super) fn shared_flag(&self, block: usize, offset: u64) -> u64 {
        SHARED_WINDOW | (self.blocks[block].number as u64) << RANK_SHIFT | offset
    }

    /// A strong read: the warp hears what was published at its lanes' addresses. `updates` says that it is an atomic
    /// update.
    pub(crate) fn listen(
        &mut self,
        warp: &Warp,
        (space, addresses, mask): (Space, &Lanes, u32),
        (order, scope): (Order, Scope),
        updates: bool,
    ) {
        for l in lanes(mask) {
            if let Some(flag) = self.flag(warp, space, addresses[l]) {
                self.clocks.listen(warp.resident, flag, order, scope, updates);
            }
        }
    }

    /// A strong write: the warp publishes what it knows at its lanes' addresses.
    pub(crate) fn publish(
        &mut self,
        warp: &Warp,
        (space, addresses, mask): (Space, &Lanes, u32),
        (order, scope): (Order, Scope),
    ) {
        if !self.clocks.publishes(order) {
            return;
        }
        for l in lanes(mask) {
            if let Some(flag) = self.flag(warp, space, addresses[l]) {
                self.clocks.publish(warp.resident, flag, order, scope);
            }
        }
    }
}

/// The contents of a region of these memories. A kernel's parameters have none, nor has a thread's local memory if
/// `local` is `None`. (The parts of the machine are borrowed one by one, so that the clocks can be used meanwhile.)
#[inline(always)]
pub(super) fn contents_in<'c>(
    spaces: &'c mut [MutexGuard<'_, AddressSpace>],
    blocks: &'c mut [Block],
    local: Option<&'c mut Contents>,
    region: Region,
) -> Option<&'c mut Contents> {
    match region {
        Region::Global { space, slot } => spaces[space].at(slot).map(|a| &mut a.contents),
        Region::Shared { block } => Some(&mut blocks[block].shared),
        Region::Local => local,
        Region::Parameter => None,
    }
}

impl Machine<'_> {
    /// Finds the target of `bytes` bytes at an address of a space, and where in its contents they begin.
    #[inline(always)]
    pub(crate) fn find(
        &mut self,
        warp: &Warp,
        pc: u32,
        space: Space,
        address: u64,
        bytes: u64,
    ) -> Option<(Region, usize)> {
        match space {
            Space::Global | Space::Generic => {
                let cached = self.cache[pc as usize];
                if let Some(space) = self.spaces.get_mut(cached.space as usize)
                    && let Some(allocation) = space.at(cached.slot as usize)
                    && allocation.holds(address, bytes)
                {
                    let region = Region::Global { space: cached.space as usize, slot: cached.slot as usize };
                    return Some((region, allocation.offset(address)));
                }
                self.find_global(pc, address, bytes)
            }
            Space::Shared => {
                let (block, offset) = self.shared(warp, address)?;
                if block != warp.block && self.has_ended(block) {
                    return None;
                }
                let (start, end) = self.variables[shared_variable::number(address)];
                let inside = offset >= start && bytes <= end && offset <= end - bytes;
                inside.then_some((Region::Shared { block }, offset as usize))
            }
            Space::Local => {
                let len = self.program.local_bytes as u64;
                (bytes <= len && address <= len - bytes).then_some((Region::Local, address as usize))
            }
            Space::Parameter => {
                let len = self.parameters.len() as u64;
                (bytes <= len && address <= len - bytes).then_some((Region::Parameter, address as usize))
            }
        }
    }

    /// The block that a shared address is of, and the offset there.
    #[inline(always)]
    pub(crate) fn shared(&self, warp: &Warp, address: u64) -> Option<(usize, u64)> {
        let offset = shared_variable::offset(address);
        match address >> RANK_SHIFT {
            0 => Some((warp.block, offset)),
            rank => {
                let (rank, size) = ((rank - 1) as usize, self.cluster_size());
                let block = warp.block / size * size + rank;
                (rank < size).then_some((block, offset))
            }
        }
    }

    #[cold]
    fn find_global(&mut self, pc: u32, address: u64, bytes: u64) -> Option<(Region, usize)> {
        for (number, space) in self.spaces.iter_mut().enumerate() {
            let Some(slot) = space.slot(address, bytes) else { continue };
            self.cache[pc as usize] = CachedAllocation { space: number as u32, slot: slot as u32 };
            let offset = space.at(slot)?.offset(address);
            return Some((Region::Global { space: number, slot }, offset));
        }
        None
    }

    /// Whether all threads of another block have exited.
    pub(super) fn has_ended(&self, block: usize) -> bool {
        self.blocks[block].warps.iter().all(|warp| warp.live == 0)
    }

    /// The contents of a region. A kernel's parameters have none.
    #[inline(always)]
    pub(crate) fn contents<'c>(&'c mut self, warp: &'c mut Warp, region: Region) -> Option<&'c mut Contents> {
        contents_in(&mut self.spaces, &mut self.blocks, Some(&mut warp.local), region)
    }

    /// The fault of an access that `find` did not find.
    #[cold]
    pub(crate) fn outside<T>(
        &self,
        warp: &Warp,
        i: &Instruction,
        lane: usize,
        verb: &str,
        place: (Space, u64, u64),
    ) -> Outcome<T> {
        let (space, address, bytes) = place;
        let what = match space {
            Space::Global | Space::Generic => {
                let owner = self.spaces.iter().find(|s| s.owns(address));
                let near = owner.map(|s| s.near(address)).unwrap_or_default();
                if near.is_empty() { format!(" at {address:#x} outside every allocation") } else { near }
            }
            Space::Shared
                if self.shared(warp, address).is_some_and(|(b, _)| b != warp.block && self.has_ended(b)) =>
            {
                " of the shared memory of a block of the cluster that has ended".into()
            }
            Space::Shared => shared_variable::beside(address, &self.variables, &self.program.shared),
            Space::Local => {
                format!(" at offset {address} of {} bytes of local memory", self.program.local_bytes)
            }
            Space::Parameter => {
                format!(" at offset {address} of {} bytes of parameters", self.parameters.len())
            }
        };
        self.fault(FaultKind::OutOfBounds, warp, i, lane, format!("{verb} of {bytes} bytes{what}"))
    }

    /// A target's name in reports, with an offset in it.
    pub(crate) fn name(&self, region: Region, offset: usize) -> String {
        match region {
            Region::Global { space, slot } => {
                let bytes = self.spaces[space].bytes(slot);
                format!("offset {offset} of an allocation of {bytes} bytes")
            }
            Region::Shared { .. } => format!("offset {offset} of shared memory"),
            Region::Local => format!("offset {offset} of local memory"),
            Region::Parameter => format!("offset {offset} of the parameters"),
        }
    }
}

/// Where an instruction touches memory: the instruction's number and itself, and the lane.
#[derive(Clone, Copy)]
pub(crate) struct Site<'i> {
    pub(crate) pc: u32,
    pub(crate) i: &'i Instruction,
    pub(crate) lane: usize,
}

impl Machine<'_> {
    /// Finds bytes that an instruction `verb`s, whose address must be a multiple of `align`.
    pub(crate) fn locate(
        &mut self,
        warp: &Warp,
        site: Site,
        verb: &str,
        (space, address): (Space, u64),
        (bytes, align): (usize, usize),
    ) -> Outcome<ByteRange> {
        let found = if space == Space::Generic { space_of(address) } else { space };
        let address = if space == Space::Generic { within(found, address) } else { address };
        if address % align as u64 != 0 {
            return self.misaligned(warp, site.i, site.lane, verb, align, address);
        }
        match self.find(warp, site.pc, found, address, bytes as u64) {
            Some((region, offset)) => Ok(ByteRange { region, offset, bytes }),
            None => self.outside(warp, site.i, site.lane, verb, (found, address, bytes as u64)),
        }
    }

    /// Notes a read or a write of a range for the sake of races.
    pub(crate) fn touch(
        &mut self,
        warp: &Warp,
        site: Site,
        range: ByteRange,
        writes: bool,
        flags: Cell,
    ) -> Outcome<()> {
        let ByteRange { region, offset, bytes } = range;
        let shared = matches!(region, Region::Shared { .. });
        let space = if shared { Space::Shared } else { Space::Global };
        let Some(kind) = race_kind(&self.checks, space).filter(|_| bytes > 0) else { return Ok(()) };
        if writes {
            self.not_read(warp, site.i, site.lane, range, bytes)?;
        }
        let contents = contents_in(&mut self.spaces, &mut self.blocks, None, region);
        let Some(contents) = contents else { return Ok(()) };
        let touch = Touch {
            pc: site.pc,
            resident: warp.resident,
            lane: site.lane,
            lanes: 1,
            offset,
            bytes,
            flags,
            shared,
        };
        let found = match writes {
            true => touch.write(&mut self.clocks, contents),
            false => touch.read(&mut self.clocks, contents),
        };
        let Some((cell, lane, wrote)) = found.filter(|(cell, ..)| !self.allowed(site.i, *cell, false)) else {
            return Ok(());
        };
        let what = format!("{bytes} bytes at {}", self.name(region, offset));
        self.race(kind, warp, site.i, (lane, writes), (cell, wrote), &what)
    }

    /// The contents of a range's region, which is none of a thread's own.
    pub(crate) fn contents_of(&mut self, region: Region) -> Option<&mut Contents> {
        contents_in(&mut self.spaces, &mut self.blocks, None, region)
    }

    /// The bytes of a range, and which of them were ever written.
    pub(crate) fn copy_out(&mut self, range: ByteRange) -> (Vec<u8>, Vec<bool>) {
        let ByteRange { region, offset, bytes } = range;
        if region == Region::Parameter {
            return (self.parameters[offset..offset + bytes].to_vec(), vec![true; bytes]);
        }
        let Some(contents) = self.contents_of(region) else { return (vec![0; bytes], vec![false; bytes]) };
        let data = contents.data[offset..offset + bytes].to_vec();
        if contents.written.all(offset, offset + bytes) {
            return (data, vec![true; bytes]);
        }
        (data, (offset..offset + bytes).map(|byte| contents.written.get(byte)).collect())
    }

    /// Reads `N` bytes at an address that is a multiple of `N`, all of which must have been written.
    pub(crate) fn take<const N: usize>(
        &mut self,
        warp: &Warp,
        site: Site,
        verb: &str,
        place: (Space, u64),
    ) -> Outcome<[u8; N]> {
        let range = self.locate(warp, site, verb, place, (N, N))?;
        // Nearly always it lies in the block's own memory, and there is nothing to say.
        if let Region::Shared { block } = range.region {
            let contents = &mut self.blocks[block].shared;
            let (offset, resident) = (range.offset, warp.resident);
            let touch = Touch {
                pc: site.pc,
                resident,
                lane: site.lane,
                lanes: 1,
                offset,
                bytes: N,
                flags: 0,
                shared: true,
            };
            let quiet = !self.checks.shared_races || touch.read(&mut self.clocks, contents).is_none();
            if quiet && contents.written.all(offset, offset + N) {
                return Ok(bytes_at(&contents.data, offset));
            }
        }
        self.touch(warp, site, range, false, 0)?;
        self.written(warp, site, range)?;
        if range.region == Region::Parameter {
            return Ok(bytes_at(self.parameters, range.offset));
        }
        Ok(self.contents_of(range.region).map_or([0; N], |contents| bytes_at(&contents.data, range.offset)))
    }

    /// Checks that bytes an instruction computes with were written.
    pub(crate) fn written(&mut self, warp: &Warp, site: Site, range: ByteRange) -> Outcome<()> {
        let ByteRange { region, offset, bytes } = range;
        let check = self.checks.uninitialised;
        let Some(contents) = self.contents_of(region) else { return Ok(()) };
        if contents.written.all(offset, offset + bytes) {
            return Ok(());
        }
        let pending = contents.under_way(offset, offset + bytes);
        if !check && !pending {
            return Ok(());
        }
        let place = self.name(region, offset);
        match pending {
            true => {
                let message =
                    format!("read of {bytes} bytes at {place} before the asynchronous copy was waited for");
                self.fault(FaultKind::Pending, warp, site.i, site.lane, message)
            }
            false => {
                let message = format!("read of {bytes} bytes at {place}, some of which nothing has written");
                self.fault(FaultKind::Uninitialised, warp, site.i, site.lane, message)
            }
        }
    }
}

/// The `N` bytes from `start` on, which are there.
fn bytes_at<const N: usize>(data: &[u8], start: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&data[start..start + N]);
    bytes
}
