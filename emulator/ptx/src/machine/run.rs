//! The loop that runs a warp: lanes that took different ways join again because those at the lowest instruction run
//! first.

use super::state::{ALL, Group, Machine, Next, Outcome, RANK_SHIFT, SHARED_WINDOW, Warp, space_of};
use crate::code::{Clock, Collective, Instruction, MOVE, NOWHERE, Op, Preset, Special};
use crate::device::MULTIPROCESSORS;
use crate::lanes::{LANES, lanes};
use crate::{FaultKind, Launch, Schedule};

/// Instructions after which lanes that still run give others a turn.
const TURN: u32 = 1 << 11;

/// Instructions that a test of a barrier in memory, or a `nanosleep`, counts for among those without progress.
const YIELD: u64 = 1 << 12;

impl Machine<'_> {
    /// Runs a warp until none of its lanes can go on, or its turn is over.
    pub(crate) fn run_warp(&mut self, warp: &mut Warp) -> Outcome<()> {
        let mut turns = TURN;
        while let Some(group) = warp.choose() {
            if !self.run_group::<false>(warp, group, &mut turns)? {
                warp.rested |= group.lanes;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Runs lanes until they part, meet others, or wait. `false` if their turn is over. In a seeded order that may be
    /// before any instruction, and lanes wait for the others of their warp before a barrier.
    pub(crate) fn run_group<const SEEDED: bool>(
        &mut self,
        warp: &mut Warp,
        group: Group,
        turns: &mut u32,
    ) -> Outcome<bool> {
        let Group { mut pc, lanes: active, join } = group;
        let program = self.program;
        let mut executed = 0u64;
        let outcome = loop {
            if SEEDED {
                let over = executed >= *turns as u64;
                if over || executed > 0 && self.waits_for_lanes(warp, pc, active) {
                    warp.move_to(active, pc);
                    break Ok(!over);
                }
            }
            let i = &program.code[pc as usize];
            executed += 1;
            let mask = if i.guard == NOWHERE { active } else { active & warp.holds(i.guard, i.wanted) };
            if i.watched
                && mask != 0
                && let Err(fault) = self.watched(warp, pc, i, mask.trailing_zeros() as usize)
            {
                break Err(fault);
            }
            match i.op {
                Op::Map(map) => {
                    if mask != 0 {
                        if !warp.unwritten.is_empty()
                            && let Err(fault) = self.pass_unwritten(warp, i, map, mask)
                        {
                            break Err(fault);
                        }
                        let approximate = self.checks.approximate.filter(|_| i.offset > MOVE);
                        let operands = approximate.map(|_| [*warp.get(i.a), *warp.get(i.b)]);
                        warp.map(map, i.d, [i.a, i.b, i.c, i.e], mask);
                        if let (Some(seed), Some(operands)) = (approximate, operands) {
                            warp.perturb(seed, i, &operands, mask);
                        }
                    }
                }
                Op::Branch(target) => {
                    if mask == active {
                        if target <= pc {
                            *turns = turns.saturating_sub((executed as u32).min(TURN));
                            self.executed(warp, &mut executed, active);
                            if *turns == 0 {
                                warp.move_to(active, target);
                                break Ok(false);
                            }
                        }
                        pc = target;
                        if pc >= join {
                            warp.move_to(active, pc);
                            break Ok(true);
                        }
                        continue;
                    }
                    if mask != 0 {
                        warp.move_to(mask, target);
                        warp.move_to(active & !mask, pc + 1);
                        *turns = turns.saturating_sub(executed as u32);
                        self.executed(warp, &mut executed, active);
                        break Ok(*turns > 0);
                    }
                }
                _ if mask == 0 => {}
                _ => match self.step(warp, pc, i, mask, active) {
                    Ok(Next::On) => {}
                    Ok(Next::Apart) => break Ok(true),
                    Ok(Next::Yield) => {
                        warp.move_to(active, pc + 1);
                        self.idle += YIELD;
                        self.waited += YIELD;
                        break Ok(false);
                    }
                    Err(fault) => break Err(fault),
                },
            }
            pc += 1;
            if pc >= join {
                warp.move_to(active, pc);
                break Ok(true);
            }
        };
        if SEEDED {
            *turns = turns.saturating_sub(executed as u32);
        }
        self.executed(warp, &mut executed, active);
        outcome
    }

    fn executed(&mut self, warp: &mut Warp, executed: &mut u64, active: u32) {
        self.report.warp_instructions += *executed;
        self.idle += *executed;
        self.report.lane_instructions += *executed * active.count_ones() as u64;
        if self.count.is_some() {
            lanes(active).for_each(|l| warp.executed[l] += *executed);
        }
        *executed = 0;
    }

    /// Carries out what is neither a map nor a branch. `active` are the lanes that are here, `mask` those that take
    /// part.
    #[inline(never)]
    fn step(&mut self, warp: &mut Warp, pc: u32, i: &Instruction, mask: u32, active: u32) -> Outcome<Next> {
        if warp.at_warp_op != 0 && matches!(i.op, Op::Load(_) | Op::Store(_) | Op::Atomic(_)) {
            warp.worked |= mask;
        }
        // A shuffle passes on what its source has.
        if !warp.unwritten.is_empty() && !matches!(i.op, Op::Collective(Collective::Shuffle(_), _)) {
            warp.forget_unwritten(i.d, mask);
        }
        if self.count.is_some() {
            self.count_access(warp, pc, i, mask);
        }
        match i.op {
            Op::Load(access) => self.load(warp, pc, i, access, mask)?,
            Op::Store(access) => self.store(warp, pc, i, access, mask)?,
            Op::Atomic(atomic) => self.atomic(warp, pc, i, atomic, mask)?,
            Op::Collective(op, p) => return self.meet(warp, pc, i, (op, p), mask, active),
            Op::Barrier(barrier) => return self.barrier(warp, pc, i, barrier, mask, active),
            Op::Fence(scope) => {
                if self.checks.global_races || self.checks.shared_races {
                    self.clocks.fence(warp.resident, scope);
                }
            }
            Op::ProxyFence => self.proxy_fence(warp, mask),
            Op::Return if !warp.deep => return self.exit(warp, pc, mask, active),
            Op::Exit => return self.exit(warp, pc, mask, active),
            Op::Return => return self.return_lanes(warp, pc, mask, active),
            Op::Call(number) => return self.call(warp, pc, i, number, mask, active),
            Op::BranchTable(table) => {
                let targets = &self.program.tables[table as usize];
                warp.move_to(active & !mask, pc + 1);
                for l in lanes(mask) {
                    let index = warp.get(i.a)[l] as usize;
                    let Some(&target) = targets.get(index) else {
                        let why = format!("branch to entry {index} of {}", targets.len());
                        return self.fault(FaultKind::InvalidOperand, warp, i, l, why);
                    };
                    warp.pc[l] = target;
                }
                return Ok(Next::Apart);
            }
            Op::Trap => {
                let mut why = "the kernel executed `trap`".to_string();
                let reads = |(_, preset): &(_, _)| matches!(preset, Preset::Special(Special::Environment(_)));
                if self.workspace.is_none() && self.program.presets.iter().any(reads) {
                    why += "; `grid.sync()` and `multi_grid.sync()` do so in a launch that is not cooperative \
                            (cuLaunchCooperativeKernel)";
                }
                return self.fault(FaultKind::Trap, warp, i, mask.trailing_zeros() as usize, why);
            }
            Op::Refused(number) => {
                let why = self.program.refusals[number as usize].clone();
                return self.fault(FaultKind::Unsupported, warp, i, mask.trailing_zeros() as usize, why);
            }
            Op::Stack(op) => self.stack(warp, i, op, mask)?,
            Op::IsSpace(space) => {
                let values = warp.get(i.a).map(|a| (space_of(a) == space) as u64);
                warp.set(i.d, mask, &values);
            }
            Op::ActiveMask => warp.set(i.d, mask, &[mask as u64; LANES]),
            Op::ReadClock(clock) => {
                // Time passes with the instructions, so that runs repeat.
                let now = self.report.warp_instructions + self.waited;
                let now = match clock {
                    Clock::Low => now & 0xffff_ffff,
                    Clock::High => now >> 32,
                    Clock::Whole => now,
                };
                self.report.warp_instructions += 1;
                warp.set(i.d, mask, &[now; LANES]);
            }
            Op::MapShared { generic } => self.map_shared(warp, i, mask, generic),
            Op::RankOfShared { generic } => self.rank_of_shared(warp, i, mask, generic),
            Op::Yield => return Ok(Next::Yield),
            Op::Nop | Op::Map(_) | Op::Branch(_) => {}
            Op::Matrix(number) => return self.matrix(warp, pc, i, number, mask, active),
            Op::Asynchronous(number) => return self.asynchronous(warp, pc, i, number, mask),
        }
        Ok(Next::On)
    }

    /// Ends threads. One that others wait for may end, but not go on with other work and then end.
    fn exit(&mut self, warp: &mut Warp, pc: u32, mask: u32, active: u32) -> Outcome<Next> {
        // In a seeded order lanes may go on before they are waited for, and be ones that need not come.
        let looks = warp.worked & mask != 0 && self.checks.schedule == Schedule::Fixed;
        for l in lanes(if looks { warp.at_warp_op } else { 0 }) {
            let i = &self.program.code[warp.pc[l] as usize];
            let missing = warp.get(i.e)[l] as u32 & warp.worked & mask;
            if matches!(i.op, Op::Collective(..)) && missing != 0 {
                let lane = missing.trailing_zeros();
                let why = format!("lane {lane} is named in the mask and ends without coming here");
                return self.fault(FaultKind::DivergentShuffle, warp, i, l, why);
            }
        }
        warp.live &= !mask;
        warp.move_to(active & !mask, pc + 1);
        self.idle = 0;
        Ok(Next::Apart)
    }

    fn map_shared(&mut self, warp: &mut Warp, i: &Instruction, mask: u32, generic: bool) {
        let window = if generic { SHARED_WINDOW } else { 0 };
        let (a, b) = (*warp.get(i.a), *warp.get(i.b));
        let mut values = [0; LANES];
        for l in 0..LANES {
            let offset = a[l].wrapping_sub(window) & ((1 << RANK_SHIFT) - 1);
            values[l] = window + (((b[l] & 0xff) + 1) << RANK_SHIFT | offset);
        }
        warp.set(i.d, mask, &values);
    }

    fn rank_of_shared(&mut self, warp: &mut Warp, i: &Instruction, mask: u32, generic: bool) {
        let window = if generic { SHARED_WINDOW } else { 0 };
        let own = self.blocks[warp.block].rank as u64;
        let values = warp.get(i.a).map(|a| match a.wrapping_sub(window) >> RANK_SHIFT {
            0 => own,
            rank => rank - 1,
        });
        warp.set(i.d, mask, &values);
    }

    /// The value of a special register for a lane.
    pub(crate) fn special(&self, warp: &Warp, special: Special, lane: usize) -> u64 {
        let block = &self.blocks[warp.block];
        let Launch { grid, block: threads, cluster, .. } = self.launch;
        let l = lane as u32;
        let shared = self.program.dynamic_start.max(self.kernel.shared_bytes) + self.launch.shared_bytes;
        let value = match special {
            Special::Thread(axis) => self.thread(warp.number, lane)[axis as usize],
            Special::Threads(axis) => threads[axis as usize],
            Special::Block(axis) => block.index[axis as usize],
            Special::Blocks(axis) => grid[axis as usize],
            Special::Lane => l,
            Special::Warp => warp.number as u32,
            Special::Warps => self.warps_a_block() as u32,
            Special::MaskEqual => 1 << l,
            Special::MaskBelow => (1 << l) - 1,
            Special::MaskUpTo => ALL >> (31 - l),
            Special::MaskAbove => !(ALL >> (31 - l)),
            Special::MaskFrom => ALL << l,
            Special::Processor => block.number % MULTIPROCESSORS,
            Special::Processors => MULTIPROCESSORS,
            Special::Grid => 1,
            Special::DynamicShared => self.launch.shared_bytes,
            Special::TotalShared => shared,
            Special::ClusterThreadBlock(axis) => block.index[axis as usize] % cluster[axis as usize],
            Special::ClusterBlocks(axis) => cluster[axis as usize],
            Special::Cluster(axis) => block.index[axis as usize] / cluster[axis as usize],
            Special::Clusters(axis) => grid[axis as usize] / cluster[axis as usize],
            Special::ClusterRank => block.rank,
            Special::ClusterSize => cluster.iter().product(),
            Special::Environment(1) => (self.workspace.unwrap_or(0) >> 32) as u32,
            Special::Environment(2) => self.workspace.unwrap_or(0) as u32,
            Special::Environment(_) => 0,
            Special::ExplicitCluster => (cluster != [1, 1, 1]) as u32,
        };
        value as u64
    }
}
