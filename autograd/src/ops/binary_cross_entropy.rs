//! `-(t ln x + (1 - t) ln(1 - x))` of probabilities `x`, elementwise, then weighted and reduced; no logarithm counts for less than
//! -100.
//!
//! Derivative: `dx = dy (x - t) / max(x (1 - x), 1e-12)`, `dt = dy (ln(1 - x) - ln x)`. Saves both. The halves are computed in
//! f32.

use phalanx_kernels::{self as kernels, Reduction};
use phalanx_tensor::{Error, Result as TensorResult, Tensor};

use super::broadcasting::{Broadcasting, broadcasting};
use super::composed::composed;
use crate::{Result, Var, begins};

const OP: &str = "binary_cross_entropy";

impl Var {
    /// The binary cross entropy of these probabilities and the targets of the same shape, each between 0 and 1, in nats;
    /// multiplied by `weight`, which broadcasts. Of logits use [`Var::binary_cross_entropy_with_logits`], which is exact in the
    /// tails.
    ///
    /// # Errors
    /// If the shapes differ, dtypes or devices do, the dtype is no floating-point one, or (where the host sees the elements) an
    /// input is not between 0 and 1.
    pub fn binary_cross_entropy(
        &self,
        target: &Var,
        weight: Option<&Var>,
        reduction: Reduction,
    ) -> Result<Var> {
        begins();
        if self.shape() != target.shape() {
            let got = format!("an input of shape {:?} and a target of {:?}", self.shape(), target.shape());
            return Err(Error::shape(OP, got, "one shape").into());
        }
        let inputs: Vec<&Var> = [self, target].into_iter().chain(weight).collect();
        composed(OP, &inputs, |inputs| {
            check_probabilities(inputs[0].tensor())?;
            let (x, t) = (&inputs[0], &inputs[1]);
            let positive = t.tensor_times(&x.log()?)?;
            let negative = kernels::mul(&kernels::rsub_scalar(t.tensor(), 1.0.into())?, &log_of_rest(x)?)?;
            let y = kernels::neg(&kernels::add(&positive, &negative)?)?;
            let losses = broadcasting(&[x, t], y, Entropy)?;
            inputs.get(2).map_or(Ok(losses.clone()), |weight| losses.mul(weight))?.reduce(reduction)
        })
    }

    /// This times a logarithm that counts for no less than -100, without a graph.
    fn tensor_times(&self, log: &Var) -> Result<Tensor> {
        Ok(kernels::mul(self.tensor(), &kernels::clamp(log.tensor(), Some((-100.0).into()), None)?)?)
    }
}

/// `max(ln(1 - x), -100)`, without a graph.
fn log_of_rest(x: &Var) -> Result<Tensor> {
    let log = kernels::ln_1p(&kernels::neg(x.tensor())?)?;
    Ok(kernels::clamp(&log, Some((-100.0).into()), None)?)
}

/// All between 0 and 1, where the host can see them.
fn check_probabilities(x: &Tensor) -> Result<()> {
    if x.device().is_cuda() || x.device().is_meta() || x.numel() == 0 {
        return Ok(());
    }
    let dims: Vec<usize> = (0..x.rank()).collect();
    let wide = |x: Tensor| kernels::cast(&x, phalanx_tensor::DType::F64)?.item::<f64>();
    let bounds = [wide(kernels::amin(x, &dims, false)?)?, wide(kernels::amax(x, &dims, false)?)?];
    match bounds.iter().find(|&&x| !(x.is_nan() || (0.0..=1.0).contains(&x))) {
        Some(bad) => {
            let wanted = "probabilities between 0 and 1 (of logits use binary_cross_entropy_with_logits)";
            Err(Error::range(OP, format!("input {bad}"), wanted).into())
        }
        None => Ok(()),
    }
}

struct Entropy;

impl Broadcasting for Entropy {
    const NAME: &'static str = OP;

    fn fused(&self, _: usize, _: &[Var], _: &Tensor) -> TensorResult<Option<Tensor>> {
        Ok(None)
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let (x, t) = (&x[0], &x[1]);
        let least = |x: &Var, bound: f64| x.clamp(Some(bound.into()), None);
        let slope = match i {
            0 => x.sub(t)?.div(&least(&x.rsub_scalar(1.0)?.mul(x)?, 1e-12)?)?,
            _ => least(&x.neg()?.ln_1p()?, -100.0)?.sub(&least(&x.log()?, -100.0)?)?,
        };
        dy.mul(&slope)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::Reduction;
    use phalanx_tensor::Device;

    use crate::ops::testing::check_twice;
    use crate::{Var, grad};

    #[test]
    fn certainty_costs_at_most_a_hundred_and_derivatives_hold() {
        let make = |values: &[f64]| Var::from_slice(values, &[values.len()], Device::CPU).unwrap();
        let x = Var::leaf(make(&[0.0, 1.0, 0.0, 1.0, 0.5]).into_tensor()).unwrap();
        let t = make(&[0.0, 1.0, 1.0, 0.0, 0.25]);
        let y = x.binary_cross_entropy(&t, None, Reduction::None).unwrap();
        let losses = y.to_vec::<f64>().unwrap();
        assert_eq!(losses[..4], [0.0, 0.0, 100.0, 100.0]);
        assert!((losses[4] - 2f64.ln()).abs() < 1e-15);
        let dx = grad(&[(y.sum_all().unwrap(), None)], &[&x], Default::default()).unwrap().remove(0).unwrap();
        assert_eq!(dx.to_vec::<f64>().unwrap(), [0.0, 0.0, -1e12, 1e12, 1.0]);
        for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
            check_twice(&[&[2, 3], &[2, 3], &[3]], |v| {
                v[0].sigmoid()?.binary_cross_entropy(&v[1].sigmoid()?, Some(&v[2]), reduction)
            });
        }
    }

    #[test]
    fn what_is_no_probability_or_of_another_shape_is_refused() {
        let x = Var::from_slice(&[0.2, 1.5], &[2], Device::CPU).unwrap();
        let error = x.binary_cross_entropy(&x, None, Reduction::Mean).unwrap_err().to_string();
        assert!(error.starts_with("binary_cross_entropy: input 1.5"), "{error}");
        assert!(x.binary_cross_entropy(&x.select(0, 0).unwrap(), None, Reduction::Mean).is_err());
    }
}
