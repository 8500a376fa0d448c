//! `|d|` of `d = x - t`, elementwise, then reduced.
//!
//! Derivative: `dx = dy sign(d)`, `dt = -dx`. Saves both. The elements' losses are rounded once, and so are their
//! gradients. At 0 the derivative is 0.

use phalanx_kernels::{self as kernels, Reduction};
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::broadcasting::{Broadcasting, broadcasting};
use super::reduction::one_shape;
use crate::{Result, Var, begins};

impl Var {
    /// The magnitude of the difference to `target`.
    ///
    /// # Errors
    /// If the shapes differ, dtypes or devices differ, or the dtype is no floating-point one.
    pub fn l1_loss(&self, target: &Var, reduction: Reduction) -> Result<Var> {
        begins();
        one_shape("l1_loss", self, target)?;
        let y = kernels::l1_loss(self.tensor(), target.tensor())?;
        broadcasting(&[self, target], y, L1Loss)?.reduce(reduction)
    }
}

struct L1Loss;

impl Broadcasting for L1Loss {
    const NAME: &'static str = "l1_loss";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let dx = kernels::l1_loss_backward(x[0].tensor(), x[1].tensor(), dy)?;
        Ok(Some(if i == 0 { dx } else { kernels::neg(&dx)? }))
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let d = x[i].sub(&x[1 - i])?;
        super::abs::signed(&d, dy)
    }
}
