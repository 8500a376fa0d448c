//! Which instructions touch registers of products that run beside the threads: the machine looks twice at these.

use super::Builder;
use crate::code::{Instruction, MOVE, Matrix, NOWHERE, Op};

impl Builder<'_> {
    /// Marks instructions with an accumulator or a fragment of a `wgmma`, or with what such a register is moved to or from.
    pub(super) fn watch(&mut self) {
        let mut watched = vec![false; self.program.registers as usize];
        for matrix in &self.program.matrices {
            if let Matrix::Warpgroup(p) = matrix {
                self.mark(&mut watched, p.d, p.d_count);
                self.mark(&mut watched, p.a, p.a_count);
            }
        }
        if !watched.contains(&true) {
            return;
        }
        let mut preset = vec![false; watched.len()];
        self.program.presets.iter().for_each(|(reg, _)| preset[*reg as usize] = true);
        let moves = |i: &&Instruction| {
            i.offset == MOVE && matches!(i.op, Op::Map(_)) && i.d != NOWHERE && !preset[i.a as usize]
        };
        let moves: Vec<(usize, usize)> =
            self.program.code.iter().filter(moves).map(|i| (i.a as usize, i.d as usize)).collect();
        let mut more = true;
        while std::mem::take(&mut more) {
            for &(a, d) in moves.iter() {
                more |= watched[a] != watched[d];
                (watched[a], watched[d]) = (watched[a] | watched[d], watched[a] | watched[d]);
            }
        }
        let program = &mut self.program;
        for i in &mut program.code {
            let list = match i.op {
                Op::Load(access) | Op::Store(access) => {
                    &program.lists[access.list as usize..][..access.count as usize]
                }
                Op::Matrix(number) => match program.matrices[number as usize] {
                    Matrix::Fragment(f) => &program.lists[f.list as usize..][..f.count as usize],
                    _ => &[],
                },
                _ => &[],
            };
            let mut registers = [i.d, i.a, i.b, i.c, i.e].into_iter().chain(list.iter().copied());
            i.watched = registers.any(|reg| watched.get(reg as usize) == Some(&true));
        }
    }
}
