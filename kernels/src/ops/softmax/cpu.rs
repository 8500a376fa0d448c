//! The softmax of a row: the largest element, the exponentials and their sum, the quotients; the row stays in the
//! cache between the passes.

use crate::rows::columns::{self, ColumnKernel, Columns, SIDE};
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

impl<T: Float> ColumnKernel<T, 1> for Forward {
    #[inline(always)]
    fn run<S: Isa>(&self, columns: Columns<'_, T, 1>) {
        let [x] = columns.x;
        for column in (0..SIDE).step_by(T::Vec::<S>::LANES) {
            let max = columns::max::<T::Vec<S>>(x, column, -T::INFINITY);
            columns::update(x, column, |x: T::Vec<S>, _| (x - max).exp());
            let sum = columns::sums(x.len(), |row| columns::at::<T::Vec<S>>(&x[row], column));
            let scale = T::Vec::<S>::splat(T::ONE) / sum;
            columns::update(x, column, |x: T::Vec<S>, _| x * scale);
        }
    }
}

pub(super) struct BackwardOf;

impl<T: Float> ColumnKernel<T, 2> for BackwardOf {
    #[inline(always)]
    fn run<S: Isa>(&self, columns: Columns<'_, T, 2>) {
        let [y, dy] = columns.x;
        for column in (0..SIDE).step_by(T::Vec::<S>::LANES) {
            let at = |row: &[T; SIDE]| columns::at::<T::Vec<S>>(row, column);
            let sum = columns::sums(y.len(), |row| at(&y[row]) * at(&dy[row]));
            columns::update(y, column, |y: T::Vec<S>, row| y * (at(&dy[row]) - sum));
        }
    }
}

impl<T: Float> RowKernel<T, 2> for BackwardOf {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 2>) {
        let [sum] = lanes::sums(row.x, [T::ZERO; 2], |[y, dy]: [T::Vec<S>; 2]| [y * dy]);
        let sum = T::Vec::<S>::splat(sum);
        lanes::map(row.x, row.y, |[y, dy]: [T::Vec<S>; 2]| y * (dy - sum));
    }
}
