//! `y = sin x`, elementwise.
//!
//! Derivative: `dx = dy cos x`. Saves `x`.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The sine of an angle in radians.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn sin(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::sin(self.tensor())?, Sin)
    }
}

struct Sin;

impl Elementwise for Sin {
    const NAME: &'static str = "sin";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::sin_backward(x, dy)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        dy.mul(&x.cos()?)
    }
}
