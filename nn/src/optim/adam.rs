//! Adam and AdamW.

use phalanx_kernels::optim::{self as kernel, Step};

use super::{At, Rule};
use crate::Result;
use crate::error::{below_one, from_zero};

/// Adam: moments of the gradient, corrected for their start at 0; weight decay is part of the gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Decays of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
}

/// Adam with weight decay apart from the gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decays of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
}

const STATE: [&str; 2] = ["exp_avg", "exp_avg_sq"];

macro_rules! adam {
    ($rule:ident, $update:path) => {
        impl Default for $rule {
            fn default() -> $rule {
                $rule { betas: (0.9, 0.999), eps: 1e-8 }
            }
        }

        impl $rule {
            /// With these decays of the moments.
            #[must_use]
            pub fn with_betas(self, first: f64, second: f64) -> $rule {
                $rule { betas: (first, second), ..self }
            }

            /// With this added to the root.
            #[must_use]
            pub fn with_eps(self, eps: f64) -> $rule {
                $rule { eps, ..self }
            }
        }

        impl Rule for $rule {
            fn state(&self) -> Vec<&'static str> {
                STATE.to_vec()
            }

            fn check(&self) -> Result<()> {
                below_one(stringify!($rule), "the first beta", self.betas.0)?;
                below_one(stringify!($rule), "the second beta", self.betas.1)?;
                from_zero(stringify!($rule), "an eps of", self.eps)
            }

            fn update(&self, step: Step<'_>, at: At) -> Result<()> {
                let (beta1, beta2) = self.betas;
                let At { lr, weight_decay, step: number } = at;
                let numbers = kernel::Adam { lr, beta1, beta2, eps: self.eps, weight_decay, step: number };
                Ok($update(step, numbers)?)
            }
        }
    };
}

adam!(Adam, kernel::adam_);
adam!(AdamW, kernel::adamw_);
