//! The last accesses of each few bytes: a cell for the last write, and cells for one or two reads.
//!
//! A cell is one number: the record of the access (block, warp, stretch between two synchronizations), the instruction,
//! the lane, and flags. Records are numbered upwards over all launches, so cells of earlier launches need not be wiped:
//! their numbers are small.

use std::ops::Range;

use crate::code::Scope;

/// An access in a cell: record in bits 32.., instruction in 10..32, lane in 5..10, flags below. Zero is none.
pub(crate) type Cell = u64;

/// The access is atomic, or otherwise one that may meet others of its kind.
pub(crate) const STRONG: Cell = 1;
/// Several lanes wrote the same value at once.
pub(crate) const SAME: Cell = 2;
/// The asynchronous proxy wrote (a bulk copy, for one), not a thread.
pub(crate) const ASYNC: Cell = 4;
/// The access is strong among the threads of a cluster, or of a block, only.
pub(crate) const IN_CLUSTER: Cell = 8;
pub(crate) const IN_BLOCK: Cell = 16;
/// Where the lane begins, and the instruction.
const LANE: u32 = 5;
const INSTRUCTION: u32 = 10;
/// Record and lane of a cell: which thread it was, and when.
const THREAD: Cell = 0xffff_ffff_0000_03e0;

/// A cell.
#[inline(always)]
pub(crate) fn cell(record: u32, instruction: u32, lane: u32, flags: Cell) -> Cell {
    (record as u64) << 32
        | (instruction_number(instruction) as u64) << INSTRUCTION
        | (lane as u64) << LANE
        | flags
}

/// The record of a cell.
#[inline(always)]
pub(crate) fn record(cell: Cell) -> u32 {
    (cell >> 32) as u32
}

/// The instruction of a cell.
pub(crate) fn instruction(cell: Cell) -> u32 {
    (cell >> INSTRUCTION) as u32 & 0x3f_ffff
}

/// An instruction's number as a cell has it.
pub(crate) fn instruction_number(pc: u32) -> u32 {
    pc & 0x3f_ffff
}

/// The lane of a cell.
pub(crate) fn lane(cell: Cell) -> u32 {
    (cell >> LANE) as u32 & 31
}

/// The scope in which the access of a cell is strong.
pub(crate) fn scope(cell: Cell) -> Scope {
    match cell & (IN_CLUSTER | IN_BLOCK) {
        0 => Scope::Device,
        IN_CLUSTER => Scope::Cluster,
        _ => Scope::Block,
    }
}

/// Which cells cannot race: of earlier launches, of before the block's last common barrier, or of the thread
/// itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Past {
    /// Records below belong to earlier launches (of shared memory: to earlier blocks).
    pub(crate) before: u32,
    /// Records of this block from here ...
    pub(crate) own: u32,
    /// ... up to here came before a barrier of all its threads.
    pub(crate) barrier: u32,
}

impl Past {
    #[inline(always)]
    pub(crate) fn covers(self, cell: Cell, me: Cell) -> bool {
        let record = record(cell);
        record < self.before
            || record.wrapping_sub(self.own) < self.barrier - self.own
            || (cell ^ me) & THREAD == 0
    }
}

/// What a cell holds of two accesses of its bytes, the later one `me`: that one, but the weak one of a thread that made a
/// strong one next, with no synchronization between. What races with the weak one alone would not be found otherwise.
#[inline(always)]
fn kept(cell: Cell, me: Cell) -> Cell {
    if me & STRONG != 0 && cell & STRONG == 0 && (cell ^ me) & THREAD == 0 { cell } else { me }
}

/// The cells of an allocation. Empty until a kernel touches it.
#[derive(Debug, Default)]
pub(crate) struct Shadow {
    /// log2 of the bytes a cell stands for.
    shift: u32,
    writes: Vec<Cell>,
    reads: Vec<Cell>,
    /// A second, later read by another thread, where there was one.
    more: Vec<Cell>,
    /// The first record of the launch that touched cells last, and which it touched: none outside of these.
    launch: u32,
    touched: Range<usize>,
}

impl Shadow {
    /// Makes cells for `len` bytes, each for no more bytes than `size`.
    #[inline(always)]
    pub(crate) fn prepare(&mut self, len: usize, size: usize) {
        let wanted = if size >= 4 { 2 } else { size as u32 / 2 };
        if self.writes.is_empty() || wanted < self.shift {
            self.refine(len, wanted);
        }
    }

    #[cold]
    fn refine(&mut self, len: usize, wanted: u32) {
        if self.writes.is_empty() {
            self.shift = wanted;
            let cells = (len >> wanted) + 1;
            (self.writes, self.reads) = (vec![0; cells], vec![0; cells]);
            return;
        }
        let times = 1 << (self.shift - wanted);
        let finer =
            |cells: &Vec<Cell>| cells.iter().flat_map(|&cell| std::iter::repeat_n(cell, times)).collect();
        (self.writes, self.reads, self.more) = (finer(&self.writes), finer(&self.reads), finer(&self.more));
        // The launch's cells are more now.
        self.touched = self.touched.start * times..self.touched.end * times;
        self.shift = wanted;
    }

    /// The last writes of bytes.
    pub(crate) fn writes(&self, at: usize, bytes: usize) -> &[Cell] {
        let first = (at >> self.shift).min(self.writes.len());
        let end = ((at + bytes).div_ceil(1 << self.shift)).min(self.writes.len());
        &self.writes[first..end]
    }

    /// Cells are about to be touched.
    #[inline(always)]
    fn note(&mut self, first: usize, cells: usize, launch: u32) {
        if self.launch != launch {
            (self.launch, self.touched) = (launch, first..first + cells);
        }
        self.touched = self.touched.start.min(first)..self.touched.end.max(first + cells);
    }

    /// What the launch whose records begin at `launch` touched: bytes from the allocation's start, and whether they
    /// were written.
    pub(crate) fn touched(&self, launch: u32) -> impl Iterator<Item = (Range<usize>, bool)> {
        let cells = if self.launch == launch { self.touched.clone() } else { 0..0 };
        let read = move |i: usize| {
            record(self.reads[i]) >= launch || self.more.get(i).is_some_and(|c| record(*c) >= launch)
        };
        let touch = move |i: usize| match record(self.writes[i]) >= launch {
            true => Some(true),
            false => read(i).then_some(false),
        };
        let mut next = cells.start;
        std::iter::from_fn(move || {
            let start = (next..cells.end).find(|&i| touch(i).is_some())?;
            let written = touch(start);
            next = (start..cells.end).find(|&i| touch(i) != written).unwrap_or(cells.end);
            Some((start << self.shift..next << self.shift, written == Some(true)))
        })
    }

    /// Notes a write without looking for races.
    pub(crate) fn overwrite(&mut self, at: usize, bytes: usize, me: Cell) {
        let first = at >> self.shift;
        self.writes[first..first + (bytes >> self.shift).max(1)].fill(me);
    }

    /// Notes a read of `lanes` times `bytes` bytes from `at` on, one lane after the other, each lane's cells with a
    /// number that is `STEP` higher. Calls `unordered` with a write that may not have come before; if that says so,
    /// returns it.
    #[inline(always)]
    pub(crate) fn read(
        &mut self,
        at: usize,
        bytes: usize,
        lanes: usize,
        me: Cell,
        past: Past,
        mut unordered: impl FnMut(Cell, Cell) -> bool,
    ) -> Option<(Cell, usize)> {
        let (first, each) = (at >> self.shift, (bytes >> self.shift).max(1));
        let cells = each * lanes;
        self.note(first, cells, past.before);
        let writes = &self.writes[first..first + cells];
        let reads = &mut self.reads[first..first + cells];
        for lane in 0..lanes {
            let me = me + ((lane as u64) << LANE);
            for i in lane * each..(lane + 1) * each {
                if !past.covers(writes[i], me) && unordered(writes[i], me) {
                    return Some((writes[i], lane));
                }
                if past.covers(reads[i], me) {
                    reads[i] = kept(reads[i], me);
                } else {
                    if self.more.is_empty() {
                        self.more = vec![0; self.writes.len()];
                    }
                    let more = &mut self.more[first + i];
                    if past.covers(*more, me) {
                        *more = kept(*more, me);
                    }
                }
            }
        }
        None
    }

    /// Notes a write, like [`Shadow::read`]; it may meet reads too.
    #[inline(always)]
    pub(crate) fn write(
        &mut self,
        at: usize,
        bytes: usize,
        lanes: usize,
        me: Cell,
        past: Past,
        mut unordered: impl FnMut(Cell, Cell) -> bool,
    ) -> Option<(Cell, usize, bool)> {
        let (first, each) = (at >> self.shift, (bytes >> self.shift).max(1));
        let cells = each * lanes;
        self.note(first, cells, past.before);
        let writes = &mut self.writes[first..first + cells];
        let reads = &self.reads[first..first + cells];
        for lane in 0..lanes {
            let me = me + ((lane as u64) << LANE);
            for i in lane * each..(lane + 1) * each {
                if !past.covers(writes[i], me) && unordered(writes[i], me) {
                    return Some((writes[i], lane, true));
                }
                if !past.covers(reads[i], me) && unordered(reads[i], me) {
                    return Some((reads[i], lane, false));
                }
                if let Some(&more) = self.more.get(first + i)
                    && !past.covers(more, me)
                    && unordered(more, me)
                {
                    return Some((more, lane, false));
                }
                writes[i] = kept(writes[i], me);
            }
        }
        None
    }
}
