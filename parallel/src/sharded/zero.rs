//! [`Zero`]: data parallelism in which every rank keeps a shard of the state (torch: FSDP, `ZeroRedundancyOptimizer`). It implements
//! [`DataParallel`]. `wrap.rs` makes it, [`ZeroCore`] does the work; here are the calls of a program.

use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::{HookHandle, Leaf, Var};
use phalanx_nn::{Buffer, Parameter, ParameterOwner, Parameters, Peers, Squares, UnitHooksHandle, norm_of};
use phalanx_tensor::{Device, Tensor, unpoisoned};

use super::core::{Place, ZeroCore};
use super::flat_parameter::{FlatParameter, Member};
use super::{Gathered, norm};
use crate::comm::{Comm, Traffic};
use crate::data_parallel::{DataParallel, Entries, NoSync, Synchronise, consistency};
use crate::sharded_tensor::ShardedTensor;
use crate::{Error, Result, WholeParameters};

/// A model whose optimizer state, gradients and parameters are sharded over a group of ranks, each of which
/// computes on its part of the batch. The bits are those of [`Ddp`](crate::data_parallel::Ddp) and of one device.
///
/// Dropping it leaves the model with its values in ZeRO-1 and 2. In ZeRO-3 ([`ZeroStage::Parameters`](super::ZeroStage))
/// the model then has no values, because each rank had only its shard, and other wrappers refuse it: take
/// [`Zero::full_state_dict`] first, or drop it while the result of [`Zero::gathered`] lives.
///
/// The parameters of a [unit](phalanx_nn::WrappedUnit) are gathered and freed together, and so are all parameters
/// outside units (FSDP's root): these are gathered before the first unit computes, or when one of them is first
/// used, and freed by [`Zero::finish`]; after an evaluation, which has no backward pass, by the next of
/// [`Zero::finish`] and [`Zero::updated`], or when the result of [`Zero::gathered`] is dropped. If a parameter is
/// used outside its unit's module, the whole unit is treated like these from then on.
///
/// An optimizer is built over [`Zero::parameters`], and [`Zero::updated`] follows its step. One over the model's own parameters is
/// refused; so are `loss.backward()`, and reading or saving the model's own tensors where they are spread. After
/// parameters were added, frozen, unfrozen or replaced, make a new `Zero` (in [`ZeroStage::Parameters`](super::ZeroStage) of a model that
/// has its values).
///
/// ```
/// use phalanx_nn::{Group, LinearConfig, Module, Rule, Scope, Sequential, Sgd, WrappedUnit};
/// use phalanx_parallel::{Result, launch, sharded::{Zero, ZeroConfig, ZeroStage}};
/// use phalanx_tensor::DType;
///
/// let values = launch::threads(2, |rank| -> Result<Vec<f32>> {
///     let linear = LinearConfig::new(1, 1).init(&Scope::new(7, DType::F32, rank.device()))?;
///     let model = Sequential::new().with(WrappedUnit::new(std::sync::Arc::new(linear)));
///     let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(ZeroStage::Parameters))?;
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
    pub(super) core: Arc<ZeroCore>,
    pub(super) entries: Vec<(String, EntryStorage)>,
    pub(super) frozen: Vec<Parameter>,
    /// Parameters that each rank trains, or does not, by itself.
    pub(super) ignored: Vec<Parameter>,
    /// The leaves of those that a pass has left with a gradient, each with its [`Leaf::times_zeroed`] then.
    pub(super) ignored_grads: Mutex<Vec<(Leaf, u64)>>,
    /// The buffers that are rank 0's on all ranks.
    pub(super) shared_buffers: Vec<Buffer>,
    /// The owner of each unit's parameters.
    pub(super) owners: Vec<Arc<dyn ParameterOwner>>,
    pub(super) synchronise: Synchronise,
    pub(super) hooks: Vec<HookHandle>,
    pub(super) module_hooks: Vec<UnitHooksHandle>,
}

/// Where the values of an entry of the model's state dict are.
pub(super) enum EntryStorage {
    /// A parameter that is spread.
    Sharded(Place),
    /// A parameter in 8-bit blocks that is spread: its codes and its scales.
    Int8(Parameter, [Place; 2]),
    Parameter(Parameter),
    Buffer(Buffer),
}

impl EntryStorage {
    /// Gives all ranks rank 0's values of what is not spread.
    pub(super) fn broadcast(&self, comm: &Comm) -> Result<()> {
        let held = match self {
            EntryStorage::Sharded(_) | EntryStorage::Int8(..) => return Ok(()),
            EntryStorage::Parameter(parameter) => {
                parameter.materialize()?;
                parameter.held_in()
            }
            EntryStorage::Buffer(buffer) => vec![buffer.tensor()],
        };
        Ok(held.into_iter().try_for_each(|mut tensor| comm.broadcast(&mut tensor, 0))?)
    }
}

impl Zero {
    /// The parameters for an optimizer: this rank's parts of the trained parameters, under their names. Their gradients
    /// are those of all ranks, added.
    pub fn parameters(&self) -> Vec<Parameter> {
        let state = self.core.lock();
        state.units.iter().flat_map(|unit| &unit.flats).flat_map(|f| f.pieces.iter().cloned()).collect()
    }

    /// Forgets the gradients of [`Zero::parameters`], as an optimizer's `zero_grad` does, those that passes under
    /// [`Zero::no_sync`] have left on this rank, and those of ignored parameters that no other wrapper owns.
    ///
    /// # Errors
    /// If a gradient's buffer cannot be replaced.
    pub fn zero_grad(&self) -> Result<()> {
        self.free_leaves().try_for_each(Leaf::zero_grad)?;
        self.core.zero_grad()
    }

    /// The leaves of ignored parameters that no other wrapper owns.
    fn free_leaves(&self) -> impl Iterator<Item = &Leaf> {
        self.ignored.iter().filter(|p| p.owner().is_none()).flat_map(Parameter::leaves)
    }

    /// Drops the gradients that a refused pass has added, if there were no others; otherwise asks for `zero_grad`.
    fn clear_refused_pass(&self) -> Result<()> {
        let earlier =
            unpoisoned(self.ignored_grads.lock()).iter().any(|(leaf, then)| leaf.times_zeroed() == *then);
        if self.core.clear_refused_pass(earlier)? {
            self.free_leaves().for_each(|leaf| leaf.set_grad(None));
        }
        Ok(())
    }

    /// The part of [`Zero::backward`] before the backward pass, for callers that run the pass themselves. Several passes may follow, of which
    /// the last synchronises.
    ///
    /// # Errors
    /// If parameters were changed and [`Zero::updated`] was not called; if a parameter was frozen, unfrozen or
    /// replaced since this was made, or is owned by a later wrapper; if a refused pass has left gradients; if an
    /// earlier error has ended the run.
    pub fn begin(&self) -> Result<()> {
        if let Some(error) = self.core.ranks.all.failure() {
            return Err(error.seen_in(|| "the beginning of a backward pass".into()).into());
        }
        self.check()?;
        self.core.check_fresh()?;
        self.clear_refused_pass()?;
        self.core.begin()
    }

    /// Refuses a model that is not as it was when this was made.
    fn check(&self) -> Result<()> {
        self.check_not_replaced()?;
        self.frozen.iter().try_for_each(|p| consistency::check_trained("Zero", p, false))?;
        self.core.parameters().try_for_each(|p| consistency::check_trained("Zero", p, true))
    }

    fn check_not_replaced(&self) -> Result<()> {
        consistency::check_owned("Zero", self.core.is_replaced())
    }

    /// Refuses another model than this was made of, or one with other parameters.
    pub(super) fn check_model(&self, model: &dyn Parameters) -> Result<()> {
        let all = || self.core.parameters().chain(&self.frozen).chain(&self.ignored);
        let is_known = |p: &Parameter| all().any(|known| known.is(p));
        consistency::check_model("Zero", model, is_known)
    }

    /// Runs backward from a loss of one element; afterwards, unless [`Zero::no_sync`] is in force, the parameters that
    /// [`Zero::parameters`] gives have the gradients of all ranks added to theirs. An error here ends the run of all ranks.
    ///
    /// # Errors
    /// As [`Zero::begin`], [`Var::backward`] and [`Zero::finish`]; if the loss depends on parameters that no wrapper adds up.
    pub fn backward(&self, loss: &Var) -> Result<()> {
        // Nothing is under way, and after `zero_grad` all goes on.
        self.clear_refused_pass()?;
        let pass = || {
            self.check()?;
            consistency::check_reached("Zero", &loss.parameter_leaves())?;
            self.begin()?;
            loss.backward()?;
            self.finish()
        };
        pass().inspect_err(|error: &Error| self.core.ranks.all.fail(&error.to_string()))
    }

    /// The part of [`Zero::backward`] after the backward pass, for callers that run the pass themselves: sends the gradients
    /// that are left, waits for all, frees gathered parameters, gives all ranks rank 0's buffers ([`ZeroConfig::broadcast_buffers`](super::ZeroConfig)).
    ///
    /// # Errors
    /// If no pass has begun; if a parameter got no gradient (see [`ZeroConfig::find_unused`](super::ZeroConfig)), or as
    /// [`crate::comm::Pending::wait`].
    pub fn finish(&self) -> Result<()> {
        self.core.end()?;
        let left = self.free_leaves().filter(|leaf| leaf.grad().is_some());
        *unpoisoned(self.ignored_grads.lock()) =
            left.map(|leaf| (leaf.clone(), leaf.times_zeroed())).collect();
        match self.synchronise.is_on() {
            true => self.core.finish().and_then(|()| self.broadcast_buffers()),
            false => self.core.reshard(),
        }
    }

    fn broadcast_buffers(&self) -> Result<()> {
        let shared = self.shared_buffers.iter().filter(|_| self.core.config.broadcast_buffers);
        let buffers: Vec<Tensor> = shared.map(Buffer::tensor).collect();
        consistency::broadcast_coalesced(&buffers, 0, &self.core.ranks.all)
    }

    /// While the result lives, backward passes ([`Zero::backward`]) only accumulate on this rank, in full-size
    /// gradients (not reduce-scattered): for all micro-batches but the last. It counts whether the result lives
    /// when *backward* runs. An optimizer refuses to step on gradients that only accumulated.
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

    /// To be called by all ranks after the optimizer's step: gives all ranks the updated shards (in ZeRO-1 and 2). Until then a
    /// forward pass is an error. It returns while the values are on their way: each unit's are waited for before the unit computes, and
    /// by every other code that reads or writes the model's tensors.
    ///
    /// # Errors
    /// If a later wrapper has the model, or as [`crate::comm::Pending::wait`] of this update or, where all ranks keep all values, of the
    /// one before. If values do not come after this has returned, what reads them returns
    /// [`NotArrived`](phalanx_tensor::Error::NotArrived).
    pub fn updated(&self) -> Result<()> {
        self.check_not_replaced()?;
        self.core.updated(false)
    }

    /// Lets the model hold all its values until the result is dropped: to evaluate, generate or inspect it outside of its
    /// units, or to run several passes with all values at hand. All ranks call it, and drop it at the same place. Meanwhile ranks may run
    /// forward passes by themselves.
    ///
    /// Values may be written too (torch: `summon_full_params` with `writeback`), the same on all ranks. Each rank takes its shard of them when
    /// the result is dropped, and before by [`Zero::begin`] and [`Zero::updated`]. Call [`Zero::updated`] after writing, as after a step.
    ///
    /// # Errors
    /// As [`crate::comm::Pending::wait`].
    pub fn gathered(&self) -> Result<Gathered> {
        self.check_not_replaced()?;
        self.core.hold()?;
        Ok(Gathered::new(Held(self.core.clone())))
    }

    /// The ranks that share the parameters, for [`phalanx_nn::Optimizer::with_peers`].
    pub fn peers(&self) -> Arc<dyn Peers> {
        let state = self.core.lock();
        let device =
            state.units.iter().flat_map(|unit| &unit.flats).next().map_or(Device::CPU, FlatParameter::device);
        Arc::new(WholeParameters::new(self.core.ranks.shard.clone(), device))
    }

    /// The traffic of this rank for values and gradients so far; exchanging norms and state dicts counts too.
    pub fn traffic(&self) -> Traffic {
        let (shard, replicas) = (self.core.ranks.shard.traffic(), self.core.ranks.replicas.traffic());
        Traffic { calls: shard.calls + replicas.calls, bytes: shard.bytes + replicas.bytes }
    }

    /// How many elements of the trained parameters each rank that shares a copy owns.
    pub fn shard_sizes(&self) -> Vec<usize> {
        let state = self.core.lock();
        let mut sizes = vec![0; self.core.ranks.shard.size()];
        for flat in state.units.iter().flat_map(|unit| &unit.flats).filter(|f| f.trained) {
            sizes.iter_mut().zip(flat.cuts.counts()).for_each(|(size, count)| *size += count);
        }
        sizes
    }

    /// The former name of [`Zero::shard_sizes`].
    #[deprecated(since = "0.1.0", note = "renamed to `shard_sizes`")]
    pub fn shares(&self) -> Vec<usize> {
        self.shard_sizes()
    }
}

impl Drop for Zero {
    fn drop(&mut self) {
        self.hooks.iter().for_each(HookHandle::remove);
        self.module_hooks.iter().for_each(UnitHooksHandle::remove);
        // A later wrapper owns the values and gradients.
        if !self.core.is_replaced() {
            self.core.abandon();
        }
        let unused = self.core.ranks.all.size() > 1 && !self.core.was_used() && !self.core.is_replaced();
        let left: Option<Arc<dyn ParameterOwner>> =
            unused.then(|| Arc::new(consistency::DroppedWrapper) as _);
        let state = self.core.lock();
        for (unit, owner) in state.units.iter().zip(&self.owners) {
            for Member { parameter, .. } in unit.flats.iter().flat_map(|flat| &flat.members) {
                parameter.release_owner(owner);
                left.iter().for_each(|left| parameter.set_owner(left.clone()));
            }
        }
    }
}

impl DataParallel for Zero {
    fn parameters(&self) -> Vec<Parameter> {
        Zero::parameters(self)
    }
    fn no_sync(&self) -> NoSync {
        Zero::no_sync(self)
    }
    fn zero_grad(&self) -> Result<()> {
        Zero::zero_grad(self)
    }
    fn begin(&self) -> Result<()> {
        Zero::begin(self)
    }
    fn finish(&self) -> Result<()> {
        Zero::finish(self)
    }
    fn backward(&self, loss: &Var) -> Result<()> {
        Zero::backward(self, loss)
    }
    fn grad_squares(&self) -> Result<Squares> {
        Zero::grad_squares(self)
    }
    fn updated(&self) -> Result<()> {
        Zero::updated(self)
    }
    fn peers(&self) -> Option<Arc<dyn Peers>> {
        Some(Zero::peers(self))
    }
    fn traffic(&self) -> Traffic {
        Zero::traffic(self)
    }
    fn gathered(&self) -> Result<Option<Gathered>> {
        Zero::gathered(self).map(Some)
    }
    fn full_state_dict(&self, model: &dyn Parameters) -> Result<Entries> {
        self.check_model(model)?;
        Zero::full_state_dict(self)
    }
    fn load_full_state_dict(&self, model: &dyn Parameters, entries: Entries) -> Result<()> {
        self.check_model(model)?;
        Zero::load_full_state_dict(self, entries)
    }
    fn parts(&self, model: &dyn Parameters) -> Result<Vec<ShardedTensor>> {
        self.check_model(model)?;
        Zero::sharded_state_dict(self)
    }
    fn reloaded(&self) -> Result<()> {
        self.core.updated(true)
    }
    fn full_optimizer_state(&self, own: Entries, kinds: &[&'static str]) -> Result<Entries> {
        Zero::full_optimizer_state(self, own, kinds)
    }
    fn part_of_optimizer_state(&self, whole: Entries) -> Result<Entries> {
        Zero::part_of_optimizer_state(self, whole)
    }
}

/// Keeps all values gathered until it is dropped; see [`Zero::gathered`].
struct Held(Arc<ZeroCore>);

impl Drop for Held {
    fn drop(&mut self) {
        // Freeing waits for nothing that was not waited for, and an empty stand-in always fits.
        let _ = self.0.release();
    }
}
