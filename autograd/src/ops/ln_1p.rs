//! `y = ln(1 + x)`, elementwise.
//!
//! Derivative: `dx = dy / (1 + x)`. Saves `x`.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The natural logarithm of one more, accurate near zero.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn ln_1p(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::ln_1p(self.tensor())?, Ln1p)
    }
}

struct Ln1p;

impl Elementwise for Ln1p {
    const NAME: &'static str = "ln_1p";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::div(dy, &kernels::add_scalar(x, 1.0.into())?)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        dy.div(&x.add_scalar(1.0)?)
    }
}
