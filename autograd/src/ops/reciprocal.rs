//! `y = 1 / x`, elementwise.
//!
//! Derivative: `dx = -dy y²`. Saves `y`, which the derivative is made of.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The inverse.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn reciprocal(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::reciprocal(self.tensor())?, Reciprocal)
    }
}

struct Reciprocal;

impl Elementwise for Reciprocal {
    const NAME: &'static str = "reciprocal";
    const OF_OUTPUT: bool = true;

    fn fused(&self, y: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::reciprocal_backward(y, dy)
    }

    fn composed(&self, y: &Var, dy: &Var) -> Result<Var> {
        dy.mul(&y.square()?)?.neg()
    }
}
