//! [`Ddp`]: gradients are added over the ranks while backward runs.
//!
//! Each gradient is a view of its bucket's buffer, so the buffer that is sent is the one that the optimizer reads.
//! A hook of each leaf (one for each site, a use of a parameter) counts arrivals; a full bucket starts when the
//! buckets before it have started. Gradients are only added: a loss that is divided by the tokens of the *global*
//! batch needs no division afterwards ([`super::Average::Sum`]).

use std::sync::{Arc, Mutex, Weak};

use phalanx_nn::autograd::{HookHandle, Leaf, Var};
use phalanx_nn::{Buffer, Entry, Parameter, ParameterOwner, Parameters, Usage, load_state_dict, state_dict};
use phalanx_tensor::{Tensor, unpoisoned};

use super::join::{JoinConfig, NextAction};
use super::reducer::{Reducer, Roles};
use super::{DataParallel, DdpConfig, Entries, NoSync, Synchronise, consistency};
use crate::comm::{Comm, Traffic};
use crate::sharded_tensor::ShardedTensor;
use crate::{Error, Result};

/// A model whose gradients are added over a group of ranks, each of which computes on its sub-batch.
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
///
/// Call [`Ddp::backward`]; `loss.backward()` is refused. After parameters were added, frozen, unfrozen or replaced, make a new
/// `Ddp`, which takes the model over; the next pass of the old one is an error.
pub struct Ddp {
    pub(super) reducer: Arc<Reducer>,
    /// All parameters of the model, and whether each one requires a gradient.
    parameters: Vec<(Parameter, bool)>,
    owner: Arc<dyn ParameterOwner>,
    buffers: Vec<Buffer>,
    broadcasts: bool,
    pub(super) comm: Comm,
    synchronise: Synchronise,
    /// Set inside [`Ddp::join`], where ranks may have different numbers of batches.
    pub(super) uneven: Mutex<Option<(JoinConfig, Roles)>>,
    hooks: Vec<HookHandle>,
}

impl Ddp {
    /// Gives all ranks rank 0's values, and puts the gradients of the trained parameters into buckets. All ranks of `comm`
    /// call it with models of the same parameters.
    ///
    /// # Errors
    /// If the ranks hold different models or have different settings, which are named; if the model's values are spread by a
    /// [`Zero`](crate::sharded::Zero); if memory is short, or as [`crate::comm::Pending::wait`]; if the engine has no priority
    /// lane.
    pub fn new(model: &(impl Parameters + ?Sized), comm: Comm, config: DdpConfig) -> Result<Ddp> {
        model.parameters().iter().try_for_each(Parameter::materialize)?;
        consistency::check_values("Ddp", model)?;
        consistency::check_same_model(model, &config.shared_settings(), &comm)?;
        let mut buffers = Vec::new();
        model.visit("", &mut |_, entry| {
            if let Entry::Buffer(buffer) = entry {
                buffers.push(buffer.clone());
            }
        });
        let parameters: Vec<_> =
            model.parameters().into_iter().map(|p| (p.clone(), p.is_trained())).collect();
        let trained: Vec<Parameter> = parameters.iter().filter(|p| p.1).map(|p| p.0.clone()).collect();
        let broadcasts = config.broadcast_buffers && !buffers.is_empty();
        // Parameters that several units use have all their sites here; a tied table may have one on another stage.
        let mut borrowed = Vec::new();
        model.visit_units(&mut |unit| borrowed.extend(unit.borrowed()));
        let is_local = |p: &Parameter| borrowed.iter().any(|other| other.is(p));
        let reducer = Arc::new(Reducer::new(trained, is_local, comm.clone(), config)?);
        let synchronise = Synchronise::default();
        let mut hooks = Vec::new();
        let owner: Arc<dyn ParameterOwner> = Arc::new(DdpOwner(Arc::downgrade(&reducer)));
        for (frozen, _) in parameters.iter().filter(|(_, trained)| !trained) {
            hooks.extend(consistency::refuse_gradients("Ddp", frozen));
        }
        for (number, (parameter, leaf)) in reducer.leaves().iter().enumerate() {
            parameter.set_owner(owner.clone());
            // The reducer holds the parameters and they the hooks, so the hooks hold it weakly.
            let (reducer, synchronise) = (Arc::downgrade(&reducer), synchronise.clone());
            hooks.push(leaf.on_accumulate(move |_| {
                let Some(reducer) = reducer.upgrade() else { return Ok(()) };
                Ok(reducer.arrived(number, synchronise.is_on())?)
            }));
        }
        let uneven = Mutex::new(None);
        let ddp = Ddp { reducer, parameters, owner, buffers, broadcasts, comm, synchronise, uneven, hooks };
        ddp.broadcast_values(0)?;
        Ok(ddp)
    }

    /// The trained parameters.
    pub fn parameters(&self) -> Vec<Parameter> {
        self.parameters.iter().filter(|(_, trained)| *trained).map(|(p, _)| p.clone()).collect()
    }

    /// Refuses a model that is not as it was when this was made.
    fn check(&self) -> Result<()> {
        consistency::check_owned("Ddp", self.reducer.is_replaced())?;
        self.parameters.iter().try_for_each(|(p, trained)| consistency::check_trained("Ddp", p, *trained))
    }

    /// Refuses another model than this was made of, or one with other parameters.
    pub(super) fn check_model(&self, model: &dyn Parameters) -> Result<()> {
        consistency::check_model("Ddp", model, |p| self.parameters.iter().any(|(known, _)| known.is(p)))
    }

    /// Runs backward from a loss of one element; afterwards, unless [`Ddp::no_sync`] is in force, the parameters'
    /// gradients are those of all ranks, added. An error here ends the run of all ranks with it.
    ///
    /// Gradients of an earlier pass that are still there (no `zero_grad`) are added to, whether that pass was
    /// synchronised or not. Either all ranks forget them or none does.
    ///
    /// # Errors
    /// As [`Ddp::begin`], [`Var::backward`] and [`Ddp::finish`]; if the loss depends on parameters that no wrapper adds up.
    pub fn backward(&self, loss: &Var) -> Result<()> {
        // Nothing is under way, and after `zero_grad` all goes on.
        self.reducer.clear_refused_pass()?;
        let pass = || {
            self.begin_from(&[loss])?;
            loss.backward()?;
            self.finish()
        };
        pass().inspect_err(|error: &Error| self.comm.fail(&error.to_string()))
    }

    /// The part of [`Ddp::backward`] before the backward pass, for callers that run the pass themselves, synchronised or not.
    /// Several passes may follow, of which the last synchronises.
    ///
    /// # Errors
    /// If a parameter was frozen, unfrozen or replaced since this was made, or was taken over by a later wrapper; if gradients
    /// of a refused pass are there; inside [`Ddp::join`], if other ranks do something else; or as [`crate::comm::Pending::wait`].
    pub fn begin(&self) -> Result<()> {
        self.check()?;
        let uneven = self.uneven().is_some();
        if uneven && self.synchronise.is_on() {
            self.announce(NextAction::Pass)?;
        }
        self.reducer.begin(self.roles())
    }

    /// [`Ddp::begin`] of a pass that starts at `outputs`: parameters that their graphs do not lead to count as unused at once, where
    /// [`DdpConfig::find_unused`] allows it, so that no bucket waits for them until [`Ddp::finish`]. If several passes follow, the
    /// outputs are those of the last.
    ///
    /// # Errors
    /// As [`Ddp::begin`]; if an output depends on parameters that no wrapper adds up.
    pub fn begin_from(&self, outputs: &[&Var]) -> Result<()> {
        self.check()?;
        let reached: Vec<Leaf> = outputs.iter().flat_map(|output| output.parameter_leaves()).collect();
        consistency::check_reached("Ddp", &reached)?;
        self.begin()?;
        self.reducer.expect(&reached);
        Ok(())
    }

    /// The part of [`Ddp::backward`] after the backward pass, for callers that run the pass themselves: starts the buckets
    /// that are left, waits for all buckets, gives all ranks rank 0's buffers ([`DdpConfig::broadcast_buffers`]).
    ///
    /// # Errors
    /// If no pass has begun; if a parameter got no gradient (see [`DdpConfig::find_unused`]), or as [`crate::comm::Pending::wait`].
    pub fn finish(&self) -> Result<()> {
        self.reducer.end()?;
        match self.synchronise.is_on() {
            true => self.reducer.finish().and_then(|()| self.end_pass()),
            false => Ok(()),
        }
    }

    /// The collectives after the buckets of a pass.
    pub(super) fn end_pass(&self) -> Result<()> {
        if self.broadcasts { self.send_buffers(self.roles().first) } else { Ok(()) }
    }

    /// While the result lives, backward passes ([`Ddp::backward`]) only accumulate on this rank: for all micro-batches but the
    /// last. It counts whether the result lives when *backward* runs. An optimizer refuses to step on gradients that only
    /// accumulated.
    pub fn no_sync(&self) -> NoSync {
        self.synchronise.off()
    }

    /// Gives all ranks rank 0's buffers (running statistics). Passes that synchronise do so by themselves unless told not
    /// to ([`DdpConfig::broadcast_buffers`]).
    ///
    /// # Errors
    /// As [`crate::comm::Pending::wait`].
    pub fn broadcast_buffers(&self) -> Result<()> {
        self.send_buffers(0)
    }

    fn send_buffers(&self, root: usize) -> Result<()> {
        let buffers: Vec<Tensor> = self.buffers.iter().map(Buffer::tensor).collect();
        consistency::broadcast_coalesced(&buffers, root, &self.comm)
    }

    /// Gives all ranks `root`'s parameters and buffers.
    pub(super) fn broadcast_values(&self, root: usize) -> Result<()> {
        for mut held in self.parameters.iter().flat_map(|(p, _)| p.held_in()) {
            self.comm.broadcast(&mut held, root)?;
        }
        self.send_buffers(root)
    }

    /// The roles of the ranks in a pass now.
    pub(super) fn roles(&self) -> Roles {
        self.uneven().map_or(Roles { first: 0, divisor: self.comm.size() }, |(_, roles)| roles)
    }

    pub(super) fn uneven(&self) -> Option<(JoinConfig, Roles)> {
        *unpoisoned(self.uneven.lock())
    }

    /// The buckets that gradients travel in now, as names of parameters.
    pub fn buckets(&self) -> Vec<Vec<String>> {
        self.reducer.buckets()
    }
}

/// Answers, for the parameters of a [`Ddp`], what other code may do with them.
pub(super) struct DdpOwner(pub(super) Weak<Reducer>);

impl ParameterOwner for DdpOwner {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        match usage {
            Usage::Update => {
                self.0.upgrade().filter(|reducer| reducer.has_unreduced()).map(|_| consistency::UNREDUCED)
            }
            Usage::Gradients => Some("has its gradients in Ddp's buckets: choose `DdpConfig::grad_dtype`"),
            Usage::Norm | Usage::ZeroGrad => None,
        }
    }

    fn replaced(&self) {
        self.0.upgrade().iter().for_each(|reducer| reducer.mark_replaced());
    }
}

impl DataParallel for Ddp {
    fn parameters(&self) -> Vec<Parameter> {
        Ddp::parameters(self)
    }
    fn no_sync(&self) -> NoSync {
        Ddp::no_sync(self)
    }
    fn begin(&self) -> Result<()> {
        Ddp::begin(self)
    }
    fn finish(&self) -> Result<()> {
        Ddp::finish(self)
    }
    fn backward(&self, loss: &Var) -> Result<()> {
        Ddp::backward(self, loss)
    }
    fn full_state_dict(&self, model: &dyn Parameters) -> Result<Entries> {
        self.check_model(model)?;
        Ok(state_dict(model))
    }
    fn load_full_state_dict(&self, model: &dyn Parameters, entries: Entries) -> Result<()> {
        self.check_model(model)?;
        Ok(load_state_dict(model, entries)?)
    }
    fn parts(&self, model: &dyn Parameters) -> Result<Vec<ShardedTensor>> {
        self.check_model(model)?;
        Ok(ShardedTensor::all_of(model))
    }
    fn traffic(&self) -> Traffic {
        self.comm.traffic()
    }
}

impl Drop for Ddp {
    fn drop(&mut self) {
        self.hooks.iter().for_each(HookHandle::remove);
        self.parameters.iter().for_each(|(p, _)| p.release_owner(&self.owner));
        if self.comm.size() > 1 && !self.reducer.was_used() && !self.reducer.is_replaced() {
            let unused: Arc<dyn ParameterOwner> = Arc::new(consistency::DroppedWrapper);
            self.parameters().iter().for_each(|p| p.set_owner(unused.clone()));
        }
    }
}
