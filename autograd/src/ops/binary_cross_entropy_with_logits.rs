//! `-(w t ln s + (1 - t) ln(1 - s))` with `s = sigmoid(x)` and the weight w of the positive class, elementwise,
//! then weighted and reduced.
//!
//! Computed as `(1 - t) x + (1 + (w - 1) t) ln(1 + e^-x)`, which no x makes infinite. Derivative:
//! `dx = dy ((1 + (w - 1) t) s - w t)`, `dt = dy ((w - 1) ln(1 + e^-x) - x)`, `dw = dy t ln(1 + e^-x)`. Saves all
//! three.

use phalanx_kernels::{self as kernels, Reduction};
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::broadcasting::{Broadcasting, broadcasting};
use super::reduction::one_shape;
use crate::{Result, Var, begins};

impl Var {
    /// The binary cross entropy of the probabilities `sigmoid(self)` and the targets, each between 0 and 1;
    /// multiplied by `weight`, the positive class besides by `pos_weight` (both broadcast to this shape).
    ///
    /// # Errors
    /// If the shapes differ, a weight does not broadcast to them, dtypes or devices differ, or the dtype is no floating-point one.
    pub fn binary_cross_entropy_with_logits(
        &self,
        target: &Var,
        weight: Option<&Var>,
        pos_weight: Option<&Var>,
        reduction: Reduction,
    ) -> Result<Var> {
        begins();
        const OP: &str = "binary_cross_entropy_with_logits";
        one_shape(OP, self, target)?;
        for weight in weight.into_iter().chain(pos_weight) {
            weight.tensor().broadcast_for(OP, self.shape())?;
        }
        let positive = match pos_weight {
            Some(weight) => weight.clone(),
            None => Var::new(kernels::full(&[], 1.0, self.dtype(), self.device())?),
        };
        let y = kernels::binary_cross_entropy_with_logits(self.tensor(), target.tensor(), positive.tensor())?;
        let losses = broadcasting(&[self, target, &positive], y, Entropy)?;
        weight.map_or(Ok(losses.clone()), |weight| losses.mul(weight))?.reduce(reduction)
    }
}

struct Entropy;

impl Broadcasting for Entropy {
    const NAME: &'static str = "binary_cross_entropy_with_logits";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let [x, t, w] = [x[0].tensor(), x[1].tensor(), x[2].tensor()];
        let dx = || kernels::binary_cross_entropy_with_logits_backward(x, t, w, dy);
        (i == 0).then(dx).transpose()
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let [x, t, w] = [&x[0], &x[1], &x[2]];
        let softplus = || x.neg()?.softplus(1.0, f64::INFINITY);
        let slope = match i {
            0 => w.sub_scalar(1.0)?.mul(t)?.add_scalar(1.0)?.mul(&x.sigmoid()?)?.sub(&w.mul(t)?)?,
            1 => w.sub_scalar(1.0)?.mul(&softplus()?)?.sub(x)?,
            _ => t.mul(&softplus()?)?,
        };
        dy.mul(&slope)
    }
}
