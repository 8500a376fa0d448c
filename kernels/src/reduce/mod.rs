//! Reductions: an output element depends on all input elements along some dimensions.
//!
//! Whatever the shape and strides, the input is seen as `[outer, n, inner]` and reduced over `n` ([`ReduceView`]):
//!
//! ```text
//!  inner == 1   rows.rs      each output is a row of n neighbours (or n elements with a stride, read and transposed)
//!  inner >= 8   columns.rs   outputs are neighbours: vectors hold the sums of several outputs, rows are added to them
//! ```
//!
//! A reduction states what it takes of an element ([`Term`]) and how two numbers are merged ([`Combine`]):
//! [`fold`] runs it in vectors of floats, in an order that the shape alone decides; [`fold_each`] is its counterpart for
//! integers, products and positions. `sum`, `mean`, `var`, `norm`, `prod`, `amax`, `argmax` and batch norm call them; on a GPU
//! they call [`cuda`].

mod columns;
pub(crate) mod cuda;
mod each;
mod rows;
mod term;
#[cfg(test)]
mod tests;
mod view;

use phalanx_tensor::{Result, Tensor};

use crate::block_reader::BLOCK;
use crate::real::Real;
use crate::simd::{Float, dispatch};

use columns::{Columns, OfColumns};
use rows::{OfRows, Rows};

pub(crate) use cuda::{MergeKind, VALUE, each, stored};
pub(crate) use each::{Blocks, By, Least, Most, Product, Sum, Wide, fold_each};
pub(crate) use term::{Combine, Largest, Smallest, Times, Total};
pub(crate) use term::{
    Deviation, ExpAbove, Itself, Magnitude, NonZero, Power, Relative, Square, Stored, Term,
};
pub(crate) use view::ReduceView;

/// Reduces every output's elements to `K` numbers, and stores `finish(output index, numbers)`. `shifts` holds a number for each output that
/// the terms refer to, such as its mean, or is empty.
///
/// A block of elements is merged in the type that is computed in, in several independent vectors; the results of blocks are merged in f64.
pub(crate) fn fold<T: Real, C: Combine, F: Term<K>, U: Send, const K: usize>(
    op: &'static str,
    view: &ReduceView,
    fold_with: (C, F),
    shifts: &[T::Wide],
    out: &mut [U],
    finish: impl Fn(usize, [f64; K]) -> U + Sync,
) -> Result<()> {
    fold_in::<T, T::Wide, C, F, U, K>(op, view, fold_with, shifts, out, finish)
}

/// [`fold`] with blocks merged in type `W`.
pub(crate) fn fold_in<T: Real, W: Float, C: Combine, F: Term<K>, U: Send, const K: usize>(
    op: &'static str,
    view: &ReduceView,
    (combine, term): (C, F),
    shifts: &[W],
    out: &mut [U],
    finish: impl Fn(usize, [f64; K]) -> U + Sync,
) -> Result<()>
where
    T::Wide: Stored<W>,
{
    let finish = |first: usize, totals: &[[f64; K]], out: &mut [U]| {
        for (i, (to, &total)) in out.iter_mut().zip(totals).enumerate() {
            *to = finish(first + i, total);
        }
    };
    let fold = Fold { combine, term };
    let reduction = Reduction { fold: &fold, shifts };
    match view.inner {
        1 => rows::fold::<T, W, U, K>(op, view, reduction, out, &finish),
        _ => columns::fold::<T, W, U, K>(op, view, reduction, out, &finish),
    }
}

/// [`fold`] into a tensor of the input's dtype.
pub(crate) fn fold_tensor<T: Real, C: Combine, F: Term<K>, const K: usize>(
    op: &'static str,
    view: &ReduceView,
    fold_with: (C, F),
    shifts: &[T::Wide],
    out: &mut Tensor,
    finish: impl Fn(usize, [f64; K]) -> f64 + Sync,
) -> Result<()> {
    let numel = out.numel();
    let mut target = out.write::<T>(op)?;
    let finish = |i: usize, parts: [f64; K]| T::narrow(T::Wide::from_f64(finish(i, parts)));
    fold::<T, C, F, T, K>(op, view, fold_with, shifts, &mut target[..numel], finish)
}

/// Stores outputs from a given number on, from the reduced numbers of each.
type Finish<'a, U, const K: usize> = &'a (dyn Fn(usize, &[[f64; K]], &mut [U]) + Sync);

/// What a pass over the elements does with a block of them. `rows.rs` and `columns.rs` call it as a trait object, so that they are compiled
/// once and not for every reduction.
trait Blockwise<E, W: Float, const K: usize>: Sync {
    /// The neutral element.
    fn start(&self) -> f64;
    /// Reduces a block of rows.
    fn rows(&self, rows: Rows<'_, E, W, K>);
    /// Reduces a block of columns.
    fn columns(&self, columns: Columns<'_, E, W, K>);
    /// Merges each output's numbers with others of the same output.
    fn join(&self, totals: &mut [[f64; K]], others: &[[f64; K]]);
    /// Merges each output's numbers with its column of a block.
    fn join_columns(&self, totals: &mut [[f64; K]], columns: &[[W; BLOCK]; K]);
}

struct Fold<C, F> {
    combine: C,
    term: F,
}

/// A reduction, and a number for each output that its terms refer to, or none.
struct Reduction<'a, E, W, const K: usize> {
    fold: &'a dyn Blockwise<E, W, K>,
    shifts: &'a [W],
}

impl<E, W, const K: usize> Clone for Reduction<'_, E, W, K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E, W, const K: usize> Copy for Reduction<'_, E, W, K> {}

impl<'a, E, W: Float, const K: usize> Reduction<'a, E, W, K> {
    /// The shifts of some of the outputs.
    fn shifts_of(self, outputs: std::ops::Range<usize>) -> &'a [W] {
        if self.shifts.is_empty() { self.shifts } else { &self.shifts[outputs] }
    }

    /// Merges results pairwise in a tree, so that rounding errors grow with the logarithm of their number.
    fn pairwise(self, parts: &[[f64; K]]) -> [f64; K] {
        /// Parts of which all pairs are merged in one call.
        const PAIRS: usize = 64;
        if parts.len() > PAIRS {
            let (left, right) = parts.split_at(parts.len().next_power_of_two() / 2);
            let mut total = [self.pairwise(left)];
            self.fold.join(&mut total, &[self.pairwise(right)]);
            return total[0];
        }
        // The same tree from its leaves: neighbours, then neighbouring pairs, and so on; the last one may have no partner.
        let (mut even, mut odd) = ([[self.fold.start(); K]; PAIRS], [[0.0; K]; PAIRS / 2]);
        even[..parts.len()].copy_from_slice(parts);
        let mut count = parts.len();
        while count > 1 {
            let (half, alone) = (count / 2, even[count - 1]);
            for i in 0..half {
                (even[i], odd[i]) = (even[2 * i], even[2 * i + 1]);
            }
            self.fold.join(&mut even[..half], &odd[..half]);
            if count % 2 == 1 {
                even[half] = alone;
            }
            count = count.div_ceil(2);
        }
        even[0]
    }
}

impl<E: Stored<W>, W: Float, C: Combine, F: Term<K>, const K: usize> Blockwise<E, W, K> for Fold<C, F> {
    fn start(&self) -> f64 {
        C::START
    }

    fn rows(&self, rows: Rows<'_, E, W, K>) {
        dispatch(OfRows { combine: self.combine, term: self.term, rows });
    }

    fn columns(&self, columns: Columns<'_, E, W, K>) {
        dispatch(OfColumns { combine: self.combine, term: self.term, columns });
    }

    fn join(&self, totals: &mut [[f64; K]], others: &[[f64; K]]) {
        for (total, other) in totals.iter_mut().zip(others) {
            for (total, &other) in total.iter_mut().zip(other) {
                *total = C::join(*total, other);
            }
        }
    }

    fn join_columns(&self, totals: &mut [[f64; K]], columns: &[[W; BLOCK]; K]) {
        for (column, total) in totals.iter_mut().enumerate() {
            for k in 0..K {
                total[k] = C::join(total[k], columns[k][column].to_f64());
            }
        }
    }
}
