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

mod moments;
mod recorded;
mod sum_over_ranks;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{BatchNorm as Numbers, Saver, Var, begins, is_recomputing, record};
use phalanx_nn::{BatchNorm, Entry, Module, Parameter, Parameters};
use phalanx_tensor::Tensor;

use crate::comm::Comm;
use crate::{Error, Result};
pub(crate) use moments::Moments;
use recorded::Recorded;

/// A [`BatchNorm`] whose statistics in training are those of the batches of all ranks together, exactly: the same as of
/// one device with the whole batch, whatever share a rank has. Otherwise it is that layer, with its names.
///
/// ```
/// # use phalanx_nn::{BatchNormConfig, Module, Scope, autograd::Var};
/// # use phalanx_parallel::{Result, data_parallel::SyncBatchNorm, launch};
/// # use phalanx_tensor::{Context, DType};
/// let outputs = launch::threads(2, |rank| -> Result<Vec<f64>> {
///     let norm = BatchNormConfig::new(1).init_1d(&Scope::new(7, DType::F64, rank.device()))?;
///     let norm = SyncBatchNorm::of(&norm, rank.comm())?;
///     let _train = Context::with(|c| c.train = true);
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
        let numbers = Numbers { training: false, momentum: 0.0, eps };
        let [mean, var] = [&moments.mean, &moments.variance()]
            .map(|values| Tensor::from_slice(values, &[values.len()], x.device()));
        let given = [&mean?, &var?];
        let affine = [&weight, &bias].map(|p| p.as_ref().map(Var::tensor));
        let (y, stats) = kernels::batch_norm(x.tensor(), Some(given), affine[0], affine[1], &numbers)?;
        let inputs: Vec<&Var> = [x].into_iter().chain(&weight).chain(&bias).collect();
        let recorded = |s: &Saver<'_>| {
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
