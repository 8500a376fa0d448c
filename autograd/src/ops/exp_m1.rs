//! `y = e^x - 1`, elementwise.
//!
//! Derivative: `dx = dy (y + 1)`. Saves `y`, which the derivative is made of.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The exponential less one, accurate near zero.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn exp_m1(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::exp_m1(self.tensor())?, ExpM1)
    }
}

struct ExpM1;

impl Elementwise for ExpM1 {
    const NAME: &'static str = "exp_m1";
    const OF_OUTPUT: bool = true;

    fn fused(&self, y: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::mul(dy, &kernels::add_scalar(y, 1.0.into())?)
    }

    fn composed(&self, y: &Var, dy: &Var) -> Result<Var> {
        dy.mul(&y.add_scalar(1.0)?)
    }
}
