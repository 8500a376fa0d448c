//! [`Ddp`]: gradients added over the ranks while backward runs.
//!
//! Each gradient lies in a view of its bucket's buffer, so that what is sent is what the optimizer reads. A hook behind
//! every parameter counts arrivals; a full bucket is launched when those before it were. Gradients are only added: a
//! loss divided by the tokens of the *global* batch needs no division after ([`Average::Sum`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_nn::autograd::{HookHandle, Var};
use phalanx_nn::{Entry, Parameter, Parameters};
use phalanx_tensor::DType;

use super::hook::{AllReduce, BucketHook};
use super::reducer::Reducer;
use super::{Buckets, same};
use crate::comm::Comm;
use crate::{Error, Result};

/// What the ranks' gradients are combined to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Average {
    /// Their sum.
    #[default]
    Sum,
    /// Their mean: each is divided by the number of ranks, then they are added (PyTorch's).
    Mean,
}

/// How gradients are added.
#[derive(Clone, Debug)]
pub struct DdpConfig {
    /// The first bucket's size in bytes.
    pub first_bucket_bytes: usize,
    /// A later bucket's.
    pub bucket_bytes: usize,
    /// Sum or mean.
    pub average: Average,
    /// Whether parameters may get no gradient. Those that got one on another rank count as zero here; those that got
    /// none anywhere keep none. Without it, a missing gradient is an error.
    pub find_unused: bool,
    /// The gradients' dtype; `None`: each parameter's own.
    pub grad_dtype: Option<DType>,
    /// How a bucket is added over the ranks.
    pub hook: Arc<dyn BucketHook>,
}

impl Default for DdpConfig {
    fn default() -> DdpConfig {
        DdpConfig {
            first_bucket_bytes: Buckets::FIRST_BYTES,
            bucket_bytes: Buckets::BYTES,
            average: Average::Sum,
            find_unused: false,
            grad_dtype: None,
            hook: Arc::new(AllReduce),
        }
    }
}

/// A model whose gradients are added over a group of ranks, each of which computes on its share of the batch.
///
/// ```
/// use phalanx_nn::{LinearConfig, Module, Parameters, Scope};
/// use phalanx_parallel::{Result, data_parallel::{Ddp, DdpConfig}, launch};
/// use phalanx_tensor::DType;
///
/// let grads = launch::threads(2, |rank| -> Result<Vec<f32>> {
///     let model = LinearConfig::new(1, 1).init(&Scope::new(7, DType::F32, rank.device()))?;
///     let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
///     let x = phalanx_nn::autograd::Var::from_slice(&[1.0 + rank.rank() as f32], &[1, 1], rank.device())?;
///     ddp.backward(&model.forward(&x)?.sum_all()?)?;
///     Ok(model.parameters()[0].grad()?.unwrap().to_vec()?)
/// });
/// assert_eq!(grads.unwrap(), [[3.0], [3.0]]);
/// ```
pub struct Ddp {
    reducer: Arc<Reducer>,
    buffers: Vec<phalanx_nn::Buffer>,
    comm: Comm,
    synchronise: Arc<AtomicBool>,
    hooks: Vec<HookHandle>,
}

impl Ddp {
    /// Gives all ranks rank 0's values and takes the trained parameters' gradients in hand. All ranks of `comm` call it
    /// with models of the same parameters.
    ///
    /// # Errors
    /// If the ranks hold different models, which are named; if memory is short, or as [`crate::comm::Pending::wait`].
    pub fn new(model: &(impl Parameters + ?Sized), comm: Comm, config: DdpConfig) -> Result<Ddp> {
        same::check(model, &comm)?;
        let mut buffers = Vec::new();
        model.visit("", &mut |_, entry| {
            if let Entry::Buffer(buffer) = entry {
                buffers.push(buffer.clone());
            }
        });
        let parameters: Vec<Parameter> = model.parameters();
        for parameter in &parameters {
            comm.broadcast(&mut parameter.tensor(), 0)?;
        }
        let trained: Vec<Parameter> = parameters.into_iter().filter(Parameter::is_trained).collect();
        let reducer = Arc::new(Reducer::new(trained, comm.clone(), config)?);
        let synchronise = Arc::new(AtomicBool::new(true));
        let mut hooks = Vec::new();
        for (number, parameter) in reducer.parameters().iter().enumerate() {
            for (site, leaf) in parameter.leaves().iter().enumerate() {
                // The reducer holds the parameters and they the hooks, so the hooks hold it weakly.
                let (reducer, synchronise) = (Arc::downgrade(&reducer), synchronise.clone());
                hooks.push(leaf.on_accumulate(move |_| {
                    let Some(reducer) = reducer.upgrade() else { return Ok(()) };
                    Ok(reducer.arrived(number, site, synchronise.load(Ordering::Relaxed))?)
                }));
            }
        }
        let ddp = Ddp { reducer, buffers, comm, synchronise, hooks };
        ddp.broadcast_buffers()?;
        Ok(ddp)
    }

    /// Runs backward from a loss of one element; afterwards, unless [`Ddp::no_sync`] is in force, the parameters'
    /// gradients are those of all ranks, added. An error here ends the run of all ranks with it.
    ///
    /// Gradients are to be forgotten (`zero_grad`) before the next pass that synchronises: a sum of all ranks that is
    /// still there would be added once a rank.
    ///
    /// # Errors
    /// As [`Var::backward`] and [`Ddp::finish`].
    pub fn backward(&self, loss: &Var) -> Result<()> {
        let done = loss.backward().map_err(Error::from);
        done.and_then(|()| self.finish()).inspect_err(|error| self.comm.fail(&error.to_string()))
    }

    /// What [`Ddp::backward`] does after the backward pass, for those who run that themselves: launches what is left,
    /// waits for all buckets.
    ///
    /// # Errors
    /// If a parameter got no gradient (see [`DdpConfig::find_unused`]), or as [`crate::comm::Pending::wait`].
    pub fn finish(&self) -> Result<()> {
        match self.synchronise.load(Ordering::Relaxed) {
            true => self.reducer.finish(),
            false => Ok(()),
        }
    }

    /// While the result lives, backward passes only accumulate on this rank: for all micro-batches but the last.
    /// What counts is whether it lives when *backward* runs.
    pub fn no_sync(&self) -> NoSync {
        NoSync::new(&self.synchronise)
    }

    /// Gives all ranks rank 0's buffers (running statistics), as before a forward pass in training.
    ///
    /// # Errors
    /// As [`crate::comm::Pending::wait`].
    pub fn broadcast_buffers(&self) -> Result<()> {
        self.buffers.iter().try_for_each(|buffer| Ok(self.comm.broadcast(&mut buffer.tensor(), 0)?))
    }

    /// The buckets that gradients travel in now, as names of parameters.
    pub fn buckets(&self) -> Vec<Vec<String>> {
        self.reducer.buckets()
    }
}

impl Drop for Ddp {
    fn drop(&mut self) {
        self.hooks.iter().for_each(HookHandle::remove);
    }
}

/// See [`Ddp::no_sync`].
#[must_use = "gradients are added again when it is dropped"]
pub struct NoSync {
    flag: Arc<AtomicBool>,
    before: bool,
}

impl NoSync {
    pub(crate) fn new(synchronise: &Arc<AtomicBool>) -> NoSync {
        NoSync { before: synchronise.swap(false, Ordering::Relaxed), flag: synchronise.clone() }
    }
}

impl Drop for NoSync {
    fn drop(&mut self) {
        self.flag.store(self.before, Ordering::Relaxed);
    }
}
