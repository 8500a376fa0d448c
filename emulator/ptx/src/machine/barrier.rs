//! Barriers of a block and of a cluster.

use super::block::BARRIERS;
use super::clocks::Gathering;
use super::run::Next;
use super::warp::{Warp, lanes};
use super::{Machine, Outcome};
use crate::FaultKind;
use crate::code::{Barrier, BarrierKind, Instruction, NOWHERE};
use crate::lanes::LANES;

/// What has come to a barrier and what waits there.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meeting {
    pub(crate) expected: u32,
    pub(crate) arrived: u32,
    pub(crate) waiting: Vec<Waiting>,
    gathering: Gathering,
    /// Threads that came with a true predicate.
    yes: u32,
    /// Someone has come without waiting.
    passed: bool,
    /// It is for all threads of the block, without a count.
    of_all: bool,
}

/// Lanes that wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) block: usize,
    pub(crate) warp: usize,
    pub(crate) lanes: u32,
    pub(crate) at: u32,
    kind: BarrierKind,
}

/// The barrier of a cluster, whose arriving and waiting are two instructions.
#[derive(Debug, Default)]
pub(crate) struct ClusterMeeting {
    pub(crate) meeting: Meeting,
    round: u32,
    /// What the last round passed on.
    last: Gathering,
}

impl ClusterMeeting {
    /// As before the first round.
    pub(crate) fn clear(&mut self) {
        *self = ClusterMeeting::default();
    }
}

impl Machine<'_> {
    pub(crate) fn barrier(
        &mut self,
        warp: &mut Warp,
        at: u32,
        i: &Instruction,
        barrier: Barrier,
        mask: u32,
        active: u32,
    ) -> Outcome<Next> {
        match barrier.kind {
            BarrierKind::ClusterArrive => return self.cluster_arrive(warp, i, mask),
            BarrierKind::ClusterWait => return Ok(self.cluster_wait(warp, at, mask, active)),
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
            self.same_instruction(warp, at, i, number as usize, count)?;
        }
        let whole = mask == warp.live && warp.live == warp.lanes;
        let weight = if count != 0 && whole { 32 } else { mask.count_ones() };
        let c = warp.get(i.c);
        let yes = lanes(mask).filter(|&l| c[l] & 1 == 1).count() as u32;
        let meeting = &mut self.blocks[warp.block].barriers[number as usize];
        meeting.expected = expected;
        meeting.of_all = count == 0;
        meeting.arrived += weight;
        meeting.yes += yes;
        self.clocks.arrive(warp.resident, &mut meeting.gathering);
        self.idle = 0;
        if barrier.kind == BarrierKind::Arrive {
            meeting.passed = true;
        } else {
            let (block, kind) = (warp.block, barrier.kind);
            meeting.waiting.push(Waiting { block, warp: warp.number, lanes: mask, at, kind });
            warp.stopped |= mask;
            warp.move_to(mask, at);
            warp.move_to(active & !mask, at + 1);
        }
        if meeting.arrived >= expected {
            let meeting = std::mem::take(meeting);
            let all = expected == self.threads() && !meeting.passed;
            self.pass(warp, &meeting);
            if all && self.blocks.len() == 1 {
                self.clocks.all_met();
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
        let meeting = &self.blocks[warp.block].barriers[number];
        if !count.is_multiple_of(32) {
            let message = format!("barrier {number} for {count} threads, which is no multiple of 32");
            return self.fault(FaultKind::InvalidOperand, warp, i, lane, message);
        }
        if meeting.arrived > 0 && meeting.expected != expected {
            let message = format!(
                "barrier {number} for {expected} threads, where others wait for {}",
                meeting.expected
            );
            return self.fault(FaultKind::InvalidOperand, warp, i, lane, message);
        }
        Ok(expected)
    }

    /// Lanes of a warp come to an aligned barrier by one instruction; all warps to the common one of all threads.
    fn same_instruction(
        &self,
        warp: &Warp,
        at: u32,
        i: &Instruction,
        number: usize,
        count: u32,
    ) -> Outcome<()> {
        for waiting in &self.blocks[warp.block].barriers[number].waiting {
            let own = waiting.warp == warp.number;
            if waiting.at == at || !(own || number == 0 && count == 0) {
                continue;
            }
            let other = &self.program.code[waiting.at as usize];
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
    fn pass(&mut self, current: &mut Warp, meeting: &Meeting) {
        self.report.barriers += 1;
        self.idle = 0;
        for w in &meeting.waiting {
            let i = &self.program.code[w.at as usize];
            let own = w.block == current.block && w.warp == current.number;
            let warp = if own { &mut *current } else { &mut self.blocks[w.block].warps[w.warp] };
            warp.stopped &= !w.lanes;
            warp.move_to(w.lanes, w.at + 1);
            if i.d != NOWHERE {
                let value = match w.kind {
                    BarrierKind::Count => meeting.yes as u64,
                    BarrierKind::All => {
                        (meeting.yes == meeting.arrived.min(self.launch.block.iter().product())) as u64
                    }
                    _ => (meeting.yes > 0) as u64,
                };
                warp.set(i.d, w.lanes, &[value; LANES]);
            }
            let all = warp.live & !w.lanes == 0;
            self.clocks.leave(warp.resident, &meeting.gathering, w.lanes, all);
        }
    }

    /// Lets those go on who wait for nobody but threads that have exited: a barrier of all is one of all threads that there still are
    /// (PTX ISA, `barrier.cluster`; CUDA programming guide, of `__syncthreads` since Volta). A barrier with a count counts on.
    pub(crate) fn pass_without_exited(&mut self) {
        for b in 0..self.blocks.len() {
            let exited: u32 = self.blocks[b].warps.iter().map(|w| w.exited().count_ones()).sum();
            for number in 0..if exited > 0 { BARRIERS } else { 0 } {
                let meeting = &mut self.blocks[b].barriers[number];
                if meeting.of_all && meeting.arrived > 0 && meeting.arrived + exited >= meeting.expected {
                    let mut meeting = std::mem::take(meeting);
                    self.gather_exited(b..b + 1, &mut meeting.gathering);
                    self.pass(&mut Warp::nobody(), &meeting);
                }
            }
        }
        let round = self.cluster.round;
        let late = |w: &Warp| lanes(w.exited()).filter(|&l| w.cluster_round[l] <= round).count() as u32;
        let meeting = &self.cluster.meeting;
        if meeting.arrived > 0
            && meeting.arrived + self.blocks.iter().flat_map(|b| &b.warps).map(late).sum::<u32>()
                >= meeting.expected
        {
            let mut meeting = std::mem::take(&mut self.cluster.meeting);
            self.gather_exited(0..self.blocks.len(), &mut meeting.gathering);
            self.cluster.round += 1;
            self.pass(&mut Warp::nobody(), &meeting);
            self.cluster.last = meeting.gathering;
        }
    }

    /// What threads that have exited did comes before what others do after the barrier.
    fn gather_exited(&mut self, blocks: std::ops::Range<usize>, gathering: &mut Gathering) {
        for warp in self.blocks[blocks].iter().flat_map(|b| &b.warps).filter(|w| w.exited() != 0) {
            self.clocks.arrive(warp.resident, gathering);
        }
    }

    fn cluster_arrive(&mut self, warp: &mut Warp, i: &Instruction, mask: u32) -> Outcome<Next> {
        let round = self.cluster.round;
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
        let expected = self.threads() * self.blocks.len() as u32;
        let meeting = &mut self.cluster.meeting;
        meeting.arrived += mask.count_ones();
        meeting.expected = expected;
        self.clocks.arrive(warp.resident, &mut meeting.gathering);
        self.idle = 0;
        if meeting.arrived == expected {
            let meeting = std::mem::take(meeting);
            self.cluster.round += 1;
            self.pass(warp, &meeting);
            self.cluster.last = meeting.gathering;
        }
        Ok(Next::On)
    }

    fn cluster_wait(&mut self, warp: &mut Warp, at: u32, mask: u32, active: u32) -> Next {
        if lanes(mask).all(|l| warp.cluster_round[l] <= self.cluster.round) {
            let all = warp.live & !mask == 0;
            self.clocks.leave(warp.resident, &self.cluster.last, mask, all);
            return Next::On;
        }
        let (block, kind) = (warp.block, BarrierKind::ClusterWait);
        self.cluster.meeting.waiting.push(Waiting { block, warp: warp.number, lanes: mask, at, kind });
        warp.stopped |= mask;
        warp.move_to(mask, at);
        warp.move_to(active & !mask, at + 1);
        Next::Apart
    }
}
