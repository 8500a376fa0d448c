//! What loads and stores have in common: runs of lanes, spaces, races, and what strong accesses publish.
//!
//! Lanes are taken in runs: neighbours that touch bytes one behind the other, or all the same. A warp that loads a row is one run,
//! and is looked up, checked and copied at once.

use super::clocks::Clocks;
use super::shadow::{Cell, STRONG, cell};
use super::target::{space_of, within};
use super::warp::{Warp, lanes};
use super::{Machine, Outcome};
use crate::code::{Instruction, Order, Space};
use crate::lanes::{LANES, Lanes};
use crate::memory::Contents;
use crate::{Checks, FaultKind};

/// Neighbouring lanes whose bytes lie one behind the other, or are the same.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub(super) lane: usize,
    pub(super) lanes: usize,
    pub(super) uniform: bool,
}

/// The run that begins at the first lane of a mask.
#[inline(always)]
pub(super) fn run(addresses: &Lanes, mask: u32, bytes: u64) -> Run {
    let lane = mask.trailing_zeros() as usize;
    let most = (!(mask >> lane)).trailing_zeros().min(32 - lane as u32) as usize;
    let first = addresses[lane];
    let mut n = 1;
    if most > 1 && addresses[lane + 1] == first {
        while n < most && addresses[lane + n] == first {
            n += 1;
        }
        return Run { lane, lanes: n, uniform: true };
    }
    while n < most && addresses[lane + n] == first.wrapping_add(n as u64 * bytes) {
        n += 1;
    }
    Run { lane, lanes: n, uniform: false }
}

pub(super) fn bits(lane: usize, n: usize) -> u32 {
    (u32::MAX >> (32 - n)) << lane
}

/// Whether and as what a race in a space counts.
pub(super) fn raced(checks: &Checks, space: Space) -> Option<FaultKind> {
    match space {
        Space::Shared if checks.shared_races => Some(FaultKind::SharedRace),
        Space::Global if checks.global_races => Some(FaultKind::GlobalRace),
        _ => None,
    }
}

/// What an access is, for its checks.
#[derive(Clone, Copy)]
pub(crate) struct Touch {
    pub(crate) at: u32,
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
        cell(clocks.record(self.resident), self.at, self.lane as u32, self.flags)
    }

    /// Notes a read. What it races with, if anything: the access, the lane, and that it was a write.
    #[inline(always)]
    pub(crate) fn read(&self, clocks: &mut Clocks, contents: &mut Contents) -> Option<(Cell, usize, bool)> {
        let me = self.cell(clocks);
        let past = if self.shared { clocks.past_shared() } else { clocks.past() };
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
        let past = if self.shared { clocks.past_shared() } else { clocks.past() };
        contents.shadow.prepare(contents.data.len(), self.bytes);
        let found = contents.shadow.write(self.offset, self.bytes, self.lanes, me, past, |other, me| {
            clocks.unordered(self.resident, other, me, false)
        });
        found.map(|(cell, lane, wrote)| (cell, self.lane + lane, wrote))
    }
}

pub(super) fn strength(order: Order) -> Cell {
    if order == Order::Weak { 0 } else { STRONG }
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

    /// The name under which an address is published.
    pub(crate) fn flag(&self, warp: &Warp, space: Space, address: u64) -> Option<u64> {
        match space {
            Space::Global => Some(address),
            Space::Shared => {
                let (block, offset) = self.shared(warp, address)?;
                Some(super::SHARED_WINDOW | (self.blocks[block].number as u64) << RANK | offset)
            }
            _ => None,
        }
    }

    pub(crate) fn listen(&mut self, warp: &Warp, space: Space, addresses: &Lanes, mask: u32) {
        for l in lanes(mask) {
            if let Some(flag) = self.flag(warp, space, addresses[l]) {
                self.clocks.listen(warp.resident, flag);
            }
        }
    }

    pub(crate) fn publish(&mut self, warp: &Warp, space: Space, addresses: &Lanes, mask: u32, order: Order) {
        if matches!(order, Order::Release | Order::Both) {
            self.clocks.fence(warp.resident);
        }
        if !self.clocks.publishes() {
            return;
        }
        for l in lanes(mask) {
            if let Some(flag) = self.flag(warp, space, addresses[l]) {
                self.clocks.publish(warp.resident, flag);
            }
        }
    }
}

/// Bits of an offset in shared memory.
const RANK: u32 = super::RANK_SHIFT;
