//! [`Adafactor`]: second moments of a matrix from the means of its rows and columns.

use phalanx_kernels as kernels;
use phalanx_kernels::optim::{Item, Step, optim_state_dtype};
use phalanx_tensor::{DType, Tensor};

use super::whole::{WholeRule, WholeStep, move_weights, norm, scaled_grad, update_whole, weights};
use super::{Rule, StepHyperparameters};
use crate::error::{check_non_negative, check_setting};
use crate::{Error, Result};

/// A second moment of rank 1 for each matrix: its state is the mean square of each row and of each column, as many numbers as the matrix
/// has rows and columns. The rate is relative to the parameter's size, and updates are clipped by their root mean square.
///
/// ```text
/// w = t^beta2_decay, rho = min(lr, 1 / sqrt(t)), alpha = max(eps.1, rms(p)) rho
/// row += w (mean of the row's g² - row), column += w (mean of the column's g² - column)
/// v = row column / mean(row), u = g / sqrt(max(v, eps.0²))
/// p = (1 - lr decay) p - alpha / max(1, rms(u) / clip) u
/// ```
/// A tensor with more than two dimensions is a batch of matrices, over its last two; one with fewer has a second moment of each element.
/// Source: Shazeer and Stern: Adafactor (2018), with the defaults and the weight decay of PyTorch's `Adafactor`, whose rate is 0.01.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// The exponent of the second moment's weight.
    pub beta2_decay: f64,
    /// The least root of a second moment (`None`: the step of numbers near 1 in the dtype that is computed in), and the least size
    /// of a parameter that the rate is relative to.
    pub eps: (Option<f64>, f64),
    /// The largest root mean square of an update before the rate.
    pub clip: f64,
}

impl Default for Adafactor {
    fn default() -> Adafactor {
        Adafactor { beta2_decay: -0.8, eps: (None, 1e-3), clip: 1.0 }
    }
}

const ROW: &str = "whole_row_var";
const COLUMN: &str = "whole_col_var";
const ELEMENT: &str = "whole_variance";

impl Adafactor {
    /// One over the root of the second moments, which this step's gradient has been added to.
    fn inverse_roots(&self, grad: &Tensor, state: &mut [Tensor], number: u64) -> Result<Tensor> {
        let weight = (number as f64).powf(self.beta2_decay);
        let square = kernels::square(grad)?;
        let floor =
            self.eps.0.unwrap_or(if grad.dtype() == DType::F64 { f64::EPSILON } else { f32::EPSILON.into() });
        let moments = match state {
            [row, column] => {
                for (held, dim) in [(&mut *row, -1isize), (&mut *column, -2)] {
                    fade(held, &kernels::mean(&square, &[dim], true)?, weight)?;
                }
                let size = kernels::clamp(&kernels::mean(row, &[-2isize], true)?, Some(floor.into()), None)?;
                kernels::div(&kernels::mul(row, column)?, &size)?
            }
            [variance] => {
                fade(variance, &square, weight)?;
                variance.clone()
            }
            _ => return Err(Error::invalid("Adafactor", format!("got {} state tensors", state.len()))),
        };
        Ok(kernels::rsqrt(&kernels::clamp(&moments, Some((floor * floor).into()), None)?)?)
    }
}

/// `held += weight (new - held)`.
fn fade(held: &mut Tensor, new: &Tensor, weight: f64) -> Result<()> {
    kernels::scale_(held, 1.0 - weight)?;
    Ok(kernels::add_scaled_(held, new, weight)?)
}

impl Rule for Adafactor {
    fn state(&self) -> Vec<&'static str> {
        vec![ROW, COLUMN, ELEMENT]
    }

    fn whole_state(&self, kind: &str, shape: &[usize]) -> Option<Vec<usize>> {
        let mut shape = shape.to_vec();
        match (kind, &mut shape[..]) {
            (ROW, [.., _, last]) | (COLUMN, [.., last, _]) => *last = 1,
            (ELEMENT, [] | [_]) => {}
            _ => return None,
        }
        Some(shape)
    }

    fn check(&self) -> Result<()> {
        let decay = self.beta2_decay;
        check_setting(
            "Adafactor",
            "a beta2_decay of",
            decay,
            decay.is_finite() && decay <= 0.0,
            "0 or less",
        )?;
        check_non_negative("Adafactor", "a first eps of", self.eps.0.unwrap_or(0.0))?;
        check_non_negative("Adafactor", "a second eps of", self.eps.1)?;
        check_setting("Adafactor", "a clip of", self.clip, self.clip >= 1.0, "1 or more")
    }

    fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
        update_whole("Adafactor", self, step, hyper)
    }

    fn whole(&self) -> Option<&dyn WholeRule> {
        Some(self)
    }
}

impl WholeRule for Adafactor {
    fn proposals(&self) -> usize {
        2
    }

    /// The gradient and the weights.
    fn propose(&self, item: &mut Item<'_>, step: &WholeStep<'_>) -> Result<Vec<Tensor>> {
        let dtype = optim_state_dtype(item.slice.param.dtype());
        Ok(vec![scaled_grad(item, dtype, step)?, weights(item, dtype)?])
    }

    fn decide(&self, whole: &[Tensor], state: &mut [Tensor], step: &WholeStep<'_>) -> Result<Tensor> {
        let [grad, weights] = whole else {
            return Err(Error::invalid("Adafactor", format!("got {} tensors, wanted 2", whole.len())));
        };
        let StepHyperparameters { lr, step: number, .. } = step.hyper;
        let update = kernels::mul(&self.inverse_roots(grad, state, number)?, grad)?;
        let each = 1.0 / (grad.numel() as f64).sqrt();
        let size = kernels::clamp(
            &kernels::mul_scalar(&norm(weights)?, each.into())?,
            Some(self.eps.1.into()),
            None,
        )?;
        let alpha = kernels::mul_scalar(&size, lr.min(1.0 / (number as f64).sqrt()).into())?;
        let excess = kernels::mul_scalar(&norm(&update)?, (each / self.clip).into())?;
        let rate = kernels::div(&alpha, &kernels::clamp(&excess, Some(1.0.into()), None)?)?;
        Ok(kernels::mul(&update, &kernels::cast(&rate, update.dtype())?.with_shape(&[])?)?)
    }

    fn apply(
        &self,
        item: &mut Item<'_>,
        _: &[Tensor],
        decision: &Tensor,
        step: &WholeStep<'_>,
    ) -> Result<()> {
        move_weights(item, 1.0 - step.hyper.lr * step.hyper.weight_decay, decision, -1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::testing::{assert_near, random, trained_by};

    /// The formula with plain loops: PyTorch's, which has no momentum.
    fn twin(shape: &[usize], steps: u64, lr: f64, decay: f64) -> Vec<f64> {
        let mut p = random(shape, 1);
        let (rows, columns) = match shape {
            [.., rows, columns] => (*rows, *columns),
            _ => (p.len(), 1),
        };
        let (n, matrix) = (p.len(), shape.len() >= 2);
        let (mut row, mut column) = (vec![0.0; n / columns], vec![0.0; n / rows]);
        let eps = f64::EPSILON;
        for t in 1..=steps {
            let g = random(shape, 1 + t);
            let w = (t as f64).powf(-0.8);
            let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / n as f64).sqrt();
            let alpha = rms(&p).max(1e-3) * lr.min(1.0 / (t as f64).sqrt());
            for (i, row) in row.iter_mut().enumerate() {
                let mean = g[i * columns..][..columns].iter().map(|g| g * g).sum::<f64>() / columns as f64;
                *row += w * (mean - *row);
            }
            for (i, column) in column.iter_mut().enumerate().filter(|_| matrix) {
                let (batch, c) = (i / columns, i % columns);
                let of = |r: usize| g[(batch * rows + r) * columns + c];
                *column += w * ((0..rows).map(|r| of(r) * of(r)).sum::<f64>() / rows as f64 - *column);
            }
            let update: Vec<f64> = (0..n)
                .map(|i| {
                    let (batch, r, c) = (i / (rows * columns), i / columns % rows, i % columns);
                    let here = row[batch * rows + r];
                    let mean = row[batch * rows..][..rows].iter().sum::<f64>() / rows as f64;
                    let v = if matrix { here * column[batch * columns + c] / mean.max(eps) } else { here };
                    g[i] / v.max(eps * eps).sqrt()
                })
                .collect();
            let denominator = rms(&update).max(1.0);
            for (p, u) in p.iter_mut().zip(&update) {
                *p = *p * (1.0 - lr * decay) - alpha / denominator * u;
            }
        }
        p
    }

    #[test]
    fn updates_equal_the_formula() {
        for shape in [&[3, 7][..], &[5], &[], &[1, 1], &[65, 3], &[2, 3, 4]] {
            let wanted = twin(shape, 4, 0.3, 0.2);
            for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 2e-2)] {
                let got = trained_by(Adafactor::default(), dtype, shape, 4, 0.3, 0.2);
                assert_near(&got, &wanted, tolerance, &format!("{shape:?} {dtype}"));
            }
        }
    }

    #[test]
    fn state_is_a_number_for_each_row_and_column() {
        let of = |shape: &[usize]| {
            let kinds = Adafactor::default().state();
            kinds
                .into_iter()
                .filter_map(|kind| Adafactor::default().whole_state(kind, shape))
                .collect::<Vec<_>>()
        };
        assert_eq!(of(&[5, 7]), [[5, 1], [1, 7]]);
        assert_eq!(of(&[2, 5, 7]), [[2, 5, 1], [2, 1, 7]]);
        assert_eq!(of(&[5]), [[5]]);
    }
}
