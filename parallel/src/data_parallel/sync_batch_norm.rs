//! [`SyncBatchNorm`]: normalisation over the batch of all ranks.
//!
//! For `x` [N, C, ...] on each rank: `y = (x - mean) / sqrt(var + eps) * w + b` with each channel's mean and variance over
//! the elements of all ranks. Derivative, with `xhat` the normalised channel, `r` its inverse deviation, `g = dy w` and
//! sums over all ranks' `n` elements of a channel: `dx = r (g - sum(g) / n - xhat sum(g xhat) / n)`. `dw = sum(dy xhat)` and
//! `db = sum(dy)` are this rank's alone, as of any parameter: [`super::Ddp`] adds them.
//!
//! Two messages: forward, each rank's count, means and sums of squared deviations, merged in order of the ranks; backward,
//! the two sums. All ranks take part in both, those without rows too.
//! Source: Ioffe, Szegedy: Batch Normalization (2015); Chan, Golub, LeVeque: Updating formulae (1979).

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{
    self, Backward, BatchNorm as BatchNormArgs, Cx, Function, Grads, SaveContext, SavedVariable, Var, begins,
    grads1, is_recomputing, record,
};
use phalanx_nn::{BatchNorm, Entry, Module, Parameter, Parameters};
use phalanx_tensor::{DType, Device, Tensor};

use crate::comm::{Comm, Reduction};
use crate::{Error, Result};

/// A [`BatchNorm`] whose statistics in training are those of the batches of all ranks together, exactly: the same as of
/// one device with the whole batch, whatever rows a rank has. Otherwise it is that layer, with its names.
///
/// ```
/// # use phalanx_nn::{BatchNormConfig, Module, Scope, autograd::Var};
/// # use phalanx_parallel::{Result, data_parallel::SyncBatchNorm, launch};
/// # use phalanx_tensor::{Context, DType};
/// let outputs = launch::threads(2, |rank| -> Result<Vec<f64>> {
///     let norm = BatchNormConfig::new(1).init_1d(&Scope::new(7, DType::F64, rank.device()))?;
///     let norm = SyncBatchNorm::of(&norm, rank.comm())?;
///     let _train = phalanx_nn::autograd::with_train(true);
///     let x = Var::from_slice(&[rank.rank() as f64], &[1, 1], rank.device())?;
///     Ok(norm.forward(&x)?.to_vec()?)
/// })?;
/// assert!((outputs[1][0] - 1.0).abs() < 1e-4 && outputs[0][0] == -outputs[1][0]);
/// # Ok::<(), phalanx_parallel::comm::Error>(())
/// ```
pub struct SyncBatchNorm {
    norm: BatchNorm,
    comm: Comm,
}

impl SyncBatchNorm {
    /// The layer in another's place, with its parameters and buffers. All ranks of `comm` call this for the same layers
    /// in the same order; each gets messages of its own, apart from others of these ranks.
    ///
    /// # Errors
    /// If the communicator refuses.
    pub fn of(norm: &BatchNorm, comm: &Comm) -> Result<SyncBatchNorm> {
        let ranks: Vec<usize> = (0..comm.size()).collect();
        Ok(SyncBatchNorm { norm: norm.clone(), comm: comm.group(&ranks)? })
    }

    /// The layer whose parameters and buffers these are.
    pub fn norm(&self) -> &BatchNorm {
        &self.norm
    }

    fn synchronised(&self, x: &Var) -> Result<Var> {
        begins();
        let moments = Moments::of(x.tensor())?.merged(&self.comm)?;
        if moments.count < 2.0 {
            let why = format!("got {} elements a channel on all ranks together, wanted 2", moments.count);
            return Err(phalanx_nn::Error::invalid("SyncBatchNorm", why).into());
        }
        if !is_recomputing() {
            moments.commit(&self.norm)?;
        }
        let BatchNorm { weight, bias, .. } = &self.norm;
        let [weight, bias] = [weight, bias].map(|p| p.as_ref().map(Parameter::var));
        let eps = self.norm.eps();
        let numbers = BatchNormArgs { training: false, momentum: 0.0, eps };
        let [mean, var] = [&moments.mean, &moments.variance()]
            .map(|values| Tensor::from_slice(values, &[values.len()], x.device()));
        let given = [&mean?, &var?];
        let affine = [&weight, &bias].map(|p| p.as_ref().map(Var::tensor));
        let (y, stats) = kernels::batch_norm(x.tensor(), Some(given), affine[0], affine[1], &numbers)?;
        let inputs: Vec<&Var> = [x].into_iter().chain(&weight).chain(&bias).collect();
        let recorded = |s: &SaveContext<'_>| {
            Ok(Recorded {
                x: s.input(0)?,
                weight: (weight.is_some() && s.needs(0)).then(|| s.input(1)).transpose()?,
                has: [weight.is_some(), bias.is_some()],
                given: given.map(Clone::clone),
                stats,
                count: moments.count,
                eps,
                comm: self.comm.clone(),
            })
        };
        Ok(record("sync_batch_norm", &inputs, y, recorded)?)
    }
}

impl Parameters for SyncBatchNorm {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.norm.visit(path, visitor);
    }
}

impl Module for SyncBatchNorm {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        if !self.norm.is_training() || x.device().is_meta() {
            return self.norm.forward(x);
        }
        self.norm.check(x)?;
        let error = |error: Error| phalanx_nn::Error::from(phalanx_nn::autograd::Error::from(error));
        self.synchronised(x).map_err(error)
    }
}

/// Of [N, C, ...], in f64.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Moments {
    /// Elements of a channel.
    pub(crate) count: f64,
    /// Of each channel.
    pub(crate) mean: Vec<f64>,
    /// Of each channel the sum of the squares of the distances from its mean.
    pub(crate) squares: Vec<f64>,
}

impl Moments {
    /// The moments of this rank's batch, which may have no rows.
    pub(super) fn of(x: &Tensor) -> Result<Moments> {
        let channels = x.shape()[1];
        let count = x.numel().checked_div(channels).unwrap_or(0) as f64;
        if x.numel() == 0 {
            return Ok(Moments { count: 0.0, mean: vec![0.0; channels], squares: vec![0.0; channels] });
        }
        let wide = kernels::cast(x, DType::F64)?;
        let dims: Vec<usize> = (0..x.rank()).filter(|&dim| dim != 1).collect();
        let mean = kernels::mean(&wide, &dims, false)?.to_vec()?;
        let variance: Vec<f64> = kernels::var(&wide, &dims, 0.0, false)?.to_vec()?;
        Ok(Moments { count, mean, squares: variance.into_iter().map(|v| v * count).collect() })
    }

    /// The moments of all ranks' batches together; the same bits on all ranks.
    pub(super) fn merged(&self, comm: &Comm) -> Result<Moments> {
        let numbers: Vec<f64> = [self.count].iter().chain(&self.mean).chain(&self.squares).copied().collect();
        let own = Tensor::from_slice(&numbers, &[numbers.len()], Device::CPU)?;
        let mut all = Tensor::zeros(&[numbers.len() * comm.size()], DType::F64, Device::CPU)?;
        comm.all_gather(&mut all, &own)?;
        let all = all.to_vec::<f64>()?;
        let channels = self.mean.len();
        let of = |numbers: &[f64]| Moments {
            count: numbers[0],
            mean: numbers[1..=channels].to_vec(),
            squares: numbers[1 + channels..].to_vec(),
        };
        let nothing = Moments { count: 0.0, mean: vec![0.0; channels], squares: vec![0.0; channels] };
        Ok(all.chunks_exact(numbers.len()).map(of).fold(nothing, Moments::with))
    }

    /// The moments of both parts together, by Chan, Golub and LeVeque's formula; never a difference of large squares.
    pub(crate) fn with(mut self, part: Moments) -> Moments {
        if self.count == 0.0 || part.count == 0.0 {
            return if self.count == 0.0 { part } else { self };
        }
        let count = self.count + part.count;
        for channel in 0..self.mean.len() {
            let apart = part.mean[channel] - self.mean[channel];
            self.mean[channel] += apart * (part.count / count);
            self.squares[channel] +=
                part.squares[channel] + apart * apart * (self.count * part.count / count);
        }
        self.count = count;
        self
    }

    /// The biased variance, by which a batch is normalised.
    pub(super) fn variance(&self) -> Vec<f64> {
        self.squares.iter().map(|m2| m2 / self.count).collect()
    }

    /// Moves a layer's running statistics towards these, the variance unbiased, and counts a batch.
    pub(crate) fn commit(&self, norm: &BatchNorm) -> Result<()> {
        let momentum = norm.count()?;
        let unbiased: Vec<f64> = self.squares.iter().map(|m2| m2 / (self.count - 1.0)).collect();
        let BatchNorm { running_mean, running_var, .. } = norm;
        for (buffer, new) in [(running_mean, &self.mean), (running_var, &unbiased)] {
            let Some(buffer) = buffer else { continue };
            let held = buffer.tensor();
            let wide = kernels::cast(&held, DType::F64)?;
            let old = if held.device().is_meta() { vec![0.0; held.numel()] } else { wide.to_vec::<f64>()? };
            let moved = |(old, new): (f64, &f64)| (1.0 - momentum) * old + momentum * new;
            let moved: Vec<f64> = old.into_iter().zip(new).map(moved).collect();
            let moved = Tensor::from_slice(&moved, held.shape(), held.device())?;
            buffer.load(&moved)?;
        }
        Ok(())
    }
}

/// What the backward pass needs of the forward pass.
pub(super) struct Recorded {
    pub(super) x: SavedVariable,
    /// Saved only if the gradient of x is wanted.
    pub(super) weight: Option<SavedVariable>,
    /// Whether there is a weight, and a bias.
    pub(super) has: [bool; 2],
    /// Mean and variance of all ranks, [C] each.
    pub(super) given: [Tensor; 2],
    /// The same as the kernels keep them.
    pub(super) stats: Tensor,
    /// Elements of a channel on all ranks.
    pub(super) count: f64,
    pub(super) eps: f64,
    pub(super) comm: Comm,
}

impl Backward for Recorded {
    fn backward(&self, cx: &Cx<'_>) -> autograd::Result<Grads> {
        let x = cx.get(&self.x)?;
        let needs =
            [cx.needs(0), self.has[0] && cx.needs(1), self.has[1] && cx.needs(1 + usize::from(self.has[0]))];
        // The weight may be gone when a split backward comes to its gradient.
        let weight = self.weight.as_ref().filter(|_| needs[0]).map(|w| cx.get(w)).transpose()?;
        let [dx, dw, db] = match cx.create_graph() {
            true => self.composed(&x, weight.as_ref(), cx.dy(), needs)?,
            false => self.computed(x.tensor(), weight.as_ref().map(Var::tensor), cx.dy().tensor(), needs)?,
        };
        let affine = [self.has[0].then_some(dw), self.has[1].then_some(db)];
        Ok([dx].into_iter().chain(affine.into_iter().flatten()).collect())
    }
}

impl Recorded {
    /// With kernels; narrow floats in f32.
    fn computed(
        &self,
        x: &Tensor,
        weight: Option<&Tensor>,
        dy: &Tensor,
        needs: [bool; 3],
    ) -> autograd::Result<[Option<Var>; 3]> {
        let dtype = x.dtype();
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let [x, dy] = [kernels::cast(x, wide)?, kernels::cast(dy, wide)?];
        let weight = weight.map(|w| kernels::cast(w, wide)).transpose()?;
        let numbers = BatchNormArgs { training: false, momentum: 0.0, eps: self.eps };
        let own = [needs[0], needs[0] || needs[1], needs[0] || needs[2]];
        let [scaled, along, sum] =
            kernels::batch_norm_backward(&x, &self.stats, weight.as_ref(), &dy, &numbers, own)?;
        let dx = match (scaled, &along, &sum) {
            (Some(scaled), Some(along), Some(sum)) => {
                Some(kernels::sub(&scaled, &self.shared(&x, weight.as_ref(), [along, sum])?)?)
            }
            _ => None,
        };
        let narrow = |grad: Option<Tensor>, wanted: bool| -> autograd::Result<Option<Var>> {
            let grad = grad.filter(|_| wanted).map(|grad| kernels::cast(&grad, dtype)).transpose()?;
            Ok(grad.map(Var::new))
        };
        Ok([narrow(dx, needs[0])?, narrow(along, needs[1])?, narrow(sum, needs[2])?])
    }

    /// `r w (sum(dy) / n + xhat sum(dy xhat) / n)`, which is a normalisation with another weight and bias.
    fn shared(&self, x: &Tensor, weight: Option<&Tensor>, own: [&Tensor; 2]) -> autograd::Result<Tensor> {
        let values =
            |t: &Tensor| -> autograd::Result<Vec<f64>> { Ok(kernels::cast(t, DType::F64)?.to_vec()?) };
        let (mut sums, channels) = (values(own[0])?, x.shape()[1]);
        sums.extend(values(own[1])?);
        let mut sums = Tensor::from_slice(&sums, &[2 * channels], Device::CPU)?;
        let failed = |error: crate::comm::Error| autograd::Error::from(Error::from(error));
        self.comm.all_reduce(&mut sums, Reduction::Sum).map_err(failed)?;
        let sums = sums.to_vec::<f64>()?;
        let weight = weight.map_or_else(|| Ok(vec![1.0; channels]), values)?;
        let variance = values(&self.given[1])?;
        let scaled = |which: usize| {
            let value = |c: usize| {
                sums[which * channels + c] * weight[c] / (self.count * (variance[c] + self.eps).sqrt())
            };
            let values: Vec<f64> = (0..channels).map(value).collect();
            kernels::cast(&Tensor::from_slice(&values, &[channels], x.device())?, x.dtype())
        };
        let (along, shift) = (scaled(0)?, scaled(1)?);
        let numbers = BatchNormArgs { training: false, momentum: 0.0, eps: self.eps };
        let given = [&self.given[0], &self.given[1]];
        Ok(kernels::batch_norm(x, Some(given), Some(&along), Some(&shift), &numbers)?.0)
    }

    /// Of operations that can be differentiated again.
    fn composed(
        &self,
        x: &Var,
        w: Option<&Var>,
        dy: &Var,
        needs: [bool; 3],
    ) -> autograd::Result<[Option<Var>; 3]> {
        let (channels, rank) = (x.shape()[1], x.rank());
        let affine: Vec<usize> = (0..rank).map(|d| if d == 1 { channels } else { 1 }).collect();
        let mean = |v: &Var| -> autograd::Result<Var> {
            let sums = SumOverRanks(self.comm.clone()).apply(&[&v.sum_to(&affine)?])?;
            sums[0].mul_scalar(1.0 / self.count)
        };
        let centred = x.sub(&mean(x)?)?;
        let inverse = mean(&centred.mul(&centred)?)?.add_scalar(self.eps)?.rsqrt()?;
        let hat = centred.mul(&inverse)?;
        let dx = || {
            let g = w.map_or_else(|| Ok(dy.clone()), |w| dy.mul(&w.reshape_to(&affine)?))?;
            let along = hat.mul(&mean(&g.mul(&hat)?)?)?;
            g.sub(&mean(&g)?)?.sub(&along)?.mul(&inverse)
        };
        let flat = |grad: Var| grad.sum_to(&affine)?.reshape_to(&[channels]);
        Ok([
            needs[0].then(dx).transpose()?,
            needs[1].then(|| flat(dy.mul(&hat)?)).transpose()?,
            needs[2].then(|| flat(dy.clone())).transpose()?,
        ])
    }
}

/// `y = sum of x over the ranks`, on each; `dx = sum of dy over the ranks`, since every rank's `y` has every rank's `x`.
pub(super) struct SumOverRanks(pub(super) Comm);

impl Function for SumOverRanks {
    fn name(&self) -> &'static str {
        "sum_over_ranks"
    }

    fn forward(&self, inputs: &[&Tensor]) -> autograd::Result<Vec<Tensor>> {
        let mut sum = inputs[0].copy()?;
        let failed = |error: crate::comm::Error| autograd::Error::from(Error::from(error));
        self.0.all_reduce(&mut sum, Reduction::Sum).map_err(failed)?;
        Ok(vec![sum])
    }

    fn backward(&self, cx: &Cx<'_>, _: &[SavedVariable]) -> autograd::Result<Grads> {
        grads1(SumOverRanks(self.0.clone()).apply(&[cx.dy()])?.swap_remove(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_merge_to_the_whole_and_small_deviations_of_large_means_stay() {
        let values: Vec<f64> = (0..12).map(|i| 1e6 + 1e-3 * f64::from(i * i % 7)).collect();
        let of = |values: &[f64]| {
            Moments::of(&Tensor::from_slice(values, &[values.len(), 1], Device::CPU).unwrap()).unwrap()
        };
        let whole = of(&values);
        for cuts in [vec![0, 12, 12], vec![0, 0, 5, 12], vec![0, 1, 2, 9, 9, 12]] {
            let parts = cuts.windows(2).map(|cut| of(&values[cut[0]..cut[1]]));
            let merged = parts.reduce(Moments::with).unwrap();
            assert_eq!(merged.count, 12.0);
            assert!((merged.mean[0] - whole.mean[0]).abs() < 1e-9);
            assert!((merged.squares[0] / whole.squares[0] - 1.0).abs() < 1e-6, "{merged:?}, {whole:?}");
        }
    }
}
