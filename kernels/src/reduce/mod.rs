//! Reductions: an output element depends on all elements along some dimensions.
//!
//! Whatever the shape and strides, the input is seen as `[outer, n, inner]` and reduced over `n` ([`Frame`]). A
//! reduction states what it takes of an element ([`Term`]) and how those are brought together ([`Combine`]):
//! [`fold`] does it in vectors, in an order that the shape alone decides; [`fold_each`] is its counterpart for what
//! is not computed in vectors.

mod columns;
mod combine;
pub(crate) mod cuda;
mod each;
mod each_cuda;
mod frame;
mod rows;
mod term;

use phalanx_tensor::{Result, Tensor};

use crate::real::Real;
use crate::simd::Float;

pub(crate) use combine::{Combine, Largest, Smallest, Total};
pub(crate) use each::fold_each;
pub(crate) use each_cuda::{Kind, VALUE, each, stored};
pub(crate) use frame::Frame;
pub(crate) use term::{Deviation, ExpAbove, Itself, Magnitude, NonZero, Power, Relative, Square, Term};

/// Reduces every output's elements to `K` numbers, and calls `finish(output index, numbers)` for what is to be
/// stored. `shifts` holds a number for each output that the terms refer to, or nothing.
///
/// Blocks of elements are brought together in the type that is computed in, over several vectors side by side; the
/// blocks' results in f64.
pub(crate) fn fold<T: Real, C: Combine, F: Term<K>, U: Send, const K: usize>(
    op: &'static str,
    frame: &Frame,
    (combine, term): (C, F),
    shifts: &[T::Wide],
    out: &mut [U],
    finish: impl Fn(usize, [f64; K]) -> U + Sync,
) -> Result<()> {
    let fold = Fold { combine, term, shifts };
    match frame.inner {
        1 => rows::fold::<T, _, _, _, K>(op, frame, fold, out, finish),
        _ => columns::fold::<T, _, _, _, K>(op, frame, fold, out, finish),
    }
}

/// [`fold`] of a tensor to a new one of its dtype. `finish` is given the count of an output's elements too.
pub(crate) fn fold_tensor<T: Real, C: Combine, F: Term<K>, const K: usize>(
    op: &'static str,
    frame: &Frame,
    fold_with: (C, F),
    shifts: &[T::Wide],
    out: &mut Tensor,
    finish: impl Fn(usize, [f64; K]) -> f64 + Sync,
) -> Result<()> {
    let numel = out.numel();
    let mut target = out.write::<T>(op)?;
    let finish = |i: usize, parts: [f64; K]| T::narrow(T::Wide::from_f64(finish(i, parts)));
    fold::<T, C, F, T, K>(op, frame, fold_with, shifts, &mut target[..numel], finish)
}

/// What a pass over the elements does.
#[derive(Clone, Copy)]
struct Fold<'a, W, C, F> {
    combine: C,
    term: F,
    /// One for each output, or none.
    shifts: &'a [W],
}

impl<'a, W, C: Copy, F: Copy> Fold<'a, W, C, F> {
    /// The fold of some of the outputs.
    fn of(self, outputs: std::ops::Range<usize>) -> Self {
        let shifts = if self.shifts.is_empty() { self.shifts } else { &self.shifts[outputs] };
        Fold { shifts, ..self }
    }
}

/// Brings results together by halves, so that rounding errors grow with the logarithm of their number.
fn pairwise<C: Combine, const K: usize>(combine: C, parts: &[[f64; K]]) -> [f64; K] {
    match parts {
        [] => [C::START; K],
        [one] => *one,
        _ => {
            let (left, right) = parts.split_at(parts.len().next_power_of_two() / 2);
            join(combine, pairwise(combine, left), pairwise(combine, right))
        }
    }
}

fn join<C: Combine, const K: usize>(_: C, a: [f64; K], b: [f64; K]) -> [f64; K] {
    std::array::from_fn(|k| C::join(a[k], b[k]))
}
