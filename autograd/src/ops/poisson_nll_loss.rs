//! The negative log likelihood of counts `t` under Poisson distributions, then reduced.
//!
//! `e^x - t x` where the input is the logarithm of the rate, else `x - t ln(x + eps)`; with the full likelihood
//! Stirling's `t ln t - t + ln(2 pi t) / 2` is added where `t > 1`. Composed, in f32 for the halves.

use std::f64::consts::TAU;

use phalanx_kernels::Reduction;

use super::composed::{as_number, composed};
use crate::{Result, Var};

/// What [`Var::poisson_nll_loss`] is told beside its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoissonNll {
    /// Whether the input is the logarithm of the rate.
    pub log_input: bool,
    /// Whether Stirling's approximation of `ln t!` is added.
    pub full: bool,
    /// Added to a rate before its logarithm is taken.
    pub eps: f64,
    /// What becomes of the elements' losses.
    pub reduction: Reduction,
}

impl Default for PoissonNll {
    fn default() -> PoissonNll {
        PoissonNll { log_input: true, full: false, eps: 1e-8, reduction: Reduction::Mean }
    }
}

impl Var {
    /// The negative log likelihood of the counts `target`; both broadcast.
    ///
    /// # Errors
    /// If the shapes do not broadcast, dtypes or devices differ, or the dtype is no floating-point one.
    pub fn poisson_nll_loss(&self, target: &Var, config: &PoissonNll) -> Result<Var> {
        composed("poisson_nll_loss", &[self, &as_number(target, self)?], |inputs| {
            let (x, t) = (&inputs[0], &inputs[1]);
            let loss = match config.log_input {
                true => x.exp()?.sub(&t.mul(x)?)?,
                false => x.sub(&t.mul(&x.add_scalar(config.eps)?.log()?)?)?,
            };
            let loss = if config.full { loss.add(&stirling(t)?)? } else { loss };
            loss.reduce(config.reduction)
        })
    }
}

/// `ln t!` roughly, 0 up to `t = 1`.
fn stirling(t: &Var) -> Result<Var> {
    let few = t.le_scalar(1.0)?;
    // With 1 where it does not count, nothing infinite is made there.
    let t = t.masked_fill(&few, 1.0)?;
    let sum = t.mul(&t.log()?)?.sub(&t)?.add(&t.mul_scalar(TAU)?.log()?.mul_scalar(0.5)?)?;
    sum.masked_fill(&few, 0.0)
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::Reduction;
    use phalanx_tensor::Device;

    use super::PoissonNll;
    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn full_likelihood_is_close_and_derivatives_hold() {
        let x = Var::scalar(1.5, Device::CPU).unwrap();
        let t = Var::scalar(7_i64, Device::CPU).unwrap();
        let full = PoissonNll { full: true, ..PoissonNll::default() };
        let loss: f64 = x.poisson_nll_loss(&t, &full).unwrap().item().unwrap();
        assert!((loss - (1.5f64.exp() - 7.0 * 1.5 + 5040f64.ln())).abs() < 0.02);
        for (log_input, full) in [(true, false), (false, false), (true, true)] {
            for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
                let config = PoissonNll { log_input, full, eps: 1e-3, reduction };
                check_twice(&[&[2, 3], &[2, 3]], |v| {
                    v[0].exp()?.poisson_nll_loss(&v[1].mul_scalar(3.0)?.exp()?, &config)
                });
            }
        }
    }
}
