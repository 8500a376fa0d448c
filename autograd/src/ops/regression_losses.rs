//! Losses of real numbers against targets: squares, magnitudes, and likelihoods of Poisson and normal distributions.

use std::f64::consts::TAU;

use phalanx_kernels::{self as kernels, Reduction};
use phalanx_tensor::{DType, Error, Result as TensorResult, Tensor};

use super::elementwise::{Broadcasting, broadcasting};
use super::frame::{as_number, composed, record_linear};
use crate::{Result, Var, begins};

/// What a loss makes of its items' losses.
impl Var {
    /// All elements as they are, their mean or their sum.
    pub(crate) fn reduce(&self, reduction: Reduction) -> Result<Var> {
        match reduction {
            Reduction::None => Ok(self.clone()),
            Reduction::Mean => self.mean_all(),
            Reduction::Sum => self.sum_all(),
        }
    }
}

/// Refuses an input and a target of different shapes: broadcast, each element would meet others than its own.
pub(super) fn one_shape(op: &'static str, x: &Var, target: &Var) -> Result<()> {
    if x.tensor().same_shape(target.tensor()) {
        return Ok(());
    }
    let got = format!("an input of shape {:?} and a target of shape {:?}", x.shape(), target.shape());
    Err(Error::shape(op, got, "one shape for both").into())
}

/// `d²` of `d = x - t`, elementwise, then reduced.
///
/// Derivative: `dx = dy 2 d`, `dt = -dx`. Saves both. The elements' losses are rounded once, and so are their
/// gradients.
impl Var {
    /// The squared difference to `target`.
    ///
    /// # Errors
    /// If the shapes differ, dtypes or devices differ, or the dtype is no floating-point one.
    pub fn mse_loss(&self, target: &Var, reduction: Reduction) -> Result<Var> {
        begins();
        one_shape("mse_loss", self, target)?;
        let y = kernels::mse_loss(self.tensor(), target.tensor())?;
        broadcasting(&[self, target], y, MseLoss)?.reduce(reduction)
    }
}

struct MseLoss;

impl Broadcasting for MseLoss {
    const NAME: &'static str = "mse_loss";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let dx = kernels::mse_loss_backward(x[0].tensor(), x[1].tensor(), dy)?;
        Ok(Some(if i == 0 { dx } else { kernels::neg(&dx)? }))
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let d = x[i].sub(&x[1 - i])?;
        dy.mul(&d)?.mul_scalar(2.0)
    }
}

/// `|d|` of `d = x - t`, elementwise, then reduced.
///
/// Derivative: `dx = dy sign(d)`, `dt = -dx`. Saves both. The elements' losses are rounded once, and so are their
/// gradients. At 0 the derivative is 0.
impl Var {
    /// The magnitude of the difference to `target`.
    ///
    /// # Errors
    /// If the shapes differ, dtypes or devices differ, or the dtype is no floating-point one.
    pub fn l1_loss(&self, target: &Var, reduction: Reduction) -> Result<Var> {
        begins();
        one_shape("l1_loss", self, target)?;
        let y = kernels::l1_loss(self.tensor(), target.tensor())?;
        broadcasting(&[self, target], y, L1Loss)?.reduce(reduction)
    }
}

struct L1Loss;

impl Broadcasting for L1Loss {
    const NAME: &'static str = "l1_loss";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let dx = kernels::l1_loss_backward(x[0].tensor(), x[1].tensor(), dy)?;
        Ok(Some(if i == 0 { dx } else { kernels::neg(&dx)? }))
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let d = x[i].sub(&x[1 - i])?;
        super::unary::signed(&d, dy)
    }
}

/// `d² / (2 beta)` where `|d| < beta`, else `|d| - beta / 2`, of `d = x - t`, elementwise, then reduced.
///
/// Derivative: `dx = dy d / beta` where `|d| < beta`, else `dy sign(d)`, `dt = -dx`. Saves both. The elements' losses
/// are rounded once, and so are their gradients.
impl Var {
    /// The difference to `target`, squared up to `beta` and linear beyond; usually `beta` is 1.
    ///
    /// # Errors
    /// If `beta` is below 0, the shapes, dtypes or devices differ, or the dtype is no floating-point one.
    pub fn smooth_l1_loss(&self, target: &Var, beta: f64, reduction: Reduction) -> Result<Var> {
        begins();
        if beta.is_nan() || beta < 0.0 {
            return Err(Error::range("smooth_l1_loss", format!("beta {beta}"), "0 or more").into());
        }
        one_shape("smooth_l1_loss", self, target)?;
        let y = kernels::smooth_l1_loss(self.tensor(), target.tensor(), beta)?;
        broadcasting(&[self, target], y, SmoothL1Loss { beta })?.reduce(reduction)
    }
}

struct SmoothL1Loss {
    beta: f64,
}

impl Broadcasting for SmoothL1Loss {
    const NAME: &'static str = "smooth_l1_loss";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let dx = kernels::smooth_l1_loss_backward(x[0].tensor(), x[1].tensor(), dy, self.beta)?;
        Ok(Some(if i == 0 { dx } else { kernels::neg(&dx)? }))
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let d = x[i].sub(&x[1 - i])?;
        let inner = dy.mul(&d)?.div_scalar(self.beta)?;
        inner.where_(&d.abs()?.lt_scalar(self.beta)?, &super::unary::signed(&d, dy)?)
    }
}

/// `d² / 2` where `|d| < delta`, else `delta (|d| - delta / 2)`, of `d = x - t`, elementwise and broadcast, then reduced.
///
/// Derivative: `dx = dy d` where `|d| < delta`, else `dy delta sign(d)`, `dt = -dx`. Saves both. The elements' losses are
/// rounded once, and so are their gradients.
impl Var {
    /// The difference to `target`, squared up to `delta` and linear beyond; usually `delta` is 1.
    ///
    /// # Errors
    /// If the shapes do not broadcast, dtypes or devices differ, the dtype is no floating-point one, or `delta` is not
    /// positive.
    pub fn huber_loss(&self, target: &Var, delta: f64, reduction: Reduction) -> Result<Var> {
        begins();
        if delta.is_nan() || delta <= 0.0 {
            return Err(Error::range("huber_loss", format!("delta {delta}"), "a number above 0").into());
        }
        let y = kernels::huber_loss(self.tensor(), target.tensor(), delta)?;
        broadcasting(&[self, target], y, HuberLoss { delta })?.reduce(reduction)
    }
}

struct HuberLoss {
    delta: f64,
}

impl Broadcasting for HuberLoss {
    const NAME: &'static str = "huber_loss";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let dx = kernels::huber_loss_backward(x[0].tensor(), x[1].tensor(), dy, self.delta)?;
        Ok(Some(if i == 0 { dx } else { kernels::neg(&dx)? }))
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let d = x[i].sub(&x[1 - i])?;
        let linear = super::unary::signed(&d, dy)?.mul_scalar(self.delta)?;
        dy.mul(&d)?.where_(&d.abs()?.lt_scalar(self.delta)?, &linear)
    }
}

// The negative log likelihood of counts `t` under Poisson distributions, then reduced.
//
// `e^x - t x` where the input is the logarithm of the rate, else `x - t ln(x + eps)`; with the full likelihood
// Stirling's `t ln t - t + ln(2 pi t) / 2` is added where `t > 1`. Composed, in f32 for the halves.

/// The options of [`Var::poisson_nll_loss`].
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

// `(ln v + (x - t)² / v) / 2` with the variance `v`, at least `eps`, then reduced: the negative log likelihood of `t` under
// normal distributions.
//
// The gradient passes the lower bound of the variance as if it were not there, as in PyTorch. Composed, in f32 for the
// halves.

const OP: &str = "gaussian_nll_loss";

/// The options of [`Var::gaussian_nll_loss`].
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
    /// The negative log likelihood of `target` under the means `self` and the variances `variance`: of the input's
    /// shape, with a last dimension of 1, or without the last dimension.
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
    use phalanx_tensor::{DType, Device, Tensor};

    use super::{GaussianNll, PoissonNll};
    use crate::ops::testing::check_twice;
    use crate::ops::{KlReduction, KlTarget};
    use crate::{Result, Var, grad};

    #[test]
    fn losses_of_different_shapes_are_refused_and_not_broadcast() {
        let zeros = |shape: &[usize]| Var::new(Tensor::zeros(shape, DType::F32, Device::CPU).unwrap());
        let (x, t) = (zeros(&[2]), zeros(&[2, 1]));
        let mean = Reduction::Mean;
        let losses: [(&str, Result<Var>); 5] = [
            ("mse_loss", x.mse_loss(&t, mean)),
            ("l1_loss", x.l1_loss(&t, mean)),
            ("smooth_l1_loss", x.smooth_l1_loss(&t, 1.0, mean)),
            ("binary_cross_entropy_with_logits", x.binary_cross_entropy_with_logits(&t, None, None, mean)),
            ("kl_div", x.kl_div(&t, KlTarget::Probabilities, KlReduction::BatchMean)),
        ];
        for (name, loss) in losses {
            let error = loss.unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{name}: got an input of shape [2] and a target of shape [2, 1]")),
                "{error}"
            );
        }
        let large = zeros(&[3, 2]);
        for (weight, positive) in [(Some(&large), None), (None, Some(&large))] {
            let error =
                x.binary_cross_entropy_with_logits(&x, weight, positive, mean).unwrap_err().to_string();
            assert!(error.contains("[3, 2]") && error.contains("broadcasts to [2]"), "{error}");
        }
        assert!(x.smooth_l1_loss(&x, -1.0, mean).unwrap_err().to_string().contains("beta"));
    }

    #[test]
    fn both_sides_of_delta_follow_the_formula_and_derivatives_hold() {
        let x = Var::from_slice(&[0.0, 0.5, -2.0, 3.0], &[4], Device::CPU).unwrap();
        let zero = Var::scalar(0.0, Device::CPU).unwrap();
        let y = x.huber_loss(&zero, 2.0, Reduction::None).unwrap().to_vec::<f64>().unwrap();
        assert_eq!(y, [0.0, 0.125, 2.0, 4.0]);
        for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
            check_twice(&[&[2, 3], &[3]], |v| v[0].square()?.huber_loss(&v[1], 0.4, reduction));
        }
        for delta in [0.0, -1.0, f64::NAN] {
            assert!(x.huber_loss(&zero, delta, Reduction::Mean).is_err());
        }
    }

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
        let refused =
            x.gaussian_nll_loss(&zero, &v.repeat(&[3]).unwrap(), &config).err().unwrap().to_string();
        assert!(refused.contains("got a variance of shape [6]"), "{refused}");
    }
}
