//! The softmax of a row: the largest element, the exponentials and their sum, the quotients; the row stays in the
//! cache between the passes.

use crate::rows::columns::{self, ColumnKernel, Columns};
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
        let (Columns { x: [x], stride, .. }, lanes) = (columns, T::Vec::<S>::LANES);
        let n = x.len() / stride;
        for column in (0..stride).step_by(lanes) {
            let max = columns::max::<T::Vec<S>>(x, stride, column, -T::INFINITY);
            columns::update(x, stride, column, |x: T::Vec<S>, _| (x - max).exp());
            let sum = columns::sums(n, |row| columns::at::<T::Vec<S>>(x, stride, column, row));
            let scale = T::Vec::<S>::splat(T::ONE) / sum;
            columns::update(x, stride, column, |x: T::Vec<S>, _| x * scale);
        }
    }
}

pub(super) struct BackwardOf;

impl<T: Float> ColumnKernel<T, 2> for BackwardOf {
    #[inline(always)]
    fn run<S: Isa>(&self, columns: Columns<'_, T, 2>) {
        let (Columns { x: [y, dy], stride, .. }, lanes) = (columns, T::Vec::<S>::LANES);
        let n = y.len() / stride;
        for column in (0..stride).step_by(lanes) {
            let at = |x: &[T], row: usize| columns::at::<T::Vec<S>>(x, stride, column, row);
            let sum = columns::sums(n, |row| at(y, row) * at(dy, row));
            columns::update(y, stride, column, |y, row| y * (at(dy, row) - sum));
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
