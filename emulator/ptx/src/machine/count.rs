//! What [`Counters`] counts of each instruction. Nothing here runs unless they are wanted.

use std::ops::Range;

use super::state::{Machine, Warp};
use crate::code::{Asynchronous, Instruction, Matrix, Op, Space};
use crate::counters::{Balance, Counters, Traffic};
use crate::lanes::{LANES, Lanes, lanes};

/// What is counted while a launch runs.
#[derive(Debug, Default)]
pub(crate) struct Count {
    /// By instruction.
    traffic: Vec<Traffic>,
    longest: u64,
}

impl Count {
    /// For that many instructions.
    pub(super) fn new(instructions: usize) -> Box<Count> {
        Box::new(Count { traffic: vec![Traffic::default(); instructions], longest: 0 })
    }
}

impl Machine<'_> {
    /// Counts the accesses of an instruction of a warp.
    #[cold]
    pub(super) fn count_access(&mut self, warp: &Warp, pc: u32, i: &Instruction, mask: u32) {
        let (space, bytes, addresses) = match i.op {
            Op::Load(a) | Op::Store(a) => (a.space, a.size as u64 * a.count as u64, self.addresses(warp, i)),
            Op::Atomic(a) => (a.space, a.size as u64 * a.count as u64, self.addresses(warp, i)),
            Op::Asynchronous(number) => match self.program.asynchronous[number as usize] {
                Asynchronous::Copy { size } => {
                    self.count_of_space(pc, Space::Shared, warp.get(i.a), mask, size as u64);
                    (Space::Global, size as u64, *warp.get(i.b))
                }
                _ => return,
            },
            Op::Matrix(number) => match self.program.matrices[number as usize] {
                // The lanes of eight rows come with an address each: a matrix is a phase.
                Matrix::Fragment(f) => {
                    let rows = u32::MAX >> (32 - 8 * f.count);
                    return self.count_of_space(pc, f.space, &self.addresses(warp, i), mask & rows, 16);
                }
                _ => return,
            },
            _ => return,
        };
        self.count_of_space(pc, space, &addresses, mask, bytes);
    }

    fn count_of_space(&mut self, pc: u32, space: Space, addresses: &Lanes, mask: u32, bytes: u64) {
        let (mut addresses, mut rest) = (*addresses, mask);
        while rest != 0 {
            let (space, same) = self.same_space(space, &mut addresses, rest);
            rest &= !same;
            let Some(count) = &mut self.count else { return };
            let traffic = &mut count.traffic[pc as usize];
            match space {
                Space::Global => traffic.global(lanes(same).map(|l| addresses[l]), bytes),
                Space::Shared => {
                    let wanted: [Option<u64>; LANES] =
                        std::array::from_fn(|l| (same >> l & 1 == 1).then_some(addresses[l]));
                    traffic.shared(&wanted, bytes as usize);
                }
                _ => {}
            }
        }
    }

    /// Threads of these resident blocks have ended.
    pub(super) fn count_threads(&mut self, blocks: Range<usize>) {
        let Some(count) = &mut self.count else { return };
        for warp in self.blocks[blocks].iter_mut().flat_map(|block| &mut block.warps) {
            count.longest = warp.executed.iter().copied().fold(count.longest, u64::max);
            warp.executed = [0; LANES];
        }
    }

    /// What was counted, by line of the source.
    pub(super) fn counters(&self) -> Counters {
        let Some(count) = &self.count else { return Counters::default() };
        let mut counters = Counters { launches: 1, ..Counters::default() };
        for (i, traffic) in self.program.code.iter().zip(&count.traffic) {
            if *traffic != Traffic::default() {
                counters.lines.entry(self.place(i)).or_default().add(*traffic);
            }
        }
        let blocks: u64 = self.launch.grid.iter().map(|&n| n as u64).product();
        counters.balance = Balance {
            longest: count.longest,
            instructions: self.report.lane_instructions,
            threads: blocks * self.threads() as u64,
        };
        counters
    }
}
