//! The softmax along one dimension.

mod cpu;

use phalanx_tensor::{Dim, Result, Tensor};

use crate::along::along;
use crate::rows::cuda::{RowProgram, row_program};

const PROGRAM: RowProgram = row_program!("softmax.cu");

/// `e^x / sum(e^x)` along `dim`, any shape and strides, floating-point.
///
/// # Errors
/// If there is no such dimension, or the dtype is no floating-point one.
pub fn softmax(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    forward(x, dim.resolve(x.rank().max(1), "softmax")?)
}

fn forward(x: &Tensor, dim: usize) -> Result<Tensor> {
    along("softmax", cpu::Forward, (PROGRAM, "forward"), [x], dim)
}

/// `dx = y (dy - sum(y dy))` for `y = softmax(x)`.
///
/// # Errors
/// If there is no such dimension, or shapes, dtypes or devices differ.
pub fn softmax_backward(y: &Tensor, dy: &Tensor, dim: impl Dim) -> Result<Tensor> {
    backward(y, dy, dim.resolve(y.rank().max(1), "softmax_backward")?)
}

fn backward(y: &Tensor, dy: &Tensor, dim: usize) -> Result<Tensor> {
    along("softmax_backward", cpu::BackwardOf, (PROGRAM, "backward"), [y, dy], dim)
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
}
