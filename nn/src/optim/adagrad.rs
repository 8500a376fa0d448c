//! Adagrad.

use phalanx_kernels::optim::{self as kernel, Step};

use super::{At, Rule};
use crate::Result;
use crate::error::from_zero;

/// The gradient over the root of the sum of all its squares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    /// How the learning rate shrinks with the steps.
    pub lr_decay: f64,
    /// What the sum of squares begins with.
    pub initial_accumulator_value: f64,
    /// Added to the root.
    pub eps: f64,
}

impl Default for Adagrad {
    fn default() -> Adagrad {
        Adagrad { lr_decay: 0.0, initial_accumulator_value: 0.0, eps: 1e-10 }
    }
}

impl Rule for Adagrad {
    fn state(&self) -> Vec<&'static str> {
        vec!["sum"]
    }

    fn initial(&self) -> f64 {
        self.initial_accumulator_value
    }

    fn check(&self) -> Result<()> {
        from_zero("Adagrad", "a decay of the rate of", self.lr_decay)?;
        from_zero("Adagrad", "an initial value of", self.initial_accumulator_value)?;
        from_zero("Adagrad", "an eps of", self.eps)
    }

    fn update(&self, step: Step<'_>, at: At) -> Result<()> {
        let At { lr, weight_decay, step: number } = at;
        let (lr_decay, eps) = (self.lr_decay, self.eps);
        let numbers = kernel::Adagrad { lr, lr_decay, eps, weight_decay, step: number };
        Ok(kernel::adagrad_(step, numbers)?)
    }
}
