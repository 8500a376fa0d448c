//! The two ways to memory: that of the threads, and that of what runs beside them (bulk copies, operands of `wgmma`).
//!
//! What a thread wrote in shared memory is seen beside the threads only behind a `fence.proxy.async` that comes after the write and before
//! the use: the writer's own, or one of whoever has heard of the write. As in [`super::clocks`] that is kept at the grain of warps.

use super::bytes::{Range, Site};
use super::clocks::Clocks;
use super::shadow::{BESIDE, Cell, lane};
use super::target::Target;
use super::warp::Warp;
use super::{Machine, Outcome};
use crate::FaultKind;
use crate::code::{Asynchronous, Matrix, Program};
use crate::lanes::LANES;

/// What each warp knows to be fenced.
#[derive(Debug, Default)]
pub(crate) struct Proxies {
    /// Whether anything runs beside the threads at all.
    pub(crate) on: bool,
    /// Of each resident warp, up to which clock its writes are fenced as far as each knows.
    pub(crate) known: Vec<u32>,
    /// The clock of each lane's own last fence.
    pub(crate) lanes: Vec<[u32; LANES]>,
}

impl Proxies {
    /// New resident warps.
    pub(crate) fn begin(&mut self, warps: usize) {
        if self.on {
            self.known.clear();
            self.known.resize(warps * warps, 0);
            self.lanes.clear();
            self.lanes.resize(warps, [0; LANES]);
        }
    }

    /// A fence of some lanes of a warp that knows `row` of the others, and all of whose lanes met before clock `together`.
    pub(crate) fn fence(&mut self, warp: usize, lanes: u32, row: &[u32], (all, together): (bool, u32)) {
        let clock = row[warp];
        let known = &mut self.known[warp * row.len()..][..row.len()];
        for (other, (known, &heard)) in known.iter_mut().zip(row).enumerate() {
            let own = if all { clock } else { together.saturating_sub(1) };
            *known = (*known).max(if other == warp { own } else { heard });
        }
        super::warp::lanes(lanes).for_each(|l| self.lanes[warp][l] = clock);
    }

    /// Whether a write of a lane at a clock is fenced, as far as a warp knows.
    fn covers(&self, warp: usize, (by, lane, clock): (usize, usize, u32)) -> bool {
        self.known[warp * self.lanes.len() + by] >= clock || self.lanes[by][lane] >= clock
    }
}

impl Clocks {
    /// Whether a write is not yet seen beside the threads of a warp.
    fn unseen(&self, warp: usize, write: Cell) -> bool {
        let resident = super::shadow::record(write) >= self.past().own;
        resident
            && write & BESIDE == 0
            && self.find(super::shadow::record(write)).is_some_and(|record| {
                let who = (record.warp as usize, lane(write) as usize, record.clock);
                !self.proxies.covers(warp, who)
            })
    }
}

impl Program {
    /// Whether anything in it uses shared memory beside the threads.
    pub(crate) fn beside(&self) -> bool {
        self.matrices.iter().any(|m| matches!(m, Matrix::Warpgroup(_)))
            || self.asynchronous.iter().any(|a| matches!(a, Asynchronous::Bulk(_)))
    }
}

impl Machine<'_> {
    pub(crate) fn proxy_fence(&mut self, warp: &Warp, mask: u32) {
        if self.checks.global_races || self.checks.shared_races {
            self.clocks.proxy_fence(warp.resident, mask, mask == warp.live);
        }
    }

    /// Checks that bytes of shared memory, which something beside the threads `verb`s, are seen there.
    pub(crate) fn seen_beside(&mut self, warp: &Warp, site: Site, verb: &str, range: Range) -> Outcome<()> {
        let Target::Shared { block } = range.target else { return Ok(()) };
        if !self.checks.shared_races {
            return Ok(());
        }
        let writes = self.blocks[block].shared.shadow.writes(range.offset, range.bytes);
        let Some(&write) = writes.iter().find(|write| self.clocks.unseen(warp.resident, **write)) else {
            return Ok(());
        };
        let bytes = range.bytes;
        let what =
            format!("{verb} {bytes} bytes at {} beside the threads", self.name(range.target, range.offset));
        let party = self.party(warp, write);
        let message = format!("{what}, written {party}, with no fence.proxy.async between");
        self.fault(FaultKind::MissingFence, warp, site.i, site.lane, message)
    }
}
