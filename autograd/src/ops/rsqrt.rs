//! `y = 1 / sqrt(x)`, elementwise.
//!
//! Derivative: `dx = -dy y³ / 2`. Saves `y`, which the derivative is made of.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The inverse of the square root.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn rsqrt(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::rsqrt(self.tensor())?, Rsqrt)
    }
}

struct Rsqrt;

impl Elementwise for Rsqrt {
    const NAME: &'static str = "rsqrt";
    const OF_OUTPUT: bool = true;

    fn fused(&self, y: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::rsqrt_backward(y, dy)
    }

    fn composed(&self, y: &Var, dy: &Var) -> Result<Var> {
        dy.mul(&y.pow_scalar(3.0)?.mul_scalar(-0.5)?)
    }
}
