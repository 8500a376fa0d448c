//! `y = x²`, elementwise.
//!
//! Derivative: `dx = 2 x dy`. Saves `x`.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The square; integers wrap.
    ///
    /// # Errors
    /// If the dtype is bool.
    pub fn square(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::square(self.tensor())?, Square)
    }
}

struct Square;

impl Elementwise for Square {
    const NAME: &'static str = "square";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::square_backward(x, dy)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        dy.mul(x)?.mul_scalar(2.0)
    }
}
