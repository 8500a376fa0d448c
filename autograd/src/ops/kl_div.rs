//! The divergence `t (ln t - x)` of log probabilities x from probabilities t, 0 where `t` is; or `e^t (t - x)` of
//! log probabilities t; elementwise, then reduced.
//!
//! Derivative: `dx = -dy t`, `dt = dy (ln t + 1 - x)`; or `dx = -dy e^t`, `dt = dy e^t (t + 1 - x)`. Saves both.

use phalanx_kernels::{self as kernels, Reduction};
use phalanx_tensor::{Error, Result as TensorResult, Tensor};

use super::broadcasting::{Broadcasting, broadcasting};
use super::reduction::one_shape;
use crate::{Result, Var, begins};

/// What [`Var::kl_div`] makes of its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KlReduction {
    /// The sum divided by the first dimension's size: the divergence's mathematical mean over a batch.
    BatchMean,
    /// As for other losses.
    Elements(Reduction),
}

/// What the target of [`Var::kl_div`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KlTarget {
    /// Probabilities.
    Probabilities,
    /// Their logarithms.
    LogProbabilities,
}

impl Var {
    /// The Kullback-Leibler divergence of these log probabilities from the target.
    ///
    /// # Errors
    /// If the shapes, dtypes or devices differ, the dtype is no floating-point one, or there is no
    /// first dimension to take the batch's mean over.
    pub fn kl_div(&self, target: &Var, kind: KlTarget, reduction: KlReduction) -> Result<Var> {
        begins();
        one_shape("kl_div", self, target)?;
        if reduction == KlReduction::BatchMean && self.rank() == 0 {
            return Err(Error::shape(
                "kl_div",
                "a tensor without dimensions",
                "a first dimension, the batch",
            )
            .into());
        }
        let kernel = match kind {
            KlTarget::Probabilities => kernels::kl_div,
            KlTarget::LogProbabilities => kernels::kl_div_log_target,
        };
        let losses = broadcasting(&[self, target], kernel(self.tensor(), target.tensor())?, kind)?;
        match reduction {
            KlReduction::BatchMean => losses.sum_all()?.div_scalar(self.tensor().size(0)? as f64),
            KlReduction::Elements(reduction) => losses.reduce(reduction),
        }
    }
}

impl Broadcasting for KlTarget {
    const NAME: &'static str = "kl_div";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let (x, t) = (x[0].tensor(), x[1].tensor());
        Ok(Some(match (self, i) {
            (KlTarget::Probabilities, 0) => kernels::neg(&kernels::mul(t, dy)?)?,
            (KlTarget::Probabilities, _) => kernels::kl_div_backward_target(x, t, dy)?,
            (KlTarget::LogProbabilities, 0) => kernels::kl_div_log_target_backward(t, dy)?,
            (KlTarget::LogProbabilities, _) => kernels::kl_div_log_target_backward_target(x, t, dy)?,
        }))
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let (x, t) = (&x[0], &x[1]);
        let slope = match (self, i) {
            (KlTarget::Probabilities, 0) => t.neg()?,
            (KlTarget::Probabilities, _) => t.log()?.add_scalar(1.0)?.sub(x)?,
            (KlTarget::LogProbabilities, 0) => t.exp()?.neg()?,
            (KlTarget::LogProbabilities, _) => t.exp()?.mul(&t.add_scalar(1.0)?.sub(x)?)?,
        };
        dy.mul(&slope)
    }
}
