//! `(ln v + (x - t)² / v) / 2` with the variance `v`, at least `eps`, then reduced: the negative log likelihood of `t` under
//! normal distributions.
//!
//! The gradient passes the lower bound of the variance as if it were not there, as in PyTorch. Composed, in f32 for the
//! halves.

use std::f64::consts::TAU;

use phalanx_kernels::{self as kernels, Reduction};
use phalanx_tensor::{DType, Error};

use super::composed::composed;
use super::linear_map::record_linear;
use crate::{Result, Var, begins};

const OP: &str = "gaussian_nll_loss";

/// What [`Var::gaussian_nll_loss`] is told beside its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GaussianNll {
    /// Whether the constant `ln(2 pi) / 2` is added.
    pub full: bool,
    /// The smallest variance that is used.
    pub eps: f64,
    /// What becomes of the elements' losses.
    pub reduction: Reduction,
}

impl Default for GaussianNll {
    fn default() -> GaussianNll {
        GaussianNll { full: false, eps: 1e-6, reduction: Reduction::Mean }
    }
}

impl Var {
    /// The negative log likelihood of `target` under the means `self` and the variances `variance`: of the input's shape, with a last
    /// dimension of 1, or without the last dimension.
    ///
    /// # Errors
    /// If input and target do not broadcast, the variance has another shape, dtypes or devices differ, the dtype is no
    /// floating-point one, `eps` is not positive, or (where the host sees the elements) a variance is negative.
    pub fn gaussian_nll_loss(&self, target: &Var, variance: &Var, config: &GaussianNll) -> Result<Var> {
        begins();
        if config.eps.is_nan() || config.eps <= 0.0 {
            return Err(Error::range(OP, format!("eps {}", config.eps), "a number above 0").into());
        }
        let variance = fitted(self, variance)?;
        composed(OP, &[self, target, &variance], |inputs| {
            let [x, t, v] = [&inputs[0], &inputs[1], &inputs[2]];
            check_variance(v)?;
            let bounded = kernels::clamp(v.tensor(), Some(config.eps.into()), None)?;
            let v = record_linear(OP, v, bounded, |dy| Ok(dy.clone()))?;
            let loss = v.log()?.add(&x.sub(t)?.square()?.div(&v)?)?.mul_scalar(0.5)?;
            let loss = if config.full { loss.add_scalar(0.5 * TAU.ln())? } else { loss };
            loss.reduce(config.reduction)
        })
    }
}

/// The variance with as many dimensions as the input.
fn fitted(x: &Var, variance: &Var) -> Result<Var> {
    let lead = x.rank().checked_sub(1).map(|last| &x.shape()[..last]);
    match variance.shape() {
        shape if shape == x.shape() || shape.is_empty() => Ok(variance.clone()),
        shape if Some(shape) == lead => variance.unsqueeze(-1),
        [front @ .., 1] if Some(front) == lead => Ok(variance.clone()),
        shape => {
            let wanted =
                format!("that of the input {:?}, or with 1 for its last size, or without it", x.shape());
            Err(Error::shape(OP, format!("a variance of shape {shape:?}"), wanted).into())
        }
    }
}

/// None below 0, where the host can see them.
fn check_variance(v: &Var) -> Result<()> {
    if v.device().is_cuda() || v.device().is_meta() || v.numel() == 0 {
        return Ok(());
    }
    let least: f64 = v.detach().min_all()?.to(DType::F64)?.item()?;
    if least < 0.0 {
        return Err(Error::range(OP, format!("variance {least}"), "none below 0").into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::Reduction;
    use phalanx_tensor::Device;

    use super::GaussianNll;
    use crate::ops::testing::check_twice;
    use crate::{Var, grad};

    #[test]
    fn derivatives_hold_for_every_shape_of_the_variance() {
        for shape in [&[2, 3][..], &[2, 1], &[2]] {
            for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
                let config = GaussianNll { full: true, reduction, ..GaussianNll::default() };
                check_twice(&[&[2, 3], &[2, 3], shape], |v| {
                    v[0].gaussian_nll_loss(&v[1], &v[2].exp()?, &config)
                });
            }
        }
    }

    #[test]
    fn the_gradient_passes_the_bound_and_negative_variances_are_refused() {
        let x = Var::from_slice(&[1.0, 2.0], &[2], Device::CPU).unwrap();
        let v = Var::leaf(Var::from_slice(&[0.1, 4.0], &[2], Device::CPU).unwrap().into_tensor()).unwrap();
        let zero = Var::scalar(0.0, Device::CPU).unwrap();
        let config = GaussianNll { eps: 0.5, reduction: Reduction::Sum, ..GaussianNll::default() };
        let loss = x.gaussian_nll_loss(&zero, &v, &config).unwrap();
        let dv = grad(&[(loss, None)], &[&v], Default::default()).unwrap().remove(0).unwrap();
        assert_eq!(dv.to_vec::<f64>().unwrap(), [0.5 * (2.0 - 4.0), 0.5 * (0.25 - 0.25)]);
        let error = x.gaussian_nll_loss(&zero, &v.neg().unwrap(), &config).unwrap_err().to_string();
        assert!(error.starts_with("gaussian_nll_loss: variance -4"), "{error}");
        assert!(x.gaussian_nll_loss(&zero, &v.repeat(&[3]).unwrap(), &config).is_err());
    }
}
