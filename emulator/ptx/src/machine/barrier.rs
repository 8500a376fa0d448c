//! Barriers of a block and of a cluster, and barriers in shared memory (`mbarrier`), which count arrivals and bytes
//! and have phases.

use super::access::Site;
use super::clocks::Gathering;
use super::state::{
    BARRIERS, BarrierState, ByteRange, ClusterBarrier, Landing, Machine, Mbarrier, Next, Outcome, Region,
    Waiting, Warp, space_of, within,
};
use crate::FaultKind;
use crate::code::{Asynchronous, Barrier, BarrierKind, Instruction, NOWHERE, Order, Scope, Space};
use crate::lanes::{LANES, lanes};
use crate::memory::shadow::STRONG;

impl Machine<'_> {
    pub(crate) fn barrier(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        barrier: Barrier,
        mask: u32,
        active: u32,
    ) -> Outcome<Next> {
        match barrier.kind {
            BarrierKind::ClusterArrive => return self.cluster_arrive(warp, i, mask, true),
            BarrierKind::ClusterArriveRelaxed => return self.cluster_arrive(warp, i, mask, false),
            BarrierKind::ClusterWait => return Ok(self.cluster_wait(warp, pc, mask, active)),
            _ => {}
        }
        let first = mask.trailing_zeros() as usize;
        let (number, count) = (warp.get(i.a)[first], warp.get(i.b)[first] as u32);
        if lanes(mask).any(|l| warp.get(i.a)[l] != number) || number >= 16 {
            return self.fault(
                FaultKind::InvalidOperand,
                warp,
                i,
                first,
                format!("barrier {number} of 0..16, one for all lanes"),
            );
        }
        let expected = self.expected(warp, i, first, number as usize, count)?;
        if barrier.aligned {
            self.same_instruction(warp, pc, i, number as usize, count)?;
        }
        let whole = mask == warp.live && warp.live == warp.lanes;
        let weight = if count != 0 && whole { 32 } else { mask.count_ones() };
        let c = warp.get(i.c);
        let yes = lanes(mask).filter(|&l| c[l] & 1 == 1).count() as u32;
        let state = &mut self.blocks[warp.block].barriers[number as usize];
        state.expected = expected;
        state.of_all = count == 0;
        state.arrived += weight;
        state.yes += yes;
        self.clocks.arrive(warp.resident, &mut state.gathering);
        self.idle = 0;
        if barrier.kind == BarrierKind::Arrive {
            state.passed = true;
        } else {
            let (block, kind) = (warp.block, barrier.kind);
            state.waiting.push(Waiting { block, warp: warp.number, lanes: mask, pc, kind });
            warp.at_barrier |= mask;
            warp.move_to(mask, pc);
            warp.move_to(active & !mask, pc + 1);
        }
        if state.arrived >= expected {
            let state = std::mem::take(state);
            let all = expected == self.threads() && !state.passed;
            self.pass(warp, &state);
            if all && self.cluster_size() == 1 {
                self.clocks.all_met(warp.resident);
            }
        }
        Ok(if barrier.kind == BarrierKind::Arrive { Next::On } else { Next::Apart })
    }

    /// Threads of a block.
    pub(crate) fn threads(&self) -> u32 {
        self.launch.block.iter().product()
    }

    fn expected(&self, warp: &Warp, i: &Instruction, lane: usize, number: usize, count: u32) -> Outcome<u32> {
        let expected = if count == 0 { self.threads() } else { count };
        let state = &self.blocks[warp.block].barriers[number];
        if !count.is_multiple_of(32) {
            let message = format!("barrier {number} for {count} threads, which is no multiple of 32");
            return self.fault(FaultKind::InvalidOperand, warp, i, lane, message);
        }
        if state.arrived > 0 && state.expected != expected {
            let message =
                format!("barrier {number} for {expected} threads, where others wait for {}", state.expected);
            return self.fault(FaultKind::InvalidOperand, warp, i, lane, message);
        }
        Ok(expected)
    }

    /// Lanes of a warp come to an aligned barrier by one instruction; all warps to the common one of all threads.
    fn same_instruction(
        &self,
        warp: &Warp,
        pc: u32,
        i: &Instruction,
        number: usize,
        count: u32,
    ) -> Outcome<()> {
        for waiting in &self.blocks[warp.block].barriers[number].waiting {
            let own = waiting.warp == warp.number;
            if waiting.pc == pc || !(own || number == 0 && count == 0) {
                continue;
            }
            let other = &self.program.code[waiting.pc as usize];
            let [x, y, z] = self.thread(waiting.warp, waiting.lanes.trailing_zeros() as usize);
            let lane = (warp.runnable().trailing_zeros() as usize).min(31);
            let place = self.place(other);
            let message = format!(
                "barrier {number} reached here, while thread ({x}, {y}, {z}) waits at another one at {place}"
            );
            return self.fault(FaultKind::DivergentBarrier, warp, i, lane, message);
        }
        Ok(())
    }

    /// All have come: those that wait go on.
    fn pass(&mut self, current: &mut Warp, state: &BarrierState) {
        self.report.barriers += 1;
        self.idle = 0;
        for w in &state.waiting {
            let i = &self.program.code[w.pc as usize];
            let own = w.block == current.block && w.warp == current.number;
            let warp = if own { &mut *current } else { &mut self.blocks[w.block].warps[w.warp] };
            warp.at_barrier &= !w.lanes;
            warp.move_to(w.lanes, w.pc + 1);
            if i.d != NOWHERE {
                let value = match w.kind {
                    BarrierKind::Count => state.yes as u64,
                    BarrierKind::All => {
                        (state.yes == state.arrived.min(self.launch.block.iter().product())) as u64
                    }
                    _ => (state.yes > 0) as u64,
                };
                warp.set(i.d, w.lanes, &[value; LANES]);
            }
            let all = warp.live & !w.lanes == 0;
            self.clocks.leave(warp.resident, &state.gathering, w.lanes, all);
        }
    }

    /// Lets threads go on that wait only for threads that have exited: a barrier of all is one of all threads that
    /// there still are (PTX ISA, `barrier.cluster`; CUDA programming guide, of `__syncthreads` since Volta). A
    /// barrier with a count counts on.
    pub(crate) fn pass_without_exited(&mut self) -> Outcome<()> {
        for b in 0..self.blocks.len() {
            let exited: u32 = self.blocks[b].warps.iter().map(|w| w.exited().count_ones()).sum();
            for number in 0..if exited > 0 { BARRIERS } else { 0 } {
                let state = &mut self.blocks[b].barriers[number];
                if state.of_all && state.arrived > 0 && state.arrived + exited >= state.expected {
                    let mut state = std::mem::take(state);
                    self.none_skips(exited, &state)?;
                    self.gather_exited(b..b + 1, &mut state.gathering);
                    self.pass(&mut Warp::detached(), &state);
                }
            }
        }
        for slot in 0..self.clusters.len() {
            self.pass_cluster_without_exited(slot);
        }
        Ok(())
    }

    /// That no thread skips a barrier by exiting, if the checks want that.
    fn none_skips(&self, exited: u32, state: &BarrierState) -> Outcome<()> {
        let Some(waiting) = state.waiting.first().filter(|_| self.checks.strict_barriers) else {
            return Ok(());
        };
        let (i, warp) =
            (&self.program.code[waiting.pc as usize], &self.blocks[waiting.block].warps[waiting.warp]);
        let lane = waiting.lanes.trailing_zeros() as usize;
        let message = format!("waits at a barrier that {exited} threads of the block skip by exiting");
        self.fault(FaultKind::DivergentBarrier, warp, i, lane, message)
    }

    fn pass_cluster_without_exited(&mut self, slot: usize) {
        let (size, ClusterBarrier { state, round, .. }) = (self.cluster_size(), &self.clusters[slot]);
        if state.arrived == 0 {
            return;
        }
        let late = |w: &Warp| lanes(w.exited()).filter(|&l| w.cluster_round[l] <= *round).count() as u32;
        let blocks = slot * size..(slot + 1) * size;
        let exited: u32 = self.blocks[blocks.clone()].iter().flat_map(|b| &b.warps).map(late).sum();
        if state.arrived + exited >= state.expected {
            let mut state = std::mem::take(&mut self.clusters[slot].state);
            self.gather_exited(blocks, &mut state.gathering);
            self.clusters[slot].round += 1;
            self.pass(&mut Warp::detached(), &state);
            self.clusters[slot].last = state.gathering;
        }
    }

    /// What threads that have exited did comes before what others do after the barrier.
    fn gather_exited(&mut self, blocks: std::ops::Range<usize>, gathering: &mut Gathering) {
        for warp in self.blocks[blocks].iter().flat_map(|b| &b.warps).filter(|w| w.exited() != 0) {
            self.clocks.arrive(warp.resident, gathering);
        }
    }

    fn cluster_arrive(
        &mut self,
        warp: &mut Warp,
        i: &Instruction,
        mask: u32,
        releases: bool,
    ) -> Outcome<Next> {
        let slot = warp.block / self.cluster_size();
        let round = self.clusters[slot].round;
        if let Some(l) = lanes(mask).find(|&l| warp.cluster_round[l] > round) {
            return self.fault(
                FaultKind::InvalidOperand,
                warp,
                i,
                l,
                "barrier.cluster.arrive twice without a wait between",
            );
        }
        lanes(mask).for_each(|l| warp.cluster_round[l] = round + 1);
        let expected = self.threads() * self.cluster_size() as u32;
        let state = &mut self.clusters[slot].state;
        state.arrived += mask.count_ones();
        state.expected = expected;
        match releases {
            true => self.clocks.arrive(warp.resident, &mut state.gathering),
            false => self.clocks.arrive_relaxed(warp.resident, Scope::Cluster, &mut state.gathering),
        }
        self.idle = 0;
        if state.arrived == expected {
            let state = std::mem::take(state);
            self.clusters[slot].round += 1;
            self.pass(warp, &state);
            self.clusters[slot].last = state.gathering;
        }
        Ok(Next::On)
    }

    fn cluster_wait(&mut self, warp: &mut Warp, pc: u32, mask: u32, active: u32) -> Next {
        let cluster = &mut self.clusters[warp.block / self.launch.cluster.iter().product::<u32>() as usize];
        if lanes(mask).all(|l| warp.cluster_round[l] <= cluster.round) {
            let all = warp.live & !mask == 0;
            self.clocks.leave(warp.resident, &cluster.last, mask, all);
            return Next::On;
        }
        let (block, kind) = (warp.block, BarrierKind::ClusterWait);
        cluster.state.waiting.push(Waiting { block, warp: warp.number, lanes: mask, pc, kind });
        warp.at_barrier |= mask;
        warp.move_to(mask, pc);
        warp.move_to(active & !mask, pc + 1);
        Next::Apart
    }
}

/// The largest count of arrivals.
const COUNT_MAX: u64 = (1 << 20) - 1;
/// What an initialised barrier's bytes are above its count, for as long as nothing else writes there.
const MBARRIER_MARK: u64 = 0x6d62_6172 << 32;

/// The part of a state that is the phase; above it is the number of arrivals that were missing.
const PHASES: u64 = (1 << 40) - 1;

impl Mbarrier {
    fn state(&self) -> u64 {
        (self.left as u64) << PHASES.count_ones() | self.phase & PHASES
    }
}

/// Which barrier: the block and the offset in its shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MbarrierId {
    pub(super) block: usize,
    pub(super) offset: u64,
}

impl Machine<'_> {
    /// Carries out an operation of a lane on a barrier in memory, or a bulk copy. False if it has to be tried again.
    pub(crate) fn mbarrier_or_bulk(
        &mut self,
        warp: &mut Warp,
        site: Site,
        op: Asynchronous,
    ) -> Outcome<bool> {
        let i = site.i;
        let (a, b) = (warp.get(i.a)[site.lane], warp.get(i.b)[site.lane]);
        match op {
            Asynchronous::MbarrierInit { generic } => self.mbarrier_init(warp, site, (generic, a), b)?,
            Asynchronous::MbarrierInvalidate { generic } => {
                let id = self.mbarrier(warp, site, generic, a)?;
                self.blocks[id.block].mbarriers.remove(&id.offset);
            }
            Asynchronous::MbarrierBytes { generic, expect } => {
                let id = self.mbarrier(warp, site, generic, a)?;
                let bytes = b as u32 as i64;
                self.mbarrier_bytes(id, if expect { bytes } else { -bytes });
            }
            Asynchronous::MbarrierArrive(arrival) => {
                let id = self.mbarrier(warp, site, arrival.generic, a)?;
                let state = self.blocks[id.block].mbarriers.get(&id.offset).map_or(0, Mbarrier::state);
                warp.set(i.d, 1 << site.lane, &[state; 32]);
                if arrival.expect {
                    self.mbarrier_bytes(id, b as u32 as i64);
                }
                if arrival.drop
                    && let Some(barrier) = self.blocks[id.block].mbarriers.get_mut(&id.offset)
                {
                    barrier.count -= 1;
                }
                let times = if arrival.expect { 1 } else { b as u32 as i64 };
                let order = if arrival.relaxed { Order::Relaxed } else { Order::Release };
                self.clocks.publish(warp.resident, self.mbarrier_flag(id), order, Scope::Device);
                self.mbarrier_arrive(warp, site, id, times)?;
            }
            Asynchronous::MbarrierTest { generic, parity, relaxed } => {
                let id = self.mbarrier(warp, site, generic, a)?;
                let phase = self.blocks[id.block].mbarriers.get(&id.offset).map_or(0, |b| b.phase);
                let over = if parity { phase & 1 != b & 1 } else { phase != b & PHASES };
                if over {
                    self.mbarrier_seen(id);
                    let order = if relaxed { Order::Relaxed } else { Order::Acquire };
                    let flag = self.mbarrier_flag(id);
                    self.clocks.listen(warp.resident, flag, order, Scope::Device, false);
                }
                warp.set(i.d, 1 << site.lane, &[over as u64; 32]);
                return Ok(over);
            }
            Asynchronous::MbarrierPending => warp.set(i.d, 1 << site.lane, &[a >> PHASES.count_ones(); 32]),
            Asynchronous::Send(send) => self.send(warp, site, send)?,
            Asynchronous::CopyArrive { noinc } => {
                let id = self.mbarrier(warp, site, false, a)?;
                self.land_lane(warp, site)?;
                self.mbarrier_publish(warp, id);
                if noinc {
                    self.mbarrier_arrive(warp, site, id, 1)?;
                }
            }
            Asynchronous::Bulk(bulk) => self.bulk(warp, site, bulk)?,
            _ => {}
        }
        Ok(true)
    }

    fn mbarrier_place(&self, warp: &Warp, site: Site, generic: bool, address: u64) -> Outcome<MbarrierId> {
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
            Some((block, offset)) if block == warp.block || !self.has_ended(block) => {
                Ok(MbarrierId { block, offset })
            }
            _ => self.outside(warp, site.i, site.lane, "barrier", (Space::Shared, address, 8)),
        }
    }

    fn mbarrier_init(
        &mut self,
        warp: &mut Warp,
        site: Site,
        (generic, address): (bool, u64),
        count: u64,
    ) -> Outcome<()> {
        let id = self.mbarrier_place(warp, site, generic, address)?;
        let range = self.locate(warp, site, "barrier", (Space::Shared, id.offset), (8, 8))?;
        if count == 0 || count > COUNT_MAX {
            let message = format!("a barrier for {count} arrivals, where 1 to {COUNT_MAX} can be");
            return self.fault(FaultKind::InvalidOperand, warp, site.i, site.lane, message);
        }
        if self.is_intact(id) {
            let message = format!(
                "a barrier at offset {} of shared memory, where one is that was not invalidated",
                id.offset
            );
            return self.fault(FaultKind::InvalidOperand, warp, site.i, site.lane, message);
        }
        self.touch(warp, site, range, true, 0)?;
        if let Some(contents) = self.contents_of(range.region) {
            contents.set_number(range.offset, 8, MBARRIER_MARK | count);
        }
        let barrier = Mbarrier { count: count as i64, left: count as i64, ..Mbarrier::default() };
        self.blocks[id.block].mbarriers.insert(id.offset, barrier);
        Ok(())
    }

    /// The barrier at an address.
    pub(crate) fn mbarrier(
        &mut self,
        warp: &Warp,
        site: Site,
        generic: bool,
        address: u64,
    ) -> Outcome<MbarrierId> {
        let id = self.mbarrier_place(warp, site, generic, address)?;
        self.initialised(warp, site, id)
    }

    /// A barrier that a thread uses. That it was initialised before is checked like any other read.
    pub(crate) fn initialised(&mut self, warp: &Warp, site: Site, id: MbarrierId) -> Outcome<MbarrierId> {
        if !self.blocks[id.block].mbarriers.contains_key(&id.offset) {
            let message = format!("no barrier was initialised at offset {} of shared memory", id.offset);
            return self.fault(FaultKind::Uninitialised, warp, site.i, site.lane, message);
        }
        let range =
            ByteRange { region: Region::Shared { block: id.block }, offset: id.offset as usize, bytes: 8 };
        self.touch(warp, site, range, false, STRONG)?;
        if !self.is_intact(id) {
            let message = format!(
                "the barrier at offset {} of shared memory was overwritten after its initialisation",
                id.offset
            );
            return self.fault(FaultKind::InvalidOperand, warp, site.i, site.lane, message);
        }
        Ok(id)
    }

    /// Whether a barrier was initialised at a place whose bytes nothing has written since.
    fn is_intact(&mut self, id: MbarrierId) -> bool {
        self.blocks[id.block].mbarriers.contains_key(&id.offset)
            && self
                .contents_of(Region::Shared { block: id.block })
                .is_some_and(|contents| contents.number(id.offset as usize, 8) & !COUNT_MAX == MBARRIER_MARK)
    }

    fn mbarrier_flag(&self, id: MbarrierId) -> u64 {
        self.shared_flag(id.block, id.offset)
    }

    /// More bytes are expected, or have come.
    pub(crate) fn mbarrier_bytes(&mut self, id: MbarrierId, bytes: i64) {
        self.idle = 0;
        if let Some(barrier) = self.blocks[id.block].mbarriers.get_mut(&id.offset) {
            barrier.bytes += bytes;
        }
        self.mbarrier_end_phase(id);
    }

    fn mbarrier_arrive(&mut self, warp: &Warp, site: Site, id: MbarrierId, times: i64) -> Outcome<()> {
        self.idle = 0;
        let Some(barrier) = self.blocks[id.block].mbarriers.get_mut(&id.offset) else { return Ok(()) };
        barrier.left -= times;
        if barrier.left < 0 {
            let message = "more arrivals at the barrier than a phase has";
            return self.fault(FaultKind::InvalidOperand, warp, site.i, site.lane, message);
        }
        self.mbarrier_end_phase(id);
        Ok(())
    }

    /// What a warp has done so far is known to every thread that waits for the barrier.
    pub(crate) fn mbarrier_publish(&mut self, warp: &Warp, id: MbarrierId) {
        let flag = self.mbarrier_flag(id);
        self.clocks.publish(warp.resident, flag, Order::Release, Scope::Device);
    }

    /// Bytes that arrive with the end of the phase.
    pub(crate) fn mbarrier_add_landing(&mut self, id: MbarrierId, landing: Landing) {
        let range = landing.range;
        if let Some(contents) = self.contents_of(range.region) {
            contents.announce(range.offset, range.offset + range.bytes);
        }
        if let Some(barrier) = self.blocks[id.block].mbarriers.get_mut(&id.offset) {
            barrier.landing.push(landing);
        }
    }

    /// Ends the phase if nothing is missing.
    fn mbarrier_end_phase(&mut self, id: MbarrierId) {
        let Some(barrier) = self.blocks[id.block].mbarriers.get_mut(&id.offset) else { return };
        if barrier.left != 0 || barrier.bytes != 0 {
            return;
        }
        barrier.phase += 1;
        barrier.left = barrier.count;
        let landing = std::mem::take(&mut barrier.landing);
        barrier.landed.extend(landing);
    }

    /// A thread has seen the end of a phase: only now are the bytes there.
    fn mbarrier_seen(&mut self, id: MbarrierId) {
        let Some(barrier) = self.blocks[id.block].mbarriers.get_mut(&id.offset) else { return };
        for landing in std::mem::take(&mut barrier.landed) {
            if let Some(contents) = self.contents_of(landing.range.region) {
                contents.land(landing.range.offset, &landing.data, |byte| landing.written[byte]);
            }
        }
    }
}
