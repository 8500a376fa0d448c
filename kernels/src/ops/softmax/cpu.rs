//! The softmax of a row: the largest element, the exponentials and their sum, the quotients; the row stays in the
//! cache between the passes.

use crate::rows::{Row, RowKernel, lanes};
use crate::simd::{Float, Isa, Vector};

pub(super) struct Forward;

impl<T: Float> RowKernel<T, 1> for Forward {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 1>) {
        let ([x], y) = (row.x, row.y);
        let max = T::Vec::<S>::splat(lanes::max::<T::Vec<S>>(x));
        lanes::map([x], y, |[x]: [T::Vec<S>; 1]| (x - max).exp());
        let [sum] = lanes::sums([&*y], [T::ZERO], |v: [T::Vec<S>; 1]| v);
        let scale = T::Vec::<S>::splat(T::ONE / sum);
        lanes::update(y, [], |y: T::Vec<S>, []| y * scale);
    }
}

pub(super) struct BackwardOf;

impl<T: Float> RowKernel<T, 2> for BackwardOf {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 2>) {
        let [sum] = lanes::sums(row.x, [T::ZERO; 2], |[y, dy]: [T::Vec<S>; 2]| [y * dy]);
        let sum = T::Vec::<S>::splat(sum);
        lanes::map(row.x, row.y, |[y, dy]: [T::Vec<S>; 2]| y * (dy - sum));
    }
}
