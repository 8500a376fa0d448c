//! `y = tanh(x)`, elementwise.
//!
//! Derivative: `dx = dy (1 - y²)`. Saves `y`, which the derivative is made of.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The hyperbolic tangent.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn tanh(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::tanh(self.tensor())?, Tanh)
    }
}

struct Tanh;

impl Elementwise for Tanh {
    const NAME: &'static str = "tanh";
    const OF_OUTPUT: bool = true;

    fn fused(&self, y: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::tanh_backward(y, dy)
    }

    fn composed(&self, y: &Var, dy: &Var) -> Result<Var> {
        dy.mul(&y.square()?.rsub_scalar(1.0)?)
    }
}
