//! The softmax along one dimension and its logarithm. The largest element is subtracted first, so that large logits
//! neither overflow nor lose digits.

use phalanx_tensor::{Dim, Result, Tensor};

use crate::rows::columns::{self, ColumnKernel, Columns, SIDE};
use crate::rows::cuda::{RowProgram, row_program};
use crate::rows::{Row, RowKernel, along, lanes};
use crate::simd::{Float, Isa, Vector};

const PROGRAM: RowProgram = row_program!("softmax.cu");

/// `e^x / sum(e^x)` along `dim`, any shape and strides, floating-point.
///
/// # Errors
/// If there is no such dimension, or the dtype is no floating-point one.
pub fn softmax(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    forward(x, dim.resolve(x.rank().max(1), "softmax")?)
}

fn forward(x: &Tensor, dim: usize) -> Result<Tensor> {
    along("softmax", Forward, (PROGRAM, "forward"), [x], dim)
}

/// `dx = y (dy - sum(y dy))` for `y = softmax(x)`.
///
/// # Errors
/// If there is no such dimension, or shapes, dtypes or devices differ.
pub fn softmax_backward(y: &Tensor, dy: &Tensor, dim: impl Dim) -> Result<Tensor> {
    backward(y, dy, dim.resolve(y.rank().max(1), "softmax_backward")?)
}

fn backward(y: &Tensor, dy: &Tensor, dim: usize) -> Result<Tensor> {
    along("softmax_backward", BackwardOf, (PROGRAM, "backward"), [y, dy], dim)
}

struct Forward;

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

struct BackwardOf;

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

const LOG_PROGRAM: RowProgram = row_program!("log_softmax.cu");

/// `x - log(sum(e^x))` along `dim`, any shape and strides, floating-point.
///
/// # Errors
/// If there is no such dimension, or the dtype is no floating-point one.
pub fn log_softmax(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    log_forward(x, dim.resolve(x.rank().max(1), "log_softmax")?)
}

fn log_forward(x: &Tensor, dim: usize) -> Result<Tensor> {
    along("log_softmax", LogForward, (LOG_PROGRAM, "forward"), [x], dim)
}

/// `dx = dy - e^y sum(dy)` for `y = log_softmax(x)`.
///
/// # Errors
/// If there is no such dimension, or shapes, dtypes or devices differ.
pub fn log_softmax_backward(y: &Tensor, dy: &Tensor, dim: impl Dim) -> Result<Tensor> {
    log_backward(y, dy, dim.resolve(y.rank().max(1), "log_softmax_backward")?)
}

fn log_backward(y: &Tensor, dy: &Tensor, dim: usize) -> Result<Tensor> {
    along("log_softmax_backward", LogBackward, (LOG_PROGRAM, "backward"), [y, dy], dim)
}

pub(super) struct LogForward;

impl<T: Float> RowKernel<T, 1> for LogForward {
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

impl<T: Float> ColumnKernel<T, 1> for LogForward {
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

pub(super) struct LogBackward;

impl<T: Float> ColumnKernel<T, 2> for LogBackward {
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

impl<T: Float> RowKernel<T, 2> for LogBackward {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 2>) {
        let [sum] = lanes::sums([row.x[1]], [T::ZERO], |dy: [T::Vec<S>; 1]| dy);
        let sum = T::Vec::<S>::splat(sum);
        lanes::map(row.x, row.y, |[y, dy]: [T::Vec<S>; 2]| dy - y.exp() * sum);
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{assert_along, floats};

    #[test]
    fn equals_the_formula_along_every_dimension() {
        assert_along(super::softmax, &floats(-10.0, 10.0), |x| {
            let sum: f64 = x.iter().map(|x| x.exp()).sum();
            x.iter().map(|x| x.exp() / sum).collect()
        });
    }

    #[test]
    fn log_softmax_equals_the_formula_along_every_dimension() {
        assert_along(super::log_softmax, &floats(-10.0, 10.0), |x| {
            let sum: f64 = x.iter().map(|x| x.exp()).sum();
            x.iter().map(|x| x - sum.ln()).collect()
        });
    }
}
