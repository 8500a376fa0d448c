//! Registers that products beside the threads use: not to be touched before the product is waited for, nor to be handed to one without
//! a `wgmma.fence` behind what was computed in them.

use super::warp::Warp;
use super::{Machine, Outcome};
use crate::FaultKind;
use crate::code::{Instruction, MOVE, Matrix, NOWHERE, Op, Reg, WarpgroupProduct};

impl Machine<'_> {
    /// An instruction with such a register.
    #[cold]
    pub(crate) fn watched(&mut self, warp: &mut Warp, at: u32, i: &Instruction, lane: usize) -> Outcome<()> {
        // A plain move passes on what it moves: compilers rename accumulators between two products. A constant may be moved at any time.
        if i.offset == MOVE && matches!(i.op, Op::Map(_)) {
            match warp.held.get(&i.a) {
                Some(&group) => warp.held.insert(i.d, group),
                None => warp.held.remove(&i.d),
            };
            match warp.computed.get(&i.a) {
                Some(&by) => warp.computed.insert(i.d, by),
                None => warp.computed.remove(&i.d),
            };
            return Ok(());
        }
        let program = self.program;
        let list = |start: u32, count: usize| &program.lists[start as usize..][..count];
        let (read, loaded): (&[Reg], &[Reg]) = match i.op {
            Op::Load(access) => (&[], list(access.list, access.count as usize)),
            Op::Store(access) => (list(access.list, access.count as usize), &[]),
            Op::Matrix(number) => {
                if let Matrix::Fragment(f) = program.matrices[number as usize]
                    && f.loads
                {
                    warp.computed.extend(list(f.list, f.count as usize).iter().map(|&reg| (reg, at)));
                }
                return Ok(());
            }
            _ => (&[], &[]),
        };
        let touched = [i.d, i.a, i.b, i.c, i.e];
        if touched.iter().chain(read).chain(loaded).any(|reg| *reg != NOWHERE && warp.held.contains_key(reg))
        {
            let message = "register of a wgmma that was not waited for (wgmma.wait_group)";
            return self.fault(FaultKind::Pending, warp, i, lane, message);
        }
        warp.computed.extend([i.d].iter().chain(loaded).filter(|reg| **reg != NOWHERE).map(|&reg| (reg, at)));
        Ok(())
    }

    /// Whether a product's registers are ready for it.
    pub(crate) fn ready(&self, warp: &Warp, i: &Instruction, p: WarpgroupProduct) -> Outcome<()> {
        if !warp.fenced {
            return self.fault(
                FaultKind::MissingFence,
                warp,
                i,
                0,
                "the first wgmma with no wgmma.fence before it",
            );
        }
        let lists = [("an accumulator", p.d, p.d_count), ("a register of A", p.a, p.a_count)];
        for (what, start, count) in lists {
            let list = &self.program.lists[start as usize..][..count as usize];
            if let Some(&by) = list.iter().find_map(|reg| warp.computed.get(reg)) {
                let place = self.place(&self.program.code[by as usize]);
                let message =
                    format!("{what} of the wgmma was computed at {place}, with no wgmma.fence between");
                return self.fault(FaultKind::MissingFence, warp, i, 0, message);
            }
        }
        Ok(())
    }
}
