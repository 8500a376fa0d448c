//! `y = |x|`, elementwise.
//!
//! Derivative: `dx = dy sign(x)`. Saves `x`.
//! At 0 it is 0.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The magnitude.
    ///
    /// # Errors
    /// If the dtype is bool.
    pub fn abs(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::abs(self.tensor())?, Abs)
    }
}

struct Abs;

impl Elementwise for Abs {
    const NAME: &'static str = "abs";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::abs_backward(x, dy)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        signed(x, dy)
    }
}

/// `dy sign(x)`, of differentiable operations; 0 at 0.
pub(super) fn signed(x: &Var, dy: &Var) -> Result<Var> {
    let right = dy.where_(&x.gt_scalar(0.0)?, &Var::full(0.0, dy)?)?;
    dy.neg()?.where_(&x.lt_scalar(0.0)?, &right)
}
