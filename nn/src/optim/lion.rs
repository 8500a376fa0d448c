//! Lion.

use phalanx_kernels::optim::{self as kernel, Slice};
use phalanx_tensor::Tensor;

use super::{At, Rule, adam::wrong_state};
use crate::Result;

/// The sign of a mean of momentum and gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Weight of the momentum in the direction, and its decay.
    pub betas: (f64, f64),
}

impl Default for Lion {
    fn default() -> Lion {
        Lion { betas: (0.9, 0.99) }
    }
}

impl Rule for Lion {
    fn state(&self) -> Vec<&'static str> {
        vec!["exp_avg"]
    }

    fn update(&self, slice: Slice<'_>, state: &mut [Tensor], at: At) -> Result<()> {
        let [momentum] = state else { return Err(wrong_state(state.len(), 1)) };
        let (beta1, beta2) = self.betas;
        let numbers = kernel::Lion { lr: at.lr, beta1, beta2, weight_decay: at.weight_decay };
        Ok(kernel::lion_(slice, momentum, numbers)?)
    }
}
