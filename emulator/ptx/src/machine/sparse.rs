//! Products whose A is sparse (`mma.sp`): of each group of columns half is there, and metadata say which half.
//!
//! The half that is there lies in registers as the A of a product that is half as deep (PTX ISA, matrix fragments for `mma.sp`).
//! Metadata are two bits for each of its elements: the place in its group of four columns. Of four bits an element a pair has them, and
//! of tf32 an element has four bits, as two of 16 bits would. One lane in four, or two neighbours, hold them, which ones the selector
//! says: in the low half of a register those of row `lane / 4`, in the high half those of the row 8 below, 16 bits of a row after the
//! other in the order of these lanes.

use super::matrix::{Place, add, operand_place, quads, register};
use super::state::{Machine, Outcome, Warp};
use crate::FaultKind;
use crate::code::{Element, Instruction, SparseProduct};

impl Machine<'_> {
    pub(super) fn sparse_product(
        &mut self,
        warp: &mut Warp,
        i: &Instruction,
        p: SparseProduct,
    ) -> Outcome<()> {
        let (half, k) = (p.half, p.k() as usize);
        let element = |kind: Element, list: u32, (lane, register, shift): Place| {
            kind.value(warp.get(self.program.lists[list as usize + register])[lane] >> shift)
        };
        let b: Vec<f64> = (0..8 * k)
            .map(|n| element(half.b_kind, half.b, operand_place(half.b_kind, 8, n / k, n % k)))
            .collect();
        let mut tile = [[0.0; 8]; 16];
        for (row, sums) in tile.iter_mut().enumerate() {
            for at in 0..half.k as usize {
                let column = self.column(warp, i, p, row, at)?;
                let a = element(half.a_kind, half.a, operand_place(half.a_kind, 16, row, at));
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum += a * b[n * k + column];
                }
            }
        }
        let list = |start: u32, n: u32| &self.program.lists[start as usize..][..n as usize];
        let [_, _, c_count, d_count] = half.counts();
        let mut sums = quads(half.c_kind, list(half.c, c_count).iter().map(|&reg| warp.get(reg)));
        add(&mut sums, 1.0, &tile);
        if half.saturate && half.d_kind == Element::S32 {
            let ends = (i32::MIN as f64, i32::MAX as f64);
            sums.iter_mut().flatten().for_each(|sum| *sum = sum.clamp(ends.0, ends.1));
        }
        for (r, &reg) in list(half.d, d_count).iter().enumerate() {
            warp.set(reg, u32::MAX, &register(half.d_kind, r, &sums));
        }
        Ok(())
    }

    /// The column of element `at` of those of a row that are there.
    fn column(
        &self,
        warp: &Warp,
        i: &Instruction,
        p: SparseProduct,
        row: usize,
        at: usize,
    ) -> Outcome<usize> {
        // A pair of four bits each has one place, in a group of four pairs.
        let (number, within, wide) = match p.half.a_kind {
            Element::S4 | Element::U4 => (at / 2, at % 2, 2),
            _ => (at, 0, 1),
        };
        let bits = if p.half.a_kind == Element::Tf32 { 4 } else { 2 };
        let each = 16 / bits;
        let holder = p.selector as usize * p.holders() as usize + number / each;
        let lane = row % 8 * 4 + holder;
        let metadata = warp.get(p.metadata)[lane] as u32 >> (row / 8 * 16);
        let place = |number: usize| (metadata >> (number % each * bits)) as usize & ((1 << bits) - 1);
        let wrong = |why: String| {
            let message = format!("metadata of row {row} of a sparse matrix: {why}");
            self.fault(FaultKind::InvalidOperand, warp, i, lane, message)
        };
        if bits == 4 {
            return match place(number) {
                0b0100 => Ok(at * 2),
                0b1110 => Ok(at * 2 + 1),
                other => wrong(format!("{other:#06b}, where 0b0100 or 0b1110 names one of two elements")),
            };
        }
        let (first, second) = (place(number & !1), place(number | 1));
        if first == second || p.ordered && first > second {
            let must = if p.ordered { "ascend" } else { "differ" };
            return wrong(format!("places {first} and {second}, where they must {must}"));
        }
        Ok((number / 2 * 4 + place(number)) * wide + within)
    }
}
