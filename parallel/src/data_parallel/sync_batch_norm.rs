//! [`SyncBatchNorm`]: normalisation over the batch of all ranks.
//!
//! For `x` [N, C, ...] on each rank: `y = (x - mean) / sqrt(var + eps) * w + b` with each channel's mean and variance over
//! the elements of all ranks. Derivative, with `xhat` the normalised channel, `r` its inverse deviation, `g = dy w` and
//! sums over all ranks' `n` elements of a channel: `dx = r (g - sum(g) / n - xhat sum(g xhat) / n)`. `dw = sum(dy xhat)` and
//! `db = sum(dy)` are this rank's alone, as of any parameter: [`super::Ddp`] adds them.
//!
//! Two messages: forward, each rank's count, means and sums of squared deviations, merged in order of the ranks; backward,
//! the two sums. All ranks take part in both, those without rows too. Both stay on the batch's device, and the host waits for
//! neither, unless a rank has fewer than two elements a channel.
//! Source: Ioffe, Szegedy: Batch Normalization (2015).

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{
    self, Backward, BatchNorm as BatchNormArgs, Cx, Function, Grads, SaveContext, SavedVariable, Var, begins,
    grads1, record,
};
use phalanx_nn::{BatchNorm, Buffer, Entry, Module, Parameter, Parameters, Sequential};
use phalanx_tensor::{DType, Tensor};

use super::moments::DeviceMoments;
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

    /// Replaces each [`BatchNorm`] of the sequence, in inner sequences too, by a [`SyncBatchNorm`] (torch's
    /// `convert_sync_batchnorm`), and returns how many there were. Parameters, buffers and their names stay. All ranks of `comm` call it
    /// with models of the same layers.
    ///
    /// # Errors
    /// If the communicator refuses; if a norm with running statistics is a field of a module of another type, which cannot be replaced
    /// from outside: the error names its path, and that module is to be made with [`SyncBatchNorm::of`].
    pub fn convert(layers: &mut Sequential, comm: &Comm) -> Result<usize> {
        let mut converted: Vec<Buffer> = Vec::new();
        let mut replaced = 0;
        layers.replace_layers::<Error>(&mut |layer| {
            let already = layer.downcast_ref::<SyncBatchNorm>().map(SyncBatchNorm::norm);
            let norm = layer.downcast_ref::<BatchNorm>();
            converted.extend(norm.or(already).and_then(|norm| norm.running_mean.clone()));
            replaced += usize::from(norm.is_some());
            norm.map(|norm| Ok(Box::new(SyncBatchNorm::of(norm, comm)?) as Box<dyn Module>)).transpose()
        })?;
        let mut left = None;
        layers.visit("", &mut |path, entry| {
            if let (Entry::Buffer(buffer), Some(norm)) = (entry, path.strip_suffix("running_mean"))
                && !converted.iter().any(|known| known.tensor().shares_storage(&buffer.tensor()))
            {
                left.get_or_insert_with(|| norm.trim_end_matches('.').to_string());
            }
        });
        match left {
            None => Ok(replaced),
            Some(path) => Err(phalanx_nn::Error::invalid(
                "SyncBatchNorm::convert",
                format!(
                    "the batch norm {path:?} is inside a module that is no `Sequential`: make that module with \
                     `SyncBatchNorm::of(&norm, comm)`"
                ),
            )
            .into()),
        }
    }

    /// The layer whose parameters and buffers these are.
    pub fn norm(&self) -> &BatchNorm {
        &self.norm
    }

    fn synchronised(&self, x: &Var) -> Result<Var> {
        begins();
        let moments = DeviceMoments::of(x.tensor())?.merged(&self.comm)?;
        // A rank with two elements knows that they suffice, without a wait for the other ranks' number.
        if x.numel() < 2 * x.shape()[1].max(1) {
            let count: f64 = moments.count()?.item()?;
            if count < 2.0 {
                let why = format!("got {count} elements a channel on all ranks together, wanted 2");
                return Err(phalanx_nn::Error::invalid("SyncBatchNorm", why).into());
            }
        }
        moments.commit(&self.norm)?;
        let BatchNorm { weight, bias, .. } = &self.norm;
        let [weight, bias] = [weight, bias].map(|p| p.as_ref().map(Parameter::var));
        let eps = self.norm.eps();
        let numbers = BatchNormArgs { training: false, momentum: 0.0, eps };
        let given = [&moments.mean()?, &moments.variance()?];
        let count = moments.count()?;
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
                count: count.clone(),
                eps,
                comm: self.comm.clone(),
            })
        };
        Ok(record("sync_batch_norm", &inputs, y, recorded)?)
    }
}

phalanx_nn::parameters!(SyncBatchNorm { norm = "" });

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
    /// Elements of a channel on all ranks: [1].
    pub(super) count: Tensor,
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
        let channels = x.shape()[1];
        let mut sums = Tensor::empty(&[2, channels], DType::F64, x.device())?;
        for (which, own) in own.into_iter().enumerate() {
            kernels::copy_(&mut sums.select(0, which)?, &kernels::cast(own, DType::F64)?)?;
        }
        let failed = |error: crate::comm::Error| autograd::Error::from(Error::from(error));
        self.comm.all_reduce(&mut sums, Reduction::Sum).map_err(failed)?;
        let deviation = kernels::sqrt(&kernels::add_scalar(&self.given[1], self.eps.into())?)?;
        let divisor = kernels::mul(&deviation, &self.count)?;
        let weight = weight.map(|weight| kernels::cast(weight, DType::F64)).transpose()?;
        let scaled = |which: usize| {
            let sum = sums.select(0, which)?;
            let sum = weight.as_ref().map_or(Ok(sum.clone()), |weight| kernels::mul(&sum, weight))?;
            kernels::cast(&kernels::div(&sum, &divisor)?, x.dtype())
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
        let part = Var::new(kernels::cast(&kernels::rdiv_scalar(&self.count, 1.0.into())?, x.dtype())?);
        let affine: Vec<usize> = (0..rank).map(|d| if d == 1 { channels } else { 1 }).collect();
        let mean = |v: &Var| -> autograd::Result<Var> {
            let sums = SumOverRanks(self.comm.clone()).apply(&[&v.sum_to(&affine)?])?;
            sums[0].mul(&part)
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
