//! `y = cos x`, elementwise.
//!
//! Derivative: `dx = -dy sin x`. Saves `x`.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The cosine of an angle in radians.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn cos(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::cos(self.tensor())?, Cos)
    }
}

struct Cos;

impl Elementwise for Cos {
    const NAME: &'static str = "cos";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::cos_backward(x, dy)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        dy.mul(&x.sin()?)?.neg()
    }
}
