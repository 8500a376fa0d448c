//! Makes faults, with the kernel, line, block and thread; also those of a launch in which no thread can go on.

use super::state::{Block, Machine, Outcome, Warp};
use crate::code::{Collective, Instruction, Op};
use crate::lanes::lanes;
use crate::memory::shadow::{Cell, SAME, STRONG, lane, record, scope};
use crate::{Fault, FaultKind, Location};

impl Machine<'_> {
    /// A fault of a lane at an instruction.
    #[cold]
    pub(crate) fn fault<T>(
        &self,
        kind: FaultKind,
        warp: &Warp,
        i: &Instruction,
        lane: usize,
        message: impl Into<String>,
    ) -> Outcome<T> {
        let (block, thread) = (self.blocks[warp.block].index, self.thread(warp.number, lane));
        let (kernel, at) = (self.kernel.name.clone(), self.location(i).map(Box::new));
        let (ptx_line, message) = (i.line, message.into());
        Err(Box::new(Fault { kind, kernel, at, ptx_line, block, thread, message, seed: None }))
    }

    /// The source location of an instruction.
    pub(crate) fn location(&self, i: &Instruction) -> Option<Location> {
        self.program.locations.get((i.location as usize).checked_sub(1)?).cloned()
    }

    /// Where an instruction is, in words.
    pub(crate) fn place(&self, i: &Instruction) -> String {
        self.location(i).map_or_else(|| format!("PTX line {}", i.line), |at| at.to_string())
    }

    /// The index of a thread in its block.
    pub(crate) fn thread(&self, warp: usize, lane: usize) -> [u32; 3] {
        let number = (warp * 32 + lane) as u32;
        let [x, y, _] = self.launch.block;
        [number % x, number / x % y, number / x / y]
    }

    /// A race between a lane and the access in a cell.
    #[cold]
    pub(crate) fn race<T>(
        &self,
        kind: FaultKind,
        warp: &Warp,
        i: &Instruction,
        own: (usize, bool),
        other: (Cell, bool),
        what: &str,
    ) -> Outcome<T> {
        let (me, writes) = own;
        let (cell, wrote) = other;
        let verb = if writes { "writes" } else { "reads" };
        let done = if wrote { "written" } else { "read" };
        let party = self.clocks.find(record(cell));
        let here = party.is_none_or(|party| party.block == self.blocks[warp.block].number);
        let same_warp = here && party.is_some_and(|party| party.warp as usize == warp.resident);
        let narrow = party.is_some_and(|by| !self.clocks.shares(warp.resident, by, scope(cell)));
        let missing = match (here, same_warp) {
            _ if self.clocks.heard_unfenced(warp.resident, record(cell)) => {
                "of which a flag was read, but with no acquire or fence behind that read"
            }
            _ if cell & STRONG != 0 && narrow => "atomically, but only for its own block or cluster",
            (true, true) => "with no __syncwarp or barrier between",
            (true, false) => "with no barrier between",
            (false, _) => "and nothing orders the two blocks",
        };
        let message = format!("{verb} {what}, {done} {}, {missing}", self.party(warp, cell));
        self.fault(kind, warp, i, me, message)
    }

    /// The place and the thread of the access in a cell, for reports.
    pub(crate) fn party(&self, warp: &Warp, cell: Cell) -> String {
        let Some(party) = self.clocks.find(record(cell)) else { return "by another thread".into() };
        let here = party.block == self.blocks[warp.block].number;
        let number = party.warp as usize % self.warps_a_block();
        let [x, y, z] = self.thread(number, lane(cell) as usize);
        let [bx, by, bz] = self.block_index(party.block);
        let whose = if here { String::new() } else { format!(" of block ({bx}, {by}, {bz})") };
        let several = if cell & SAME != 0 { " (among others)" } else { "" };
        let line = self.place(self.instruction_of(cell));
        format!("at {line} by thread ({x}, {y}, {z}){several}{whose}")
    }

    /// Warps of a block.
    pub(crate) fn warps_a_block(&self) -> usize {
        let [x, y, z] = self.launch.block;
        ((x * y * z) as usize).div_ceil(32)
    }

    /// The index of a block of a number.
    pub(crate) fn block_index(&self, number: u32) -> [u32; 3] {
        let [x, y, _] = self.launch.grid;
        [number % x, number / x % y, number / x / y]
    }

    /// The blocks of a warp's cluster.
    fn cluster_of(&self, warp: &Warp) -> &[Block] {
        let size = self.cluster_size();
        &self.blocks[warp.block / size * size..][..size]
    }

    /// Some warp with threads left that satisfies a condition.
    fn some_warp(&self, is: impl Fn(&Warp) -> bool) -> Option<&Warp> {
        self.blocks.iter().flat_map(|b| &b.warps).find(|w| w.live != 0 && is(w))
    }

    fn at(&self, warp: &Warp, lane: usize) -> &Instruction {
        &self.program.code[warp.pc[lane] as usize]
    }

    /// No thread can go on: the fault names threads that wait, and where.
    #[cold]
    pub(crate) fn stuck(&self) -> Outcome<()> {
        if let Some(warp) = self.some_warp(|w| w.at_warp_op != 0) {
            let lane = warp.at_warp_op.trailing_zeros() as usize;
            let i = self.at(warp, lane);
            let named = warp.get(i.e)[lane] as u32;
            let missing = named & warp.live & !warp.at_warp_op;
            let other = lanes(if missing != 0 { missing } else { named & warp.live & !(1 << lane) }).next();
            let whereabouts = other
                .map_or(String::new(), |l| format!("; lane {l} waits at {}", self.place(self.at(warp, l))));
            let what = match i.op {
                Op::Collective(Collective::Synchronize, _) => "__syncwarp",
                _ => "the operation",
            };
            let message = format!("mask {named:#010x} of {what} names lanes that do not come{whereabouts}");
            return self.fault(FaultKind::DivergentShuffle, warp, i, lane, message);
        }
        let Some(warp) = self.some_warp(|w| w.at_barrier != 0) else { return Ok(()) };
        let lane = warp.at_barrier.trailing_zeros() as usize;
        let i = self.at(warp, lane);
        let mut kind = FaultKind::Deadlock;
        let block = &self.blocks[warp.block];
        let exited: u32 = block.warps.iter().map(|w| w.exited().count_ones()).sum();
        let mut elsewhere = Vec::new();
        for other in block
            .warps
            .iter()
            .chain(self.cluster_of(warp).iter().filter(|b| b.rank != block.rank).flat_map(|b| &b.warps))
        {
            for l in lanes(other.at_barrier).filter(|&l| other.pc[l] != warp.pc[lane]) {
                let place = self.place(self.at(other, l));
                if elsewhere.iter().all(|(_, p)| *p != place) {
                    elsewhere.push((self.thread(other.number, l), place));
                }
            }
        }
        let mut message = "waits at a barrier that others of the block do not reach".to_string();
        if exited > 0 {
            kind = FaultKind::DivergentBarrier;
            message += &format!("; {exited} threads of the block have exited");
        }
        for ([x, y, z], place) in elsewhere.iter().take(4) {
            kind = FaultKind::DivergentBarrier;
            message += &format!("; thread ({x}, {y}, {z}) waits at {place}");
        }
        self.fault(kind, warp, i, lane, message)
    }

    /// Threads go on, but none has written anything for long.
    #[cold]
    pub(crate) fn spinning(&self) -> Outcome<()> {
        let mut message = format!("no thread has written anything in {} instructions of warps", self.idle);
        let (blocks, size) = (self.blocks.len() as u32, self.cluster_size() as u32);
        if self.order.come < self.order.clusters && blocks >= self.order.room * size {
            let grid = self.order.clusters * size;
            message += &format!(
                "; {blocks} of the grid's {grid} blocks are on the device, which is all that fit at once, so that those \
                 which wait for the others wait forever"
            );
        }
        self.running(FaultKind::Deadlock, message)
    }

    /// A block has executed more instructions than `Checks::instructions_max`.
    #[cold]
    pub(crate) fn endless(&self) -> Outcome<()> {
        let message =
            format!("the block is not over after {} instructions of warps", self.checks.instructions_max);
        self.running(FaultKind::Endless, message)
    }

    /// The fault of a thread that could go on; says where others are.
    fn running(&self, kind: FaultKind, mut message: String) -> Outcome<()> {
        let Some(warp) = self.some_warp(|w| w.runnable() != 0) else { return Ok(()) };
        let lane = warp.runnable().trailing_zeros() as usize;
        let mut named = 0;
        for (block, other) in self.blocks.iter().flat_map(|b| b.warps.iter().map(move |w| (b, w))) {
            if other.live == 0 || other.resident == warp.resident || named == 4 {
                continue;
            }
            named += 1;
            let l = other.live.trailing_zeros() as usize;
            let ([x, y, z], [bx, by, bz]) = (self.thread(other.number, l), block.index);
            let place = self.place(self.at(other, l));
            message += &format!("; thread ({x}, {y}, {z}) of block ({bx}, {by}, {bz}) is at {place}");
        }
        self.fault(kind, warp, self.at(warp, lane), lane, message)
    }
}
