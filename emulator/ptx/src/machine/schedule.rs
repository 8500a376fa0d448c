//! Which blocks are on the device, and who runs next.
//!
//! The fixed order is the fast one. Clusters come in the order of their index, one at a time; its warps have their turns
//! one after the other; of a warp's lanes those at the lowest instruction go first. If all that run only wait for a value
//! in global memory, more clusters come, as many as fit on the device: a grid may have a barrier of its own making.
//!
//! A seed draws another order: clusters in any order and several at once; a warp for a few instructions; lanes of a warp
//! at different instructions, also where no branch has parted them (independent thread scheduling). Some warps and lanes
//! lag behind for a while, so that others run far ahead. Lanes of a warp come to a barrier of the block together.

use super::state::{Group, Machine, Outcome, Warp};
use crate::Schedule;
use crate::code::Op;
use crate::device::MULTIPROCESSORS;
use crate::lanes::lanes;

/// Instructions without progress, or of any kind since the last cluster came, and strong reads of global memory, after which more come.
const IDLE: u64 = 1 << 14;
const BUSY: u64 = 1 << 17;
const POLLS: u64 = 1 << 8;

/// Turns of warps for which the same warps and lanes lag behind.
const PHASE: u64 = 1 << 8;

/// Turns after which barriers are looked at for threads that have exited.
const PASS: u64 = 1 << 6;

/// Of so many choices, one ignores who lags behind.
const HASTE: u64 = 8;

/// Clusters that are on the device at the beginning, at most, in a seeded order.
const AT_ONCE: u64 = 6;

/// Random numbers from a seed (SplitMix64).
#[derive(Debug)]
pub(crate) struct Random {
    seed: u64,
    drawn: u64,
}

impl Random {
    fn new(seed: u64) -> Random {
        Random { seed, drawn: 0 }
    }

    fn next(&mut self) -> u64 {
        self.drawn += 1;
        mixed(self.seed, self.drawn)
    }

    /// A number below `n`.
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
}

/// The random number of a seed and a number.
fn mixed(seed: u64, number: u64) -> u64 {
    let x = seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The order of a launch, and how far it has come.
#[derive(Debug)]
pub(crate) struct Order {
    /// Of a seeded order.
    random: Option<Random>,
    turns: u64,
    /// The clusters' numbers in the order in which they come, if that is not the one of their index.
    shuffled: Vec<u32>,
    /// How many have come, of how many.
    pub(crate) come: u32,
    pub(crate) clusters: u32,
    /// How many the device holds.
    pub(crate) room: u32,
    /// Whether a cluster is in each slot, and in how many one is.
    present: Vec<bool>,
    left: usize,
    /// Strong reads of global memory since clusters came.
    pub(crate) polls: u64,
    /// Instructions when a cluster last came or went.
    since: u64,
}

impl Order {
    /// The order of so many clusters, of which the device holds `room`.
    pub(crate) fn new(schedule: Schedule, clusters: u32, room: u32) -> Order {
        let mut random = match schedule {
            Schedule::Fixed => None,
            Schedule::Seeded(seed) => Some(Random::new(seed)),
        };
        let mut shuffled: Vec<u32> = Vec::new();
        if let Some(random) = &mut random {
            shuffled = (0..clusters).collect();
            for i in (1..shuffled.len()).rev() {
                shuffled.swap(i, random.below(i as u64 + 1) as usize);
            }
        }
        let (turns, come, present, left, polls, since) = (0, 0, Vec::new(), 0, 0, 0);
        Order { random, turns, shuffled, come, clusters, room, present, left, polls, since }
    }

    /// The number of the next cluster.
    fn next(&mut self) -> Option<u32> {
        if self.come == self.clusters {
            return None;
        }
        self.come += 1;
        Some(self.shuffled.get(self.come as usize - 1).copied().unwrap_or(self.come - 1))
    }

    /// Clusters that come before the first instruction.
    fn at_once(&mut self) -> u32 {
        let most = self.clusters.min(self.room) as u64;
        match &mut self.random {
            None => 1,
            Some(random) => 1 + random.below(most.min(AT_ONCE)) as u32,
        }
    }

    /// A random number that stays the same for a phase.
    fn steady(&self, number: u64) -> u64 {
        let seed = self.random.as_ref().map_or(0, |random| random.seed);
        mixed(seed ^ 0x5eed, (self.turns / PHASE) << 32 | number)
    }

    /// Whether a warp lags behind.
    fn lags(&self, warp: usize) -> bool {
        self.steady(warp as u64).is_multiple_of(4)
    }

    /// The lanes of a warp that lag behind.
    fn lagging_lanes(&self, warp: usize) -> u32 {
        let x = self.steady(1 << 31 | warp as u64);
        let mask = (x >> 32) as u32;
        match x % 8 {
            0 => mask,
            1 => 1 << (mask % 32),
            2 => !(1 << (mask % 32)),
            3 => u32::MAX << (mask % 32),
            4 => !(u32::MAX << (mask % 32)),
            _ => 0,
        }
    }
}

impl Machine<'_> {
    /// Runs all blocks of the grid to their ends.
    pub(crate) fn grid(&mut self) -> Outcome<()> {
        let first = if self.workspace.is_some() { self.order.clusters } else { self.order.at_once() };
        self.bring(first);
        while self.order.left > 0 {
            let ran = match self.order.random {
                None => self.every_warp()?,
                Some(_) => self.some_warp_runs()?,
            };
            if !ran {
                return self.stuck();
            }
            let busy = self.report.warp_instructions - self.order.since > BUSY;
            if (busy || self.idle > IDLE) && self.order.polls > POLLS {
                self.bring_more();
            }
            if self.idle > self.checks.stuck_after {
                return self.spinning();
            }
            let most = self.checks.instructions_max.saturating_mul(self.order.left as u64);
            if self.report.warp_instructions - self.order.since > most {
                return self.endless();
            }
        }
        Ok(())
    }

    /// So many clusters come, each into a new slot.
    fn bring(&mut self, clusters: u32) {
        for _ in 0..clusters {
            let Some(number) = self.order.next() else { return };
            let slot = self.order.present.len();
            self.make_slot();
            self.begin(slot, number);
            self.order.present.push(true);
            self.order.left += 1;
        }
    }

    /// As many clusters come as there are, if there is room: those that are there may wait for them.
    #[cold]
    fn bring_more(&mut self) {
        let slots = self.order.present.len() as u32;
        let more =
            slots.min(self.order.room.saturating_sub(slots)).min(self.order.clusters - self.order.come);
        if more > 0 {
            self.bring(more);
            (self.idle, self.order.polls) = (0, 0);
            self.order.since = self.report.warp_instructions;
        }
    }

    /// The next cluster comes into a slot if the one in it is over.
    fn replace(&mut self, slot: usize) {
        let size = self.cluster_size();
        let over =
            self.blocks[slot * size..(slot + 1) * size].iter().flat_map(|b| &b.warps).all(|w| w.live == 0);
        if !over || !self.order.present[slot] {
            return;
        }
        self.count_threads(slot * size..(slot + 1) * size);
        match self.order.next() {
            Some(number) => self.begin(slot, number),
            None => {
                self.order.present[slot] = false;
                self.order.left -= 1;
            }
        }
        self.order.since = self.report.warp_instructions;
    }

    /// Each warp that can go on has its turn. Whether there was one.
    fn every_warp(&mut self) -> Outcome<bool> {
        let mut ran = false;
        for b in 0..self.blocks.len() {
            for w in 0..self.blocks[b].warps.len() {
                if self.blocks[b].warps[w].runnable() != 0 {
                    ran = true;
                    self.turn(b, w)?;
                }
            }
        }
        self.pass_without_exited()?;
        for slot in 0..self.order.present.len() {
            self.replace(slot);
        }
        Ok(ran)
    }

    fn turn(&mut self, b: usize, w: usize) -> Outcome<()> {
        let mut warp = std::mem::take(&mut self.blocks[b].warps[w]);
        let run = if self.order.random.is_some() {
            self.run_warp_at_random(&mut warp)
        } else {
            self.run_warp(&mut warp)
        };
        let outcome = run.and_then(|()| self.finish_warp_ops(&mut warp));
        self.blocks[b].warps[w] = warp;
        outcome
    }

    /// A warp that the seed chooses has its turn. Whether there was one.
    fn some_warp_runs(&mut self) -> Outcome<bool> {
        self.order.turns += 1;
        let mut chosen = self.choose_warp();
        if chosen.is_none() || self.order.turns.is_multiple_of(PASS) {
            self.pass_without_exited()?;
            chosen = chosen.or_else(|| self.choose_warp());
        }
        let Some((b, w)) = chosen else { return Ok(false) };
        self.turn(b, w)?;
        if self.blocks[b].warps[w].live == 0 {
            self.pass_without_exited()?;
            self.replace(b / self.cluster_size());
        }
        Ok(true)
    }

    fn choose_warp(&mut self) -> Option<(usize, usize)> {
        let each = self.warps_a_block();
        let all = self.blocks.len() * each;
        let random = self.order.random.as_mut()?;
        let draws: [u64; 16] = std::array::from_fn(|_| random.next());
        let can = |machine: &Self, w: usize| machine.blocks[w / each].warps[w % each].runnable() != 0;
        for draw in draws {
            let w = (draw >> 8) as usize % all;
            if can(self, w) && (!self.order.lags(w) || draw % HASTE == 0) {
                return Some((w / each, w % each));
            }
        }
        let start = draws[0] as usize % all;
        (0..all).map(|w| (start + w) % all).find(|&w| can(self, w)).map(|w| (w / each, w % each))
    }

    /// Runs some lanes of a warp for some instructions.
    fn run_warp_at_random(&mut self, warp: &mut Warp) -> Outcome<()> {
        let Some(random) = &mut self.order.random else { return Ok(()) };
        let most = 1 << (4 * random.below(3));
        let mut turns = 1 + random.below(most) as u32;
        while turns > 0 {
            let Some(group) = self.choose_lanes(warp) else { return Ok(()) };
            if !self.run_group::<true>(warp, group, &mut turns)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Lanes at one instruction. Those at a barrier of the block wait until no others are on their way.
    fn choose_lanes(&mut self, warp: &Warp) -> Option<Group> {
        let runnable = warp.runnable();
        let under_way = self.under_way(warp);
        let lagging = self.order.lagging_lanes(warp.resident);
        let random = self.order.random.as_mut()?;
        let mut candidates = if under_way != 0 { under_way } else { runnable };
        if under_way & !lagging != 0 && random.below(HASTE) != 0 {
            candidates &= !lagging;
        }
        let chosen = random.below(candidates.count_ones() as u64) as usize;
        let pc = warp.pc[lanes(candidates).nth(chosen)?];
        let lanes = lanes(candidates).filter(|&l| warp.pc[l] == pc).fold(0, |mask, l| mask | 1 << l);
        Some(Group { pc, lanes, join: u32::MAX })
    }

    /// The lanes that can go on and are not at a barrier.
    fn under_way(&self, warp: &Warp) -> u32 {
        let at_barrier = |l: &usize| self.is_meeting(warp.pc[*l]);
        lanes(warp.runnable()).filter(|l| !at_barrier(l)).fold(0, |mask, l| mask | 1 << l)
    }

    fn is_meeting(&self, pc: u32) -> bool {
        matches!(self.program.code[pc as usize].op, Op::Barrier(_))
    }

    /// Whether lanes that have come to an instruction wait there for others of their warp.
    pub(crate) fn waits_for_lanes(&self, warp: &Warp, pc: u32, active: u32) -> bool {
        self.is_meeting(pc) && warp.runnable() & !active != 0
    }

    /// Blocks of a cluster.
    pub(crate) fn cluster_size(&self) -> usize {
        self.launch.cluster.iter().product::<u32>() as usize
    }

    /// Clusters that a device holds.
    pub(crate) fn room(&self) -> u32 {
        let blocks = self.kernel.blocks_per_multiprocessor(self.threads(), self.launch.shared_bytes);
        (blocks * MULTIPROCESSORS / self.cluster_size() as u32).max(1)
    }
}
