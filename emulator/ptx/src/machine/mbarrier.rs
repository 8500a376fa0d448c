//! Barriers in shared memory (`mbarrier`): they count arrivals and bytes, and have phases.

use super::bytes::{Range, Site};
use super::target::{Target, space_of, within};
use super::warp::Warp;
use super::{Machine, Outcome};
use crate::FaultKind;
use crate::code::{Asynchronous, Space};

/// The largest count of arrivals.
const COUNT_MAX: u64 = (1 << 20) - 1;

/// A barrier in memory.
#[derive(Debug, Default)]
pub(crate) struct MemoryBarrier {
    /// Arrivals of a phase, and those that are still to come.
    count: i64,
    left: i64,
    /// Bytes that are still to arrive.
    bytes: i64,
    /// Phases that are over.
    phase: u64,
    /// What arrives with the end of the phase.
    landing: Vec<Landing>,
    /// What has arrived in phases that are over, and whose end nobody has waited for yet.
    landed: Vec<Landing>,
}

/// Bytes that a bulk copy brings.
#[derive(Debug)]
pub(crate) struct Landing {
    pub(crate) range: Range,
    pub(crate) data: Vec<u8>,
    pub(crate) written: Vec<bool>,
}

/// Which barrier: the block and the offset in its shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Which {
    block: usize,
    offset: u64,
}

impl Machine<'_> {
    /// Carries out an operation of a lane on a barrier in memory, or a bulk copy. False if it has to be tried again.
    pub(crate) fn beside(&mut self, warp: &mut Warp, site: Site, op: Asynchronous) -> Outcome<bool> {
        let i = site.i;
        let (a, b) = (warp.get(i.a)[site.lane], warp.get(i.b)[site.lane]);
        match op {
            Asynchronous::BarrierInit { generic } => self.barrier_init(warp, site, (generic, a), b)?,
            Asynchronous::BarrierInvalid { generic } => {
                let which = self.which(warp, site, generic, a)?;
                self.blocks[which.block].mbarriers.remove(&which.offset);
            }
            Asynchronous::BarrierBytes { generic, expect } => {
                let which = self.which(warp, site, generic, a)?;
                let bytes = b as u32 as i64;
                self.barrier_bytes(which, if expect { bytes } else { -bytes });
            }
            Asynchronous::BarrierArrive(arrival) => {
                let which = self.which(warp, site, arrival.generic, a)?;
                let phase = self.blocks[which.block].mbarriers.get(&which.offset).map_or(0, |b| b.phase);
                warp.set(i.d, 1 << site.lane, &[phase; 32]);
                if arrival.expect {
                    self.barrier_bytes(which, b as u32 as i64);
                }
                if arrival.drop
                    && let Some(barrier) = self.blocks[which.block].mbarriers.get_mut(&which.offset)
                {
                    barrier.count -= 1;
                }
                let times = if arrival.expect { 1 } else { b as u32 as i64 };
                self.barrier_arrive(warp, site, which, times)?;
            }
            Asynchronous::BarrierTest { generic, parity } => {
                let which = self.which(warp, site, generic, a)?;
                let phase = self.blocks[which.block].mbarriers.get(&which.offset).map_or(0, |b| b.phase);
                let over = if parity { phase & 1 != b & 1 } else { phase != b };
                if over {
                    self.barrier_seen(which);
                    let flag = self.barrier_flag(which);
                    self.clocks.listen(warp.resident, flag);
                }
                warp.set(i.d, 1 << site.lane, &[over as u64; 32]);
                return Ok(over);
            }
            Asynchronous::CopyArrive { noinc } => {
                let which = self.which(warp, site, false, a)?;
                self.land_lane(warp, site)?;
                if noinc {
                    self.barrier_arrive(warp, site, which, 1)?;
                } else {
                    let flag = self.barrier_flag(which);
                    self.clocks.fence(warp.resident);
                    self.clocks.publish(warp.resident, flag);
                }
            }
            Asynchronous::Bulk(bulk) => self.bulk(warp, site, bulk)?,
            _ => {}
        }
        Ok(true)
    }

    fn barrier_place(&self, warp: &Warp, site: Site, generic: bool, address: u64) -> Outcome<Which> {
        let address = match generic {
            true if space_of(address) == Space::Shared => within(Space::Shared, address),
            true => {
                return self.fault(
                    FaultKind::InvalidOperand,
                    warp,
                    site.i,
                    site.lane,
                    "a barrier outside of shared memory",
                );
            }
            false => address,
        };
        match self.shared(warp, address) {
            Some((block, offset)) => Ok(Which { block, offset }),
            None => self.outside(warp, site.i, site.lane, "barrier", (Space::Shared, address, 8)),
        }
    }

    fn barrier_init(
        &mut self,
        warp: &mut Warp,
        site: Site,
        (generic, address): (bool, u64),
        count: u64,
    ) -> Outcome<()> {
        let which = self.barrier_place(warp, site, generic, address)?;
        let range = self.locate(warp, site, "barrier", (Space::Shared, which.offset), (8, 8))?;
        if count == 0 || count > COUNT_MAX {
            let message = format!("a barrier for {count} arrivals, where 1 to {COUNT_MAX} can be");
            return self.fault(FaultKind::InvalidOperand, warp, site.i, site.lane, message);
        }
        self.touch(warp, site, range, true, 0)?;
        if let Some(contents) = self.contents_of(range.target) {
            contents.set_number(range.offset, 8, count);
        }
        let barrier = MemoryBarrier { count: count as i64, left: count as i64, ..MemoryBarrier::default() };
        self.blocks[which.block].mbarriers.insert(which.offset, barrier);
        Ok(())
    }

    /// The barrier at an address. That it was initialised before is checked like any other read.
    pub(crate) fn which(&mut self, warp: &Warp, site: Site, generic: bool, address: u64) -> Outcome<Which> {
        let which = self.barrier_place(warp, site, generic, address)?;
        if !self.blocks[which.block].mbarriers.contains_key(&which.offset) {
            let message = format!("no barrier was initialised at offset {} of shared memory", which.offset);
            return self.fault(FaultKind::Uninitialised, warp, site.i, site.lane, message);
        }
        let range =
            Range { target: Target::Shared { block: which.block }, offset: which.offset as usize, bytes: 8 };
        self.touch(warp, site, range, false, super::shadow::STRONG)?;
        Ok(which)
    }

    /// The same barrier in another block of the cluster.
    pub(crate) fn in_block(&self, which: Which, block: usize) -> Which {
        Which { block, ..which }
    }

    fn barrier_flag(&self, which: Which) -> u64 {
        super::SHARED_WINDOW | (self.blocks[which.block].number as u64) << super::RANK_SHIFT | which.offset
    }

    /// More bytes are expected, or have come.
    pub(crate) fn barrier_bytes(&mut self, which: Which, bytes: i64) {
        self.idle = 0;
        if let Some(barrier) = self.blocks[which.block].mbarriers.get_mut(&which.offset) {
            barrier.bytes += bytes;
        }
        self.barrier_over(which);
    }

    fn barrier_arrive(&mut self, warp: &Warp, site: Site, which: Which, times: i64) -> Outcome<()> {
        self.idle = 0;
        self.barrier_publish(warp, which);
        let Some(barrier) = self.blocks[which.block].mbarriers.get_mut(&which.offset) else { return Ok(()) };
        barrier.left -= times;
        if barrier.left < 0 {
            let message = "more arrivals at the barrier than a phase has";
            return self.fault(FaultKind::InvalidOperand, warp, site.i, site.lane, message);
        }
        self.barrier_over(which);
        Ok(())
    }

    /// What a warp has done so far is known to whoever waits for the barrier.
    pub(crate) fn barrier_publish(&mut self, warp: &Warp, which: Which) {
        let flag = self.barrier_flag(which);
        self.clocks.fence(warp.resident);
        self.clocks.publish(warp.resident, flag);
    }

    /// Bytes that come with the end of the phase.
    pub(crate) fn barrier_brings(&mut self, which: Which, landing: Landing) {
        let range = landing.range;
        if let Some(contents) = self.contents_of(range.target) {
            contents.announce(range.offset, range.offset + range.bytes);
        }
        if let Some(barrier) = self.blocks[which.block].mbarriers.get_mut(&which.offset) {
            barrier.landing.push(landing);
        }
    }

    /// Ends the phase if nothing is missing.
    fn barrier_over(&mut self, which: Which) {
        let Some(barrier) = self.blocks[which.block].mbarriers.get_mut(&which.offset) else { return };
        if barrier.left != 0 || barrier.bytes != 0 {
            return;
        }
        barrier.phase += 1;
        barrier.left = barrier.count;
        let landing = std::mem::take(&mut barrier.landing);
        barrier.landed.extend(landing);
    }

    /// Somebody has seen the end of a phase: only now are the bytes there.
    fn barrier_seen(&mut self, which: Which) {
        let Some(barrier) = self.blocks[which.block].mbarriers.get_mut(&which.offset) else { return };
        for landing in std::mem::take(&mut barrier.landed) {
            if let Some(contents) = self.contents_of(landing.range.target) {
                contents.land(landing.range.offset, &landing.data, |byte| landing.written[byte]);
            }
        }
    }
}
