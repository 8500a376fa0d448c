//! Faults, with everything that says where.

use super::shadow::{Cell, SAME, instruction, lane, record};
use super::warp::Warp;
use super::{Machine, Outcome};
use crate::code::{Atomic, Instruction, Op, Update};
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
        let (kernel, at) = (self.kernel.name.clone(), self.location(i));
        Err(Box::new(Fault { kind, kernel, at, ptx_line: i.line, block, thread, message: message.into() }))
    }

    /// The source location of an instruction.
    pub(crate) fn location(&self, i: &Instruction) -> Option<Location> {
        self.program.places.get((i.place as usize).checked_sub(1)?).cloned()
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

    /// Whether the access in a cell is a compare-and-swap. A plain read may meet one: such a loop begins with it (CUDA programming guide,
    /// atomic functions), and the swap itself finds out whether the value was right.
    #[cold]
    pub(crate) fn swapped(&self, cell: Cell) -> bool {
        let i = &self.program.code[instruction(cell) as usize];
        matches!(i.op, Op::Atomic(Atomic { update: Update::Swap, .. }))
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
        let missing = match (here, same_warp) {
            (true, true) => "with no __syncwarp or barrier between",
            (true, false) => "with no barrier between",
            (false, _) => "and nothing orders the two blocks",
        };
        let message = format!("{verb} {what}, {done} {}, {missing}", self.party(warp, cell));
        self.fault(kind, warp, i, me, message)
    }

    /// Where and whose the access in a cell was.
    pub(crate) fn party(&self, warp: &Warp, cell: Cell) -> String {
        let Some(party) = self.clocks.find(record(cell)) else { return "by another thread".into() };
        let here = party.block == self.blocks[warp.block].number;
        let number = party.warp as usize % self.warps_a_block();
        let [x, y, z] = self.thread(number, lane(cell) as usize);
        let [bx, by, bz] = self.block_index(party.block);
        let whose = if here { String::new() } else { format!(" of block ({bx}, {by}, {bz})") };
        let several = if cell & SAME != 0 { " (among others)" } else { "" };
        let line = self.place(&self.program.code[instruction(cell) as usize]);
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
}
