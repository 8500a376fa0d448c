//! `y = sqrt(x)`, elementwise.
//!
//! Derivative: `dx = dy / (2 y)`. Saves `y`, which the derivative is made of.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The square root; NaN below zero.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn sqrt(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::sqrt(self.tensor())?, Sqrt)
    }
}

struct Sqrt;

impl Elementwise for Sqrt {
    const NAME: &'static str = "sqrt";
    const OF_OUTPUT: bool = true;

    fn fused(&self, y: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::sqrt_backward(y, dy)
    }

    fn composed(&self, y: &Var, dy: &Var) -> Result<Var> {
        dy.div(&y.mul_scalar(2.0)?)
    }
}
