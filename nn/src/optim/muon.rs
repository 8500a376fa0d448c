//! [`Muon`]: momentum whose matrices are orthogonalized.

use phalanx_kernels as kernels;
use phalanx_kernels::optim::{Item, Step, optim_state_dtype};
use phalanx_tensor::Tensor;

use super::whole::{WholeRule, WholeStep, move_weights, scaled_grad, update_whole};
use super::{Rule, StepHyperparameters};
use crate::error::{check_decay, check_non_negative, check_setting};
use crate::{Error, Parameter, Result};

/// Momentum whose matrices are made orthogonal: `p = (1 - lr decay) p - lr scale U`, where `U` is `g + momentum m` with its singular
/// values brought near 1 by steps of Newton and Schulz (`X = a X + (b A + c A²) X` with `A = X Xᵀ`).
///
/// It is for the matrices inside a model. Embeddings, heads, norms and biases are trained by an AdamW beside it, which may have the same
/// learning rate ([`MuonScale::MatchAdamW`]). A convolution's weight counts as a matrix `[out, in * taps]`.
/// Source: Jordan and others: Muon: An optimizer for hidden layers in neural networks (2024).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// Decay of the mean of gradients.
    pub momentum: f64,
    /// Whether the gradient counts once more on top of the mean.
    pub nesterov: bool,
    /// Steps of the iteration.
    pub iterations: usize,
    /// Added to the norm that a matrix is divided by first.
    pub eps: f64,
    /// The factor of an update.
    pub scale: MuonScale,
}

/// The factor of a matrix `[rows, columns]`'s update besides the learning rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MuonScale {
    /// `sqrt(max(1, rows / columns))`, as in the first description.
    Original,
    /// `0.2 sqrt(max(rows, columns))`: elements change about as much as AdamW's do.
    /// Source: Liu and others: Muon is scalable for LLM training (2025), section 2.2.
    #[default]
    MatchAdamW,
}

/// The iteration's coefficients, which grow small singular values fastest. Source: as [`Muon`].
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];

impl Default for Muon {
    fn default() -> Muon {
        Muon { momentum: 0.95, nesterov: true, iterations: 5, eps: 1e-7, scale: MuonScale::default() }
    }
}

impl Muon {
    /// With this decay of the mean.
    #[must_use]
    pub fn with_momentum(self, momentum: f64) -> Muon {
        Muon { momentum, ..self }
    }

    /// With updates multiplied so.
    #[must_use]
    pub fn with_scale(self, scale: MuonScale) -> Muon {
        Muon { scale, ..self }
    }

    fn scale_of(&self, matrix: [usize; 2]) -> f64 {
        let [rows, columns] = matrix.map(|size| size as f64);
        match self.scale {
            MuonScale::Original => (rows / columns).max(1.0).sqrt(),
            MuonScale::MatchAdamW => 0.2 * rows.max(columns).sqrt(),
        }
    }
}

/// The matrix with singular values between about 0.7 and 1.2, those that are not far below the largest.
fn orthogonal(matrix: &Tensor, iterations: usize, eps: f64) -> Result<Tensor> {
    let wide = matrix.shape()[0] <= matrix.shape()[1];
    let matrix = if wide { matrix.clone() } else { matrix.transpose(0, 1)?.contiguous()? };
    let norm = kernels::add_scalar(&kernels::norm(&matrix, 2.0, &[0usize, 1], false)?, eps.into())?;
    let mut x = kernels::div(&matrix, &norm)?;
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..iterations {
        let square = kernels::matmul(&x, &x.transpose(0, 1)?)?;
        let mut polynomial = kernels::matmul(&square, &square)?;
        kernels::scale_(&mut polynomial, c)?;
        kernels::add_scaled_(&mut polynomial, &square, b)?;
        let mut next = kernels::matmul(&polynomial, &x)?;
        kernels::add_scaled_(&mut next, &x, a)?;
        x = next;
    }
    Ok(if wide { x } else { x.transpose(0, 1)? })
}

impl Rule for Muon {
    fn state(&self) -> Vec<&'static str> {
        vec!["momentum_buffer"]
    }

    fn check(&self) -> Result<()> {
        check_decay("Muon", "a momentum of", self.momentum)?;
        let steps = self.iterations as f64;
        check_setting("Muon", "a number of iterations of", steps, self.iterations > 0, "at least 1")?;
        check_non_negative("Muon", "an eps of", self.eps)
    }

    /// Refuses a parameter that is no matrix.
    fn fits(&self, parameter: &Parameter) -> Result<()> {
        let shape = parameter.whole_shape();
        if shape.len() >= 2 && !shape.contains(&0) {
            return Ok(());
        }
        let wanted = "wanted a matrix; give other parameters to an AdamW";
        Err(Error::invalid("Muon", format!("got `{}` of shape {shape:?}, {wanted}", parameter.name())))
    }

    fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
        update_whole("Muon", self, step, hyper)
    }

    fn whole(&self) -> Option<&dyn WholeRule> {
        Some(self)
    }
}

impl WholeRule for Muon {
    /// The mean of gradients, with the gradient once more on top of it after Nesterov.
    fn propose(&self, item: &mut Item<'_>, step: &WholeStep<'_>) -> Result<Vec<Tensor>> {
        let dtype = optim_state_dtype(item.slice.param.dtype());
        let mut grad = scaled_grad(item, dtype, step)?;
        let [mean] = &mut *item.state else {
            return Err(Error::invalid("Muon", format!("got {} state tensors, wanted 1", item.state.len())));
        };
        kernels::scale_(mean, self.momentum)?;
        kernels::accumulate_(mean, &grad)?;
        if !self.nesterov {
            return Ok(vec![mean.clone()]);
        }
        kernels::add_scaled_(&mut grad, mean, self.momentum)?;
        Ok(vec![grad])
    }

    /// The orthogonal matrix.
    fn decide(&self, whole: &[Tensor], _: &mut [Tensor], step: &WholeStep<'_>) -> Result<Tensor> {
        let [rows, columns] = matrix_of(step.shape);
        let matrix = whole[0].with_shape(&[rows, columns])?;
        Ok(orthogonal(&matrix, self.iterations, self.eps)?.contiguous()?.with_shape(step.shape)?)
    }

    fn apply(
        &self,
        item: &mut Item<'_>,
        _: &[Tensor],
        decision: &Tensor,
        step: &WholeStep<'_>,
    ) -> Result<()> {
        let StepHyperparameters { lr, weight_decay, .. } = step.hyper;
        move_weights(item, 1.0 - lr * weight_decay, decision, -lr * self.scale_of(matrix_of(step.shape)))
    }
}

/// The sizes of a parameter as a matrix.
fn matrix_of(shape: &[usize]) -> [usize; 2] {
    [shape[0], shape[1..].iter().product()]
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::*;
    use crate::Group;

    fn random(shape: &[usize], seed: u64) -> Tensor {
        Tensor::from_vec(crate::optim::testing::random(shape, seed), shape, Device::CPU).unwrap()
    }

    /// The singular values of `G + momentum m` become 1 when they are about as large as each other, and the directions stay.
    #[test]
    fn an_update_is_the_nearest_orthogonal_matrix() {
        for [rows, columns] in [[3, 7], [7, 3], [33, 33], [1, 5]] {
            let p = Parameter::new("w", Tensor::zeros(&[rows, columns], DType::F64, Device::CPU).unwrap())
                .unwrap();
            let muon = Muon { iterations: 12, ..Muon::default().with_scale(MuonScale::Original) };
            let mut optimizer = muon.init(vec![Group::new(vec![p.clone()], 1.0)]).unwrap();
            let grad = random(&[rows, columns], 3);
            p.set_grad(Some(grad.clone()));
            optimizer.step().unwrap();
            let u = p.tensor();
            let small = match rows <= columns {
                true => kernels::matmul(&u, &u.transpose(0, 1).unwrap()),
                false => kernels::matmul(&u.transpose(0, 1).unwrap(), &u),
            };
            let scale = (rows as f64 / columns as f64).max(1.0);
            for (i, x) in small.unwrap().to_vec::<f64>().unwrap().into_iter().enumerate() {
                let n = rows.min(columns);
                let wanted = if i / n == i % n { scale } else { 0.0 };
                assert!(
                    (x - wanted).abs() < 0.45 * scale,
                    "[{rows}, {columns}]: {x} at {i}, wanted about {wanted}"
                );
            }
            // Downhill: the inner product with the gradient is minus about the sum of the singular values.
            let down = kernels::mul(&u, &grad).unwrap().to_vec::<f64>().unwrap().iter().sum::<f64>();
            let frobenius = grad.to_vec::<f64>().unwrap().iter().map(|x| x * x).sum::<f64>().sqrt();
            assert!(down < -0.6 * frobenius, "[{rows}, {columns}]: {down}, {frobenius}");
        }
    }

    #[test]
    fn what_is_no_matrix_is_refused_with_the_remedy_and_a_part_of_one_without_its_peers() {
        let vector = Parameter::new("bias", random(&[5], 1)).unwrap();
        let error = Muon::default().init(vec![Group::new(vec![vector], 0.1)]).err().unwrap().to_string();
        assert!(error.contains("`bias` of shape [5]") && error.contains("AdamW"), "{error}");
        let whole = Parameter::new("w", random(&[4, 6], 1)).unwrap();
        let piece = whole.piece(random(&[12], 1), 0..12).unwrap();
        let mut optimizer = Muon::default().init(vec![Group::new(vec![piece.clone()], 0.1)]).unwrap();
        piece.set_grad(Some(random(&[12], 2)));
        let error = optimizer.step().unwrap_err().to_string();
        assert!(error.contains("12 of 24 elements of `w`") && error.contains("with_peers"), "{error}");
    }

    #[test]
    fn factors_halves_and_convolutions_are_taken() {
        let step = |dtype: DType, shape: &[usize], factor: f64| {
            let p = Parameter::new("w", kernels::cast(&random(shape, 5), dtype).unwrap()).unwrap();
            let mut optimizer =
                Muon::default().init(vec![Group::new(vec![p.clone()], 0.02).with_weight_decay(0.1)]).unwrap();
            for seed in 0..3 {
                p.set_grad(Some(kernels::cast(&random(shape, 7 + seed), dtype).unwrap()));
                optimizer.step_by(&Tensor::from_slice(&[factor], &[1], Device::CPU).unwrap()).unwrap();
            }
            kernels::cast(&p.tensor(), DType::F64).unwrap().to_vec::<f64>().unwrap()
        };
        let far = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        for shape in [&[6, 4][..], &[4, 3, 3, 3], &[5, 129]] {
            let exact = step(DType::F64, shape, 1.0);
            // How long gradients are does not matter, only where they point.
            assert!(far(&exact, &step(DType::F64, shape, 1e-3)) < 1e-5);
            assert!(far(&exact, &step(DType::F32, shape, 1.0)) < 1e-4);
            assert!(far(&exact, &step(DType::BF16, shape, 1.0)) < 3e-2);
        }
    }
}
