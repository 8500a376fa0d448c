//! The rules with one fused kernel each: [`Sgd`], [`Adam`], [`AdamW`], [`Adamax`], [`Adagrad`],
//! [`Adadelta`], [`Rmsprop`], [`Lion`].

use phalanx_kernels::optim::{self as kernel, Step};

use super::{Rule, StepHyperparameters};
use crate::error::{check_decay, check_non_negative, check_probability, check_setting};
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
        check_non_negative("Sgd", "a momentum of", self.momentum)?;
        check_setting(
            "Sgd",
            "a dampening of",
            self.dampening,
            self.dampening.is_finite(),
            "a finite number",
        )?;
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            let (momentum, dampening) = (self.momentum, self.dampening);
            let why = format!(
                "got Nesterov's look ahead with a momentum of {momentum} and a dampening of {dampening}"
            );
            return Err(Error::invalid("Sgd", format!("{why}, wanted a momentum and no dampening")));
        }
        Ok(())
    }

    fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
        let Sgd { momentum, dampening, nesterov } = *self;
        let StepHyperparameters { lr, weight_decay, step: number } = hyper;
        let numbers = kernel::Sgd { lr, momentum, dampening, nesterov, weight_decay, step: number };
        Ok(kernel::sgd_(step, numbers)?)
    }
}

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

/// Adam with the largest gradient, which fades, in place of the root of the second moment; weight decay is part of the gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adamax {
    /// Decays of the first moment and of the largest gradient.
    pub betas: (f64, f64),
    /// Added to the gradient's magnitude.
    pub eps: f64,
}

macro_rules! adam {
    ($rule:ident, $second:literal, $update:path) => {
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

            /// With this eps.
            #[must_use]
            pub fn with_eps(self, eps: f64) -> $rule {
                $rule { eps, ..self }
            }
        }

        impl Rule for $rule {
            fn state(&self) -> Vec<&'static str> {
                vec!["exp_avg", $second]
            }

            fn check(&self) -> Result<()> {
                check_decay(stringify!($rule), "the first beta", self.betas.0)?;
                check_decay(stringify!($rule), "the second beta", self.betas.1)?;
                check_non_negative(stringify!($rule), "an eps of", self.eps)
            }

            fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
                let (beta1, beta2) = self.betas;
                let StepHyperparameters { lr, weight_decay, step: number } = hyper;
                let numbers = kernel::Adam { lr, beta1, beta2, eps: self.eps, weight_decay, step: number };
                Ok($update(step, numbers)?)
            }
        }
    };
}

adam!(Adam, "exp_avg_sq", kernel::adam_);
adam!(AdamW, "exp_avg_sq", kernel::adamw_);
adam!(Adamax, "exp_inf", kernel::adamax_);

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
        check_non_negative("Adagrad", "a decay of the rate of", self.lr_decay)?;
        check_non_negative("Adagrad", "an initial value of", self.initial_accumulator_value)?;
        check_non_negative("Adagrad", "an eps of", self.eps)
    }

    fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
        let StepHyperparameters { lr, weight_decay, step: number } = hyper;
        let (lr_decay, eps) = (self.lr_decay, self.eps);
        let numbers = kernel::Adagrad { lr, lr_decay, eps, weight_decay, step: number };
        Ok(kernel::adagrad_(step, numbers)?)
    }
}

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
        check_probability("Rmsprop", "an alpha of", self.alpha)?;
        check_non_negative("Rmsprop", "an eps of", self.eps)?;
        check_non_negative("Rmsprop", "a momentum of", self.momentum)
    }

    fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
        let Rmsprop { alpha, eps, momentum, centered } = *self;
        let StepHyperparameters { lr, weight_decay, .. } = hyper;
        let numbers = kernel::Rmsprop { lr, alpha, eps, weight_decay, momentum, centered };
        Ok(kernel::rmsprop_(step, numbers)?)
    }
}

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
        check_decay("Lion", "the first beta", self.betas.0)?;
        check_decay("Lion", "the second beta", self.betas.1)
    }

    fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
        let (beta1, beta2) = self.betas;
        let numbers = kernel::Lion { lr: hyper.lr, beta1, beta2, weight_decay: hyper.weight_decay };
        Ok(kernel::lion_(step, numbers)?)
    }
}

/// The gradient times the root of the running square of the updates over that of the gradients. Source: Zeiler: ADADELTA (2012).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adadelta {
    /// Decay of the averages.
    pub rho: f64,
    /// Added to both averages under their roots.
    pub eps: f64,
}

impl Default for Adadelta {
    fn default() -> Adadelta {
        Adadelta { rho: 0.9, eps: 1e-6 }
    }
}

impl Rule for Adadelta {
    fn state(&self) -> Vec<&'static str> {
        vec!["square_avg", "acc_delta"]
    }

    fn check(&self) -> Result<()> {
        check_probability("Adadelta", "a rho of", self.rho)?;
        check_non_negative("Adadelta", "an eps of", self.eps)
    }

    fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
        let Adadelta { rho, eps } = *self;
        let StepHyperparameters { lr, weight_decay, .. } = hyper;
        Ok(kernel::adadelta_(step, kernel::Adadelta { lr, rho, eps, weight_decay })?)
    }
}
