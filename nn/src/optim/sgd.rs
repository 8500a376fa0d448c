//! Stochastic gradient descent.

use phalanx_kernels::optim::{self as kernel, Step};

use super::{At, Rule};
use crate::error::{from_zero, setting};
use crate::{Error, Result};

/// Gradient descent, with momentum if `momentum` is not 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sgd {
    /// Decay of the momentum buffer.
    pub momentum: f64,
    /// How much less of the gradient enters the momentum buffer.
    pub dampening: f64,
    /// Nesterov's look ahead.
    pub nesterov: bool,
}

impl Rule for Sgd {
    fn state(&self) -> Vec<&'static str> {
        if self.momentum == 0.0 { vec![] } else { vec!["momentum_buffer"] }
    }

    fn check(&self) -> Result<()> {
        from_zero("Sgd", "a momentum of", self.momentum)?;
        setting("Sgd", "a dampening of", self.dampening, self.dampening.is_finite(), "a finite number")?;
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            let (momentum, dampening) = (self.momentum, self.dampening);
            let why = format!(
                "got Nesterov's look ahead with a momentum of {momentum} and a dampening of {dampening}"
            );
            return Err(Error::invalid("Sgd", format!("{why}, wanted a momentum and no dampening")));
        }
        Ok(())
    }

    fn update(&self, step: Step<'_>, at: At) -> Result<()> {
        let Sgd { momentum, dampening, nesterov } = *self;
        let At { lr, weight_decay, step: number } = at;
        let numbers = kernel::Sgd { lr, momentum, dampening, nesterov, weight_decay, step: number };
        Ok(kernel::sgd_(step, numbers)?)
    }
}
