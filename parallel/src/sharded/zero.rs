//! [`Zero`]: data parallelism in which every rank keeps a share of the state.

use std::sync::Arc;

use phalanx_nn::autograd::{HookHandle, Var};
use phalanx_nn::{Parameter, Squares, UnitHooksHandle, norm_of};
use phalanx_tensor::Tensor;

use super::build::Source;
use super::core::Core;
use super::{Gathered, norm};
use crate::Result;
use crate::comm::Traffic;
use crate::data_parallel::{NoSync, Synchronise, broadcast};

/// A model whose optimizer state, gradients and parameters are spread over a group of ranks, each of which computes on its
/// share of the batch. The bits are those of [`Ddp`](crate::data_parallel::Ddp) and of one device.
///
/// When it is dropped, the model keeps its values; in [`Stage::Parameters`](super::Stage) it has none then, unless they are
/// [gathered](Zero::gathered), nor can it be given to another before it has: take a state dict first.
///
/// What is gathered and freed together are the model's [units](phalanx_nn::Unit). Parameters outside all units are never
/// freed, as in ZeRO-2. An optimizer is built over [`Zero::parameters`], and [`Zero::updated`] follows its step.
///
/// ```
/// use phalanx_nn::{Group, LinearConfig, Module, Rule, Scope, Sequential, Sgd, Unit};
/// use phalanx_parallel::{Result, launch, sharded::{Stage, Zero, ZeroConfig}};
/// use phalanx_tensor::DType;
///
/// let values = launch::threads(2, |rank| -> Result<Vec<f32>> {
///     let linear = LinearConfig::new(1, 1).init(&Scope::new(7, DType::F32, rank.device()))?;
///     let model = Sequential::new().with(Unit::new(std::sync::Arc::new(linear)));
///     let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(Stage::Parameters))?;
///     let mut optimizer = Sgd::default().init(vec![Group::new(zero.parameters(), 0.5)])?;
///     let x = phalanx_nn::autograd::Var::from_slice(&[1.0 + rank.rank() as f32], &[1, 1], rank.device())?;
///     zero.backward(&model.forward(&x)?.sum_all()?)?;
///     let grads = zero.parameters().iter().map(|p| Ok(p.grad()?.unwrap().to_vec::<f32>()?)).collect::<Result<Vec<_>>>()?;
///     optimizer.step()?;
///     zero.updated()?;
///     Ok(grads.concat())
/// });
/// assert_eq!(values.unwrap().concat(), [3.0, 2.0]); // the weight's gradient on one rank, the bias's on the other
/// ```
pub struct Zero {
    pub(super) core: Arc<Core>,
    pub(super) entries: Vec<(String, Source)>,
    pub(super) frozen: Vec<Parameter>,
    pub(super) synchronise: Synchronise,
    pub(super) hooks: Vec<HookHandle>,
    pub(super) units: Vec<UnitHooksHandle>,
}

impl Zero {
    /// What an optimizer is built over: this rank's parts of the trained parameters, under their names. Their gradients
    /// are those of all ranks, added.
    pub fn parameters(&self) -> Vec<Parameter> {
        let state = self.core.lock();
        state.groups.iter().flat_map(|g| &g.flats).flat_map(|f| f.pieces.iter().cloned()).collect()
    }

    /// Forgets the gradients of [`Zero::parameters`], as an optimizer's `zero_grad` does, and also those that passes under
    /// [`Zero::no_sync`] have left on this rank.
    ///
    /// # Errors
    /// If a gradient's buffer cannot be replaced.
    pub fn zero_grad(&self) -> Result<()> {
        self.core.zero_grad()
    }

    /// What [`Zero::backward`] does before the backward pass, for those who run that themselves.
    ///
    /// # Errors
    /// If parameters were changed and [`Zero::updated`] was not called; if one is trained that was frozen when this was
    /// made; if an earlier error has ended the run.
    pub fn begin(&self) -> Result<()> {
        if let Some(error) = self.core.ranks.all.failure() {
            return Err(error.seen_in(|| "the beginning of a backward pass".into()).into());
        }
        if let Some(parameter) = self.frozen.iter().find(|p| p.is_trained()) {
            let why = "is trained now, and was frozen when `Zero` was made; make it anew";
            return Err(phalanx_nn::Error::invalid(parameter.name(), why).into());
        }
        self.core.check_fresh()
    }

    /// Runs backward from a loss of one element; afterwards, unless [`Zero::no_sync`] is in force, the parameters that
    /// [`Zero::parameters`] gives have the gradients of all ranks added to theirs. An error here ends the run of all ranks.
    ///
    /// # Errors
    /// As [`Var::backward`] and [`Zero::finish`].
    pub fn backward(&self, loss: &Var) -> Result<()> {
        let done = self.begin().and_then(|()| Ok(loss.backward()?));
        done.and_then(|()| self.finish()).inspect_err(|error| self.core.ranks.all.fail(&error.to_string()))
    }

    /// What [`Zero::backward`] does after the backward pass, for those who run that themselves: sends what is left, waits
    /// for everything, frees gathered parameters, gives all ranks rank 0's buffers ([`ZeroConfig::broadcast_buffers`](super::ZeroConfig)).
    ///
    /// # Errors
    /// If a parameter got no gradient (see [`ZeroConfig::find_unused`](super::ZeroConfig)), or as [`crate::comm::Pending::wait`].
    pub fn finish(&self) -> Result<()> {
        match self.synchronise.is_on() {
            true => self.core.finish().and_then(|()| self.broadcast_buffers()),
            false => self.core.free(),
        }
    }

    fn broadcast_buffers(&self) -> Result<()> {
        let buffer = |(_, source): &(String, Source)| match source {
            Source::Buffer(buffer) if self.core.config.broadcast_buffers => Some(buffer.tensor()),
            _ => None,
        };
        let buffers: Vec<Tensor> = self.entries.iter().filter_map(buffer).collect();
        broadcast::together(&buffers, 0, &self.core.ranks.all)
    }

    /// While the result lives, backward passes only accumulate on this rank, unspread: for all micro-batches but the last.
    /// What counts is whether it lives when *backward* runs.
    pub fn no_sync(&self) -> NoSync {
        self.synchronise.off()
    }

    /// Each trained parameter's sum of squared gradients of all ranks, the same bits as [`phalanx_nn::grad_squares`] of the
    /// whole gradients. All ranks call it.
    ///
    /// # Errors
    /// If a gradient cannot be read, or as [`crate::comm::Pending::wait`].
    pub fn grad_squares(&self) -> Result<Squares> {
        norm::grad_squares(&self.core)
    }

    /// The Euclidean norm of all ranks' gradients, the same bits as [`phalanx_nn::grad_norm`] of the whole gradients. All
    /// ranks call it.
    ///
    /// # Errors
    /// As [`Zero::grad_squares`].
    pub fn grad_norm(&self) -> Result<f64> {
        Ok(norm_of(&self.grad_squares()?)?)
    }

    /// To be called by all ranks after the optimizer's step: gives all ranks what each has updated (in ZeRO-1 and 2).
    ///
    /// # Errors
    /// As [`crate::comm::Pending::wait`].
    pub fn updated(&self) -> Result<()> {
        self.core.updated(false)
    }

    /// Lets the model hold all its values until the result is dropped: to evaluate, generate or inspect it outside of its
    /// units, or to run several passes with all values at hand. All ranks call it, and drop it at the same place.
    ///
    /// # Errors
    /// As [`crate::comm::Pending::wait`].
    pub fn gathered(&self) -> Result<Gathered> {
        self.core.hold()?;
        Ok(Gathered(self.core.clone()))
    }

    /// What this rank has sent for values and gradients so far; exchanging norms and state dicts counts too.
    pub fn traffic(&self) -> Traffic {
        let (shard, replicas) = (self.core.ranks.shard.traffic(), self.core.ranks.replicas.traffic());
        Traffic { calls: shard.calls + replicas.calls, bytes: shard.bytes + replicas.bytes }
    }

    /// How many elements of the trained parameters each rank that shares a copy owns.
    pub fn shares(&self) -> Vec<usize> {
        let state = self.core.lock();
        let mut shares = vec![0; self.core.ranks.shard.size()];
        for flat in state.groups.iter().flat_map(|g| &g.flats).filter(|f| f.trained) {
            shares.iter_mut().zip(flat.cuts.counts()).for_each(|(share, count)| *share += count);
        }
        shares
    }
}

impl Drop for Zero {
    fn drop(&mut self) {
        self.hooks.iter().for_each(HookHandle::remove);
        self.units.iter().for_each(UnitHooksHandle::remove);
        self.core.abandon();
    }
}
