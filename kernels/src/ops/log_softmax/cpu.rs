//! The logarithm of a row's softmax. The largest element is subtracted first and the logarithm of the sum after it, so
//! that large logits lose nothing.

use crate::rows::columns::{self, ColumnKernel, Columns, SIDE};
use crate::rows::{Row, RowKernel, lanes};
use crate::simd::{Float, Isa, Vector};

pub(super) struct Forward;

impl<T: Float> RowKernel<T, 1> for Forward {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 1>) {
        let ([x], y) = (row.x, row.y);
        let max = lanes::max::<T::Vec<S>>(x);
        let shift = T::Vec::<S>::splat(max);
        let exp = |[x]: [T::Vec<S>; 1]| [(x - shift).exp()];
        let [sum] = lanes::sums([x], [-T::INFINITY], exp);
        let log = T::Vec::<S>::splat(sum).ln();
        lanes::map([x], y, |[x]: [T::Vec<S>; 1]| (x - shift) - log);
    }
}

impl<T: Float> ColumnKernel<T, 1> for Forward {
    #[inline(always)]
    fn run<S: Isa>(&self, columns: Columns<'_, T, 1>) {
        let [x] = columns.x;
        for column in (0..SIDE).step_by(T::Vec::<S>::LANES) {
            let max = columns::max::<T::Vec<S>>(x, column, -T::INFINITY);
            let exp = |row: usize| (columns::at::<T::Vec<S>>(&x[row], column) - max).exp();
            let log = columns::sums(x.len(), exp).ln();
            columns::update(x, column, |x: T::Vec<S>, _| (x - max) - log);
        }
    }
}

pub(super) struct BackwardOf;

impl<T: Float> ColumnKernel<T, 2> for BackwardOf {
    #[inline(always)]
    fn run<S: Isa>(&self, columns: Columns<'_, T, 2>) {
        let [y, dy] = columns.x;
        for column in (0..SIDE).step_by(T::Vec::<S>::LANES) {
            let dy = |row: usize| columns::at::<T::Vec<S>>(&dy[row], column);
            let sum = columns::sums(y.len(), dy);
            columns::update(y, column, |y: T::Vec<S>, row| dy(row) - y.exp() * sum);
        }
    }
}

impl<T: Float> RowKernel<T, 2> for BackwardOf {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 2>) {
        let [sum] = lanes::sums([row.x[1]], [T::ZERO], |dy: [T::Vec<S>; 1]| dy);
        let sum = T::Vec::<S>::splat(sum);
        lanes::map(row.x, row.y, |[y, dy]: [T::Vec<S>; 2]| dy - y.exp() * sum);
    }
}
