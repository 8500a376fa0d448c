//! `d² / (2 beta)` where `|d| < beta`, else `|d| - beta / 2`, of `d = x - t`, elementwise, then reduced.
//!
//! Derivative: `dx = dy d / beta` where `|d| < beta`, else `dy sign(d)`, `dt = -dx`. Saves both. The elements' losses are rounded once, and so are their
//! gradients.

use phalanx_kernels::{self as kernels, Reduction};
use phalanx_tensor::{Error, Result as TensorResult, Tensor};

use super::broadcasting::{Broadcasting, broadcasting};
use super::reduction::one_shape;
use crate::{Result, Var, begins};

impl Var {
    /// The difference to `target`, squared up to `beta` and linear beyond; usually `beta` is 1.
    ///
    /// # Errors
    /// If `beta` is below 0, the shapes, dtypes or devices differ, or the dtype is no floating-point one.
    pub fn smooth_l1_loss(&self, target: &Var, beta: f64, reduction: Reduction) -> Result<Var> {
        begins();
        if beta.is_nan() || beta < 0.0 {
            return Err(Error::range("smooth_l1_loss", format!("beta {beta}"), "0 or more").into());
        }
        one_shape("smooth_l1_loss", self, target)?;
        let y = kernels::smooth_l1_loss(self.tensor(), target.tensor(), beta)?;
        broadcasting(&[self, target], y, SmoothL1Loss { beta })?.reduce(reduction)
    }
}

struct SmoothL1Loss {
    beta: f64,
}

impl Broadcasting for SmoothL1Loss {
    const NAME: &'static str = "smooth_l1_loss";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let dx = kernels::smooth_l1_loss_backward(x[0].tensor(), x[1].tensor(), dy, self.beta)?;
        Ok(Some(if i == 0 { dx } else { kernels::neg(&dx)? }))
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let d = x[i].sub(&x[1 - i])?;
        let inner = dy.mul(&d)?.div_scalar(self.beta)?;
        inner.where_(&d.abs()?.lt_scalar(self.beta)?, &super::abs::signed(&d, dy)?)
    }
}
