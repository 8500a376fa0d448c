//! `y = erf x`, elementwise.
//!
//! Derivative: `dx = dy 2 / sqrt(pi) e^(-x²)`. Saves `x`.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The error function.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn erf(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::erf(self.tensor())?, Erf)
    }
}

struct Erf;

impl Elementwise for Erf {
    const NAME: &'static str = "erf";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::erf_backward(x, dy)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        let slope = x.square()?.neg()?.exp()?.mul_scalar(std::f64::consts::FRAC_2_SQRT_PI)?;
        dy.mul(&slope)
    }
}
