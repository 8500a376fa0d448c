//! Reduces columns. A vector holds one element of several columns. Where columns lie along memory, squares are turned first.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use std::ops::Range;

use super::combine::halves;
use super::{Combine, Stored, Term};
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector, each};
use crate::source::BLOCK;

/// Rows read side by side: they are brought together in registers.
pub(super) const SIDE: usize = 4;
/// Columns of which a vector is brought together over all rows, at most.
const NARROW: usize = 128;

/// Some columns of some rows, brought together with what `sums` holds.
pub(super) struct Columns<'a, E, W, const K: usize> {
    pub(super) x: &'a [E],
    /// How far apart rows begin; columns, if they lie along memory.
    pub(super) stride: usize,
    pub(super) along: bool,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) shifts: &'a [W],
    pub(super) sums: &'a mut [[W; BLOCK]; K],
}

/// What is done with them.
pub(super) struct OfColumns<'a, E, W, C, F, const K: usize> {
    pub(super) combine: C,
    pub(super) term: F,
    pub(super) columns: Columns<'a, E, W, K>,
}

impl<E: Stored<W>, W: Float, C: Combine, F: Term<K>, const K: usize> Kernel for OfColumns<'_, E, W, C, F, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (mut columns, lanes) = (self.columns, <W::Vec<S> as Vector>::LANES);
        let (c, t) = (self.combine, self.term);
        if columns.along {
            for column in (0..columns.width).step_by(lanes) {
                columns.add_turned::<S, C, F>(c, t, column);
            }
            return;
        }
        // Few columns stay in the first-level cache meanwhile; of many, rows are read as they lie.
        let at_once = if columns.width <= NARROW { columns.rows } else { SIDE };
        for row in (0..columns.rows).step_by(at_once.max(1)) {
            let rows = row..columns.rows.min(row + at_once);
            for column in (0..columns.width).step_by(lanes) {
                match column + lanes > columns.width {
                    false => columns.add::<S, C, F, false>(c, t, rows.clone(), column),
                    true => columns.add::<S, C, F, true>(c, t, rows.clone(), column),
                }
            }
        }
    }
}

impl<E: Stored<W>, W: Float, const K: usize> Columns<'_, E, W, K> {
    /// One vector of columns of some rows.
    #[inline(always)]
    fn add<S: Isa, C: Combine, F: Term<K>, const PART: bool>(
        &mut self,
        c: C,
        term: F,
        rows: Range<usize>,
        column: usize,
    ) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        let end = if PART { self.width.min(column + lanes) } else { column + lanes };
        let shift = match self.shifts {
            [] => W::Vec::<S>::zero(),
            shifts => W::load::<S>(&shifts[column..end], W::ZERO),
        };
        let mut totals: [W::Vec<S>; K] = each(|k| W::load::<S>(&self.sums[k][column..end], W::ZERO));
        let mut row = rows.start;
        while row < rows.end {
            let x = &self.x[row * self.stride + column..];
            let (terms, count) = if row + SIDE <= rows.end {
                let terms = each::<_, SIDE>(|i| {
                    // The next rows, which are far from these, come near meanwhile. The first-level cache has no room for
                    // them where all rows share its places.
                    W::Vec::<S>::prefetch_far(x.as_ptr().wrapping_add((SIDE + i) * self.stride).cast());
                    term.of(E::load::<S>(&x[i * self.stride..][..end - column], W::ZERO), shift)
                });
                (halves(c, terms, SIDE), SIDE)
            } else {
                (term.of(E::load::<S>(&x[..end - column], W::ZERO), shift), 1)
            };
            totals = each(|k| C::merge(totals[k], terms[k]));
            row += count;
        }
        for (sums, total) in self.sums.iter_mut().zip(totals) {
            total.store_partial(&mut sums[column..end]);
        }
    }

    /// A vector of columns that lie along memory, of all rows.
    #[inline(always)]
    fn add_turned<S: Isa, C: Combine, F: Term<K>>(&mut self, c: C, term: F, column: usize) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        let end = self.width.min(column + lanes);
        let shift = match self.shifts {
            [] => W::Vec::<S>::zero(),
            shifts => W::load::<S>(&shifts[column..end], W::ZERO),
        };
        let mut totals: [W::Vec<S>; K] = each(|k| W::load::<S>(&self.sums[k][column..end], W::ZERO));
        let mut row = 0;
        // A square whose size is known stays in registers.
        while lanes >= SIDE && row + lanes <= self.rows && end == column + lanes {
            let square = self.turned::<S>([row, lanes], [column, lanes]);
            for first in (0..lanes).step_by(SIDE) {
                let terms = halves(c, each::<_, SIDE>(|i| term.of(square[first + i], shift)), SIDE);
                totals = each(|k| C::merge(totals[k], terms[k]));
            }
            row += lanes;
        }
        while row < self.rows {
            let rows = if row + SIDE <= self.rows { SIDE } else { 1 };
            let (mut terms, mut square) = ([totals; SIDE], [W::Vec::<S>::zero(); LANES_MAX]);
            for i in 0..rows {
                if i % lanes == 0 {
                    square = self.turned::<S>([row + i, lanes.min(rows - i)], [column, end - column]);
                }
                terms[i] = term.of(square[i % lanes], shift);
            }
            let terms = halves(c, terms, rows);
            totals = each(|k| C::merge(totals[k], terms[k]));
            row += rows;
        }
        for (sums, total) in self.sums.iter_mut().zip(totals) {
            total.store_partial(&mut sums[column..end]);
        }
    }

    /// Rows of some columns, at most as many of either as there are lanes.
    #[inline(always)]
    fn turned<S: Isa>(
        &self,
        [row, rows]: [usize; 2],
        [column, columns]: [usize; 2],
    ) -> [W::Vec<S>; LANES_MAX] {
        let mut square = [W::Vec::<S>::zero(); LANES_MAX];
        for (i, vector) in square.iter_mut().enumerate().take(columns) {
            *vector = E::load::<S>(&self.x[(column + i) * self.stride + row..][..rows], W::ZERO);
        }
        W::Vec::<S>::turn(&mut square);
        square
    }
}
