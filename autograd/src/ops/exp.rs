//! `y = e^x`, elementwise.
//!
//! Derivative: `dx = dy y`. Saves `y`, which the derivative is made of.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The exponential.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn exp(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::exp(self.tensor())?, Exp)
    }
}

struct Exp;

impl Elementwise for Exp {
    const NAME: &'static str = "exp";
    const OF_OUTPUT: bool = true;

    fn fused(&self, y: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::mul(y, dy)
    }

    fn composed(&self, y: &Var, dy: &Var) -> Result<Var> {
        dy.mul(y)
    }
}
