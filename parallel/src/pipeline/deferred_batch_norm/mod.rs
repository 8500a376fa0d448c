//! [`DeferredBatchNorm`]: running statistics of the mini-batch, though only micro-batches are seen.
//!
//! ```text
//! micro-batch   0          1          2 = the last
//! normalised    by its own statistics, each
//! pending       m0         m0 + m1    m0 + m1 + m2  -->  running mean and variance move, once
//! ```
//! Moments are merged in f64 in the order of the micro-batches (Chan, Golub, LeVeque: Updating formulae, 1979), never as a
//! difference of large squares, and the variance that is kept is the unbiased one, as of any [`BatchNorm`].

mod convert;

use std::sync::{Mutex, MutexGuard, PoisonError};

use phalanx_nn::autograd::{BatchNorm as Numbers, Var, is_recomputing};
use phalanx_nn::{BatchNorm, Entry, Module, Parameter, Parameters};
use phalanx_tensor::{Category, Context, DType, Tensor};

use super::MicroBatch;
use crate::data_parallel::Moments;
use crate::{Error, Result};

pub use convert::convert;

/// A [`BatchNorm`] that normalises each micro-batch by itself and moves its running statistics once for the mini-batch,
/// towards those of all its rows. Otherwise it is that layer, with its names. Source: torchgpipe (arXiv:2004.09910).
///
/// It learns from [`MicroBatch::current`] which part of how many it sees; a pass of which nothing is said is a whole batch,
/// for which it is a `BatchNorm` to the bit. A forward pass that is repeated for the sake of its values counts nothing. After a
/// mini-batch that failed, the next one begins anew.
///
/// ```
/// # use phalanx_nn::{BatchNormConfig, Module, Scope, autograd::Var};
/// # use phalanx_parallel::pipeline::{DeferredBatchNorm, MicroBatch};
/// # use phalanx_tensor::{DType, Device};
/// let norm = BatchNormConfig::new(1).init_1d(&Scope::new(7, DType::F64, Device::CPU))?;
/// let deferred = DeferredBatchNorm::of(&norm);
/// for (index, rows) in [[0.0, 1.0], [2.0, 3.0]].into_iter().enumerate() {
///     let _part = MicroBatch { index, count: 2 }.enter();
///     deferred.forward(&Var::from_slice(&rows, &[2, 1], Device::CPU)?)?;
/// }
/// let mean = norm.running_mean.as_ref().map(|mean| mean.tensor().item::<f64>());
/// assert_eq!(mean.transpose()?, Some(0.1 * 1.5));
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
pub struct DeferredBatchNorm {
    norm: BatchNorm,
    pending: Mutex<Pending>,
}

/// Of the micro-batches of this mini-batch seen so far.
#[derive(Default)]
struct Pending {
    seen: usize,
    moments: Option<Moments>,
}

impl DeferredBatchNorm {
    /// The layer in another's place, with its parameters and buffers.
    pub fn of(norm: &BatchNorm) -> DeferredBatchNorm {
        DeferredBatchNorm { norm: norm.clone(), pending: Mutex::default() }
    }

    /// The layer whose parameters and buffers these are.
    pub fn norm(&self) -> &BatchNorm {
        &self.norm
    }

    /// The output, normalised by the statistics of `x` alone, and these.
    fn normalised(&self, x: &Var) -> Result<(Var, Moments)> {
        self.norm.check(x)?;
        let channels = x.shape()[1];
        let zeros = || {
            let _category = Context::with(|c| c.category = Category::Buffers);
            Tensor::zeros(&[channels], DType::F64, x.device())
        };
        // Running statistics that move the whole way are the batch's own.
        let [mut mean, mut var] = [zeros()?, zeros()?];
        let numbers = Numbers { training: true, momentum: 1.0, eps: self.norm.eps() };
        let [weight, bias] = [&self.norm.weight, &self.norm.bias].map(|p| p.as_ref().map(Parameter::var));
        let y = x.batch_norm(Some([&mut mean, &mut var]), weight.as_ref(), bias.as_ref(), &numbers)?;
        let values = |t: Tensor| match t.device().is_meta() {
            true => Ok(vec![0.0; channels]),
            false => t.to_vec::<f64>(),
        };
        let count = (x.numel() / channels) as f64;
        let squares = values(var)?.into_iter().map(|unbiased| unbiased * (count - 1.0)).collect();
        Ok((y, Moments { count, mean: values(mean)?, squares }))
    }

    /// Adds a micro-batch's moments to those before it. The last one moves the running statistics.
    fn track(&self, moments: Moments) -> Result<()> {
        let MicroBatch { index, count } = MicroBatch::current();
        let mut pending: MutexGuard<'_, Pending> =
            self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if index == 0 {
            *pending = Pending::default();
        }
        if index != pending.seen || index >= count {
            let why = format!(
                "got micro-batch {index} of {count}, wanted {} (each once, in ascending order)",
                pending.seen
            );
            return Err(Error::Config(format!("DeferredBatchNorm: {why}")));
        }
        let moments = match pending.moments.take() {
            Some(before) => before.with(moments),
            None => moments,
        };
        pending.seen += 1;
        if pending.seen < count {
            pending.moments = Some(moments);
            return Ok(());
        }
        *pending = Pending::default();
        moments.commit(&self.norm)
    }
}

impl Parameters for DeferredBatchNorm {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.norm.visit(path, visitor);
    }
}

impl Module for DeferredBatchNorm {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        let whole = MicroBatch::current() == MicroBatch::WHOLE;
        if whole || !self.norm.is_training() || self.norm.running_mean.is_none() {
            return self.norm.forward(x);
        }
        let error = |error: Error| phalanx_nn::Error::from(phalanx_nn::autograd::Error::from(error));
        let (y, moments) = self.normalised(x).map_err(error)?;
        if !is_recomputing() {
            self.track(moments).map_err(error)?;
        }
        Ok(y)
    }
}

#[cfg(test)]
mod tests;
