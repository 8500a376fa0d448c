//! [`Lamb`]: Adam's direction, as long as the parameter's norm says.

use phalanx_kernels as kernels;
use phalanx_kernels::optim::{self as kernel, Item, Slice, Step, optim_state_dtype};
use phalanx_tensor::{DType, Tensor};

use super::whole::{WholeRule, WholeStep, move_weights, norm, update_whole, weights};
use super::{Rule, StepHyperparameters};
use crate::error::{check_decay, check_non_negative};
use crate::{Error, Result};

/// Adam's direction with decoupled weight decay, `r = m / (sqrt(v) + eps) + decay p` with moments that are corrected for their start at 0,
/// scaled for each parameter by the ratio of norms: `p -= lr ‖p‖ / ‖r‖ r`. If a norm is 0, the ratio is 1. For large batches.
/// Source: You and others: Large batch optimization for deep learning (2020), algorithm 2 with `φ(z) = z`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lamb {
    /// Decays of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
}

impl Default for Lamb {
    fn default() -> Lamb {
        Lamb { betas: (0.9, 0.999), eps: 1e-6 }
    }
}

impl Lamb {
    /// With these decays of the moments.
    #[must_use]
    pub fn with_betas(self, first: f64, second: f64) -> Lamb {
        Lamb { betas: (first, second), ..self }
    }

    /// With this added to the root.
    #[must_use]
    pub fn with_eps(self, eps: f64) -> Lamb {
        Lamb { eps, ..self }
    }
}

impl Rule for Lamb {
    fn state(&self) -> Vec<&'static str> {
        vec!["exp_avg", "exp_avg_sq"]
    }

    fn check(&self) -> Result<()> {
        check_decay("Lamb", "the first beta", self.betas.0)?;
        check_decay("Lamb", "the second beta", self.betas.1)?;
        check_non_negative("Lamb", "an eps of", self.eps)
    }

    fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
        update_whole("Lamb", self, step, hyper)
    }

    fn whole(&self) -> Option<&dyn WholeRule> {
        Some(self)
    }
}

impl WholeRule for Lamb {
    fn proposals(&self) -> usize {
        2
    }

    fn decides_number(&self) -> bool {
        true
    }

    /// The direction and the weights.
    fn propose(&self, item: &mut Item<'_>, step: &WholeStep<'_>) -> Result<Vec<Tensor>> {
        let weights = weights(item, optim_state_dtype(item.slice.param.dtype()))?;
        // The kernel reads the weights where it writes the direction.
        let mut direction = weights.copy()?;
        let (beta1, beta2) = self.betas;
        let StepHyperparameters { lr, weight_decay, step: number } = step.hyper;
        let numbers = kernel::Adam { lr, beta1, beta2, eps: self.eps, weight_decay, step: number };
        let Slice { grad, scale, .. } = item.slice;
        let slice = Slice { param: &mut direction, master: None, grad, scale };
        let items = vec![Item { slice, state: &mut *item.state }];
        kernel::lamb_direction_(Step { factor: step.factor, ..Step::new(items) }, numbers)?;
        Ok(vec![direction, weights])
    }

    /// The ratio of the norms.
    fn decide(&self, whole: &[Tensor], _: &mut [Tensor], _: &WholeStep<'_>) -> Result<Tensor> {
        let [direction, weights] = whole else {
            return Err(Error::invalid("Lamb", format!("got {} tensors, wanted 2", whole.len())));
        };
        let (direction_norm, weight_norm) = (norm(direction)?, norm(weights)?);
        let product = kernels::mul(&direction_norm, &weight_norm)?;
        let ratio = kernels::div(&weight_norm, &direction_norm)?;
        let one = kernels::full(&[1], 1.0, DType::F64, ratio.device())?;
        let ratio = kernels::where_(&kernels::ne_scalar(&product, 0.0.into())?, &ratio, &one)?;
        Ok(kernels::cast(&ratio, direction.dtype())?)
    }

    fn apply(
        &self,
        item: &mut Item<'_>,
        proposed: &[Tensor],
        decision: &Tensor,
        step: &WholeStep<'_>,
    ) -> Result<()> {
        let update = kernels::mul(&proposed[0], &decision.with_shape(&[])?)?;
        move_weights(item, 1.0, &update, -step.hyper.lr)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;
    use crate::optim::testing::{assert_near, random, trained_by};

    /// Algorithm 2 of the paper, with plain loops.
    fn twin(shape: &[usize], steps: u64, lr: f64, decay: f64) -> Vec<f64> {
        let mut p = random(shape, 1);
        let (mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
        for t in 1..=steps {
            let g = random(shape, 1 + t);
            let mut r = vec![0.0; p.len()];
            for i in 0..p.len() {
                m[i] = 0.9 * m[i] + 0.1 * g[i];
                v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
                let (m, v) = (m[i] / (1.0 - 0.9f64.powi(t as i32)), v[i] / (1.0 - 0.999f64.powi(t as i32)));
                r[i] = m / (v.sqrt() + 1e-6) + decay * p[i];
            }
            let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
            let ratio = norm(&p) / norm(&r);
            p.iter_mut().zip(&r).for_each(|(p, r)| *p -= lr * ratio * r);
        }
        p
    }

    #[test]
    fn updates_equal_algorithm_2() {
        for shape in [&[3, 7][..], &[5], &[1], &[65, 3], &[2, 3, 4]] {
            let wanted = twin(shape, 4, 0.1, 0.2);
            for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 2e-2)] {
                let got = trained_by(Lamb::default(), dtype, shape, 4, 0.1, 0.2);
                assert_near(&got, &wanted, tolerance, &format!("{shape:?} {dtype}"));
            }
        }
    }

    #[test]
    fn a_parameter_of_zeros_moves_by_the_plain_direction() {
        let p = crate::Parameter::new("w", Tensor::zeros(&[3], DType::F64, Device::CPU).unwrap()).unwrap();
        let mut lamb = Lamb::default().init(vec![crate::Group::new(vec![p.clone()], 0.5)]).unwrap();
        p.set_grad(Some(kernels::full(&[3], 2.0, DType::F64, Device::CPU).unwrap()));
        lamb.step().unwrap();
        assert_near(&p.tensor().to_vec::<f64>().unwrap(), &[-0.5; 3], 1e-6, "zeros");
    }
}
