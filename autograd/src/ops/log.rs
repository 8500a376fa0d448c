//! `y = ln x`, elementwise.
//!
//! Derivative: `dx = dy / x`. Saves `x`.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The natural logarithm; NaN below zero.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn log(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::log(self.tensor())?, Log)
    }
}

struct Log;

impl Elementwise for Log {
    const NAME: &'static str = "log";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::div(dy, x)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        dy.div(x)
    }
}
