//! RMSprop.

use phalanx_kernels::optim::{self as kernel, Step};

use super::{At, Rule};
use crate::Result;
use crate::error::{from_zero, share};

/// The gradient over the root of its running square.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rmsprop {
    /// Decay of the averages.
    pub alpha: f64,
    /// Added to the root.
    pub eps: f64,
    /// Decay of the momentum buffer; 0: none.
    pub momentum: f64,
    /// Whether the variance is taken in place of the second moment.
    pub centered: bool,
}

impl Default for Rmsprop {
    fn default() -> Rmsprop {
        Rmsprop { alpha: 0.99, eps: 1e-8, momentum: 0.0, centered: false }
    }
}

impl Rule for Rmsprop {
    fn state(&self) -> Vec<&'static str> {
        let mut names = vec!["square_avg"];
        names.extend(self.centered.then_some("grad_avg"));
        names.extend((self.momentum != 0.0).then_some("momentum_buffer"));
        names
    }

    fn check(&self) -> Result<()> {
        share("Rmsprop", "an alpha of", self.alpha)?;
        from_zero("Rmsprop", "an eps of", self.eps)?;
        from_zero("Rmsprop", "a momentum of", self.momentum)
    }

    fn update(&self, step: Step<'_>, at: At) -> Result<()> {
        let Rmsprop { alpha, eps, momentum, centered } = *self;
        let At { lr, weight_decay, .. } = at;
        let numbers = kernel::Rmsprop { lr, alpha, eps, weight_decay, momentum, centered };
        Ok(kernel::rmsprop_(step, numbers)?)
    }
}
