//! `d²` of `d = x - t`, elementwise, then reduced.
//!
//! Derivative: `dx = dy 2 d`, `dt = -dx`. Saves both. The elements' losses are rounded once, and so are their
//! gradients.

use phalanx_kernels::{self as kernels, Reduction};
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::broadcasting::{Broadcasting, broadcasting};
use super::reduction::one_shape;
use crate::{Result, Var, begins};

impl Var {
    /// The squared difference to `target`.
    ///
    /// # Errors
    /// If the shapes differ, dtypes or devices differ, or the dtype is no floating-point one.
    pub fn mse_loss(&self, target: &Var, reduction: Reduction) -> Result<Var> {
        begins();
        one_shape("mse_loss", self, target)?;
        let y = kernels::mse_loss(self.tensor(), target.tensor())?;
        broadcasting(&[self, target], y, MseLoss)?.reduce(reduction)
    }
}

struct MseLoss;

impl Broadcasting for MseLoss {
    const NAME: &'static str = "mse_loss";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let dx = kernels::mse_loss_backward(x[0].tensor(), x[1].tensor(), dy)?;
        Ok(Some(if i == 0 { dx } else { kernels::neg(&dx)? }))
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let d = x[i].sub(&x[1 - i])?;
        dy.mul(&d)?.mul_scalar(2.0)
    }
}
