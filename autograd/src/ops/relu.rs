//! `y = max(x, 0)`, elementwise.
//!
//! Derivative: `dx = dy` where `y > 0`, else `0`. Saves `y`, which the derivative is made of.
//! At 0 it is 0.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The rectified linear unit; NaN for NaN.
    ///
    /// # Errors
    /// If the dtype is bool.
    pub fn relu(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::relu(self.tensor())?, Relu)
    }
}

struct Relu;

impl Elementwise for Relu {
    const NAME: &'static str = "relu";
    const OF_OUTPUT: bool = true;

    fn fused(&self, y: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::relu_backward(y, dy)
    }

    fn composed(&self, y: &Var, dy: &Var) -> Result<Var> {
        Var::full(0.0, dy)?.where_(&y.le_scalar(0.0)?, dy)
    }
}
