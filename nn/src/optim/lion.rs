//! Lion.

use phalanx_kernels::optim::{self as kernel, Step};

use super::{At, Rule};
use crate::Result;
use crate::error::below_one;

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

    fn check(&self) -> Result<()> {
        below_one("Lion", "the first beta", self.betas.0)?;
        below_one("Lion", "the second beta", self.betas.1)
    }

    fn update(&self, step: Step<'_>, at: At) -> Result<()> {
        let (beta1, beta2) = self.betas;
        let numbers = kernel::Lion { lr: at.lr, beta1, beta2, weight_decay: at.weight_decay };
        Ok(kernel::lion_(step, numbers)?)
    }
}
