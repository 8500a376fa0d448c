//! `y = x sigmoid(x)`, elementwise.
//!
//! Derivative: `dx = dy s (1 + x (1 - s))` with `s = sigmoid(x)`. Saves `x`, of which `y` is made again for what
//! would save it ([`Rematerialized`](crate::Rematerialized)).

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The sigmoid-weighted linear unit, also called swish.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn silu(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::silu(self.tensor())?, Silu)
    }
}

struct Silu;

impl Elementwise for Silu {
    const NAME: &'static str = "silu";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::silu_backward(x, dy)
    }

    fn fused_over(&self, x: &Tensor, dy: Tensor) -> TensorResult<Tensor> {
        kernels::silu_backward_over(x, dy)
    }

    fn again(&self) -> Option<fn(&Tensor) -> TensorResult<Tensor>> {
        Some(kernels::silu)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        let s = x.sigmoid()?;
        let slope = s.rsub_scalar(1.0)?.mul(x)?.add_scalar(1.0)?.mul(&s)?;
        dy.mul(&slope)
    }
}
