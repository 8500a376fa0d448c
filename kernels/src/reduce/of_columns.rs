//! Reduces columns. A vector holds one element of several columns. Where columns lie along memory, squares are turned first.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use std::ops::Range;

use super::combine::halves;
use super::term::{Elements, Half};
use super::{Combine, Stored, Term};
use crate::pointwise::Input;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, PARTS_MAX, Vector, each};
use crate::source::BLOCK;

/// Rows read side by side: they are brought together in registers.
pub(super) const SIDE: usize = 4;
/// Columns of which a vector is brought together over all rows, at most.
const NARROW: usize = 128;

/// Some columns of some rows, brought together with what `sums` holds.
pub(super) struct Columns<'a, E, W, const K: usize> {
    pub(super) x: Input<'a, E>,
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
        let (c, term, mut columns) = (self.combine, self.term, self.columns);
        let half = match columns.x {
            Input::Wide(x) => return columns.add_all::<S, C, F, _>(c, term, x),
            Input::Bf16(x) => Half::Bf16(x),
            Input::F16(x) => Half::F16(x),
            Input::Same(_) | Input::Each(_) => unreachable!("a tensor's elements are none of these"),
        };
        // Code that no halves come to is left out.
        if E::HALVES {
            columns.add_all::<S, C, F, _>(c, term, half);
        }
    }
}

impl<E: Stored<W>, W: Float, const K: usize> Columns<'_, E, W, K> {
    /// All columns of all rows.
    #[inline(always)]
    fn add_all<S: Isa, C: Combine, F: Term<K>, X: Elements<W>>(&mut self, c: C, term: F, x: X) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        if self.along {
            for column in (0..self.width).step_by(lanes) {
                self.add_turned::<S, C, F, X>(c, term, x, column);
            }
            return;
        }
        // Few columns stay in the first-level cache meanwhile; of many, rows are read as they lie.
        let at_once = if self.width <= NARROW { self.rows } else { SIDE };
        for row in (0..self.rows).step_by(at_once.max(1)) {
            let rows = row..self.rows.min(row + at_once);
            for column in (0..self.width).step_by(lanes) {
                match column + lanes > self.width {
                    false => self.add::<S, C, F, X, false>(c, term, x, rows.clone(), column),
                    true => self.add::<S, C, F, X, true>(c, term, x, rows.clone(), column),
                }
            }
        }
    }

    /// One vector of columns of some rows.
    #[inline(always)]
    fn add<S: Isa, C: Combine, F: Term<K>, X: Elements<W>, const PART: bool>(
        &mut self,
        c: C,
        term: F,
        x: X,
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
            let at = row * self.stride + column;
            let (terms, count) = if row + SIDE <= rows.end {
                let terms = each::<_, SIDE>(|i| {
                    // The next rows, which are far from these, come near meanwhile. The first-level cache has no room for
                    // them where all rows share its places.
                    W::Vec::<S>::prefetch_far(x.address(at + (SIDE + i) * self.stride));
                    term.of(x.load::<S>(at + i * self.stride, end - column, W::ZERO), shift)
                });
                (halves(c, terms, SIDE), SIDE)
            } else {
                (term.of(x.load::<S>(at, end - column, W::ZERO), shift), 1)
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
    fn add_turned<S: Isa, C: Combine, F: Term<K>, X: Elements<W>>(
        &mut self,
        c: C,
        term: F,
        x: X,
        column: usize,
    ) {
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
            if lanes == SIDE * W::Vec::<S>::PARTS {
                let terms = self.fours::<S, C, F, X>(c, term, x, row, column);
                for i in 0..W::Vec::<S>::PARTS {
                    totals = each(|k| C::merge(totals[k], terms[k][i]));
                }
            } else {
                let square = self.turned::<S, X>(x, [row, lanes], [column, lanes]);
                for first in (0..lanes).step_by(SIDE) {
                    let terms = each::<_, SIDE>(|i| term.of(square[first + i], shift));
                    let terms = halves(c, terms, SIDE);
                    totals = each(|k| C::merge(totals[k], terms[k]));
                }
            }
            row += lanes;
        }
        while row < self.rows {
            let rows = if row + SIDE <= self.rows { SIDE } else { 1 };
            let (mut terms, mut square) = ([totals; SIDE], [W::Vec::<S>::zero(); LANES_MAX]);
            for i in 0..rows {
                if i % lanes == 0 {
                    square = self.turned::<S, X>(x, [row + i, lanes.min(rows - i)], [column, end - column]);
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

    /// As many rows and columns that lie along memory as there are lanes: each four rows are brought together as in
    /// [`Columns::add`], while a vector holds one column's and its parts four rows each. Only what comes of them is turned.
    #[inline(always)]
    fn fours<S: Isa, C: Combine, F: Term<K>, X: Elements<W>>(
        &self,
        _: C,
        term: F,
        x: X,
        row: usize,
        column: usize,
    ) -> [[W::Vec<S>; PARTS_MAX]; K] {
        let mut fours = [[W::Vec::<S>::zero(); PARTS_MAX]; K];
        for part in 0..W::Vec::<S>::PARTS {
            let first = column + part * SIDE;
            let mut terms = [[W::Vec::<S>::zero(); K]; SIDE];
            for i in 0..SIDE {
                let shift = if self.shifts.is_empty() { W::ZERO } else { self.shifts[first + i] };
                let x = x.load::<S>((first + i) * self.stride + row, <W::Vec<S> as Vector>::LANES, W::ZERO);
                terms[i] = term.of(x, W::Vec::<S>::splat(shift));
            }
            for k in 0..K {
                let (low, high) = terms[0][k].zip_parts(terms[2][k]);
                let even = C::merge(low, high);
                let (low, high) = terms[1][k].zip_parts(terms[3][k]);
                let (low, high) = even.zip_parts(C::merge(low, high));
                fours[k][part] = C::merge(low, high);
            }
        }
        for k in 0..K {
            fours[k] = W::Vec::<S>::turn_parts(fours[k]);
        }
        fours
    }

    /// Rows of some columns, at most as many of either as there are lanes.
    #[inline(always)]
    fn turned<S: Isa, X: Elements<W>>(
        &self,
        x: X,
        [row, rows]: [usize; 2],
        [column, columns]: [usize; 2],
    ) -> [W::Vec<S>; LANES_MAX] {
        let mut square = [W::Vec::<S>::zero(); LANES_MAX];
        for i in 0..columns {
            square[i] = x.load::<S>((column + i) * self.stride + row, rows, W::ZERO);
        }
        W::Vec::<S>::turn(&mut square);
        square
    }
}
