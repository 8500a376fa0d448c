//! `y = 1 / (1 + e^-x)`, elementwise.
//!
//! Derivative: `dx = dy y (1 - y)`. Saves `y`, which the derivative is made of.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The logistic function.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn sigmoid(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::sigmoid(self.tensor())?, Sigmoid)
    }
}

struct Sigmoid;

impl Elementwise for Sigmoid {
    const NAME: &'static str = "sigmoid";
    const OF_OUTPUT: bool = true;

    fn fused(&self, y: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::sigmoid_backward(y, dy)
    }

    fn composed(&self, y: &Var, dy: &Var) -> Result<Var> {
        dy.mul(&y.rsub_scalar(1.0)?)?.mul(y)
    }
}
