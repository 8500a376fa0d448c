//! [`Zero`]: data parallelism in which every rank keeps a share of the state.

use std::sync::Arc;

use phalanx_nn::autograd::{HookHandle, Var};
use phalanx_nn::{Buffer, Entry, Parameter, Parameters, UnitHooksHandle};
use phalanx_tensor::Tensor;

use super::core::{Core, Group};
use super::flat::{Flat, Ranks};
use super::grouping::{group, runs};
use super::hooks::Hooks;
use super::{Cuts, Gathered, Stage, ZeroConfig, norm};
use crate::Result;
use crate::comm::{Comm, Traffic};
use crate::data_parallel::{NoSync, Synchronise, broadcast, same};

/// A model whose optimizer state, gradients and parameters are spread over a group of ranks, each of which computes on its
/// share of the batch. The bits are those of [`Ddp`](crate::data_parallel::Ddp) and of one device.
///
/// When it is dropped, the model keeps its values; in [`Stage::Parameters`] it has none then, unless they are
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
    frozen: Vec<Parameter>,
    synchronise: Synchronise,
    hooks: Vec<HookHandle>,
    units: Vec<UnitHooksHandle>,
}

/// Where an entry of the model's state dict is kept.
pub(super) enum Source {
    /// Group, buffer, member.
    Flat(usize, usize, usize),
    Parameter(Parameter),
    Buffer(Buffer),
}

impl Zero {
    /// Gives all ranks rank 0's values and takes the parameters in hand. All ranks of `comm` call it with models of the
    /// same parameters.
    ///
    /// # Errors
    /// If the ranks hold different models, which are named; if the settings do not fit the model or the ranks; if the model
    /// has no values, because another `Zero` spreads them; if memory is short, or as [`crate::comm::Pending::wait`].
    pub fn new(model: &(impl Parameters + ?Sized), comm: Comm, config: ZeroConfig) -> Result<Zero> {
        same::check(model, &comm)?;
        config.check(model)?;
        let (shard, replicas) = config.groups(comm.rank(), comm.size())?;
        let mut entries = Vec::new();
        let mut done = Ok(());
        model.visit("", &mut |path, entry| {
            if done.is_ok() {
                done = comm.broadcast(&mut entry.tensor(), 0);
            }
            entries.push((
                path.to_string(),
                match entry {
                    Entry::Parameter(p) => Source::Parameter(p.clone()),
                    Entry::Buffer(b) => Source::Buffer(b.clone()),
                },
            ));
        });
        done?;
        let ranks = Ranks { shard: comm.group(&shard)?, replicas: comm.group(&replicas)?, all: comm };
        let (grouped, units) = group(model);
        let mut loads = vec![0; ranks.shard.size()];
        let mut groups = Vec::new();
        for (parameters, bounds) in grouped {
            let mut flats = Vec::new();
            for alike in runs(parameters, config.stage) {
                let stage = if bounds.is_none() { config.stage.min(Stage::Gradients) } else { config.stage };
                let elements: Vec<usize> = alike.iter().map(|p| p.tensor().numel()).collect();
                let cuts = Cuts::new(config.ownership, &elements, &mut loads);
                flats.push(Flat::new(&alike, cuts, ranks.shard.rank(), stage, &config)?);
            }
            groups.push(Group::new(flats, bounds));
        }
        place(&mut entries, &groups);
        let core = Arc::new(Core::new(ranks, config, groups, units));
        let mut zero = Zero {
            core,
            entries,
            frozen: model.parameters().into_iter().filter(|p| !p.is_trained()).collect(),
            synchronise: Synchronise::default(),
            hooks: Vec::new(),
            units: Vec::new(),
        };
        zero.hook(model);
        Ok(zero)
    }

    /// The parameters hold the hooks and the core the parameters, so the hooks hold the core weakly.
    fn hook(&mut self, model: &(impl Parameters + ?Sized)) {
        for (number, parameter) in self.core.parameters().enumerate() {
            for leaf in parameter.leaves() {
                let (core, synchronise) = (Arc::downgrade(&self.core), self.synchronise.clone());
                self.hooks.push(leaf.on_accumulate(move |_| {
                    let Some(core) = core.upgrade() else { return Ok(()) };
                    Ok(core.arrived(number, synchronise.is_on())?)
                }));
            }
        }
        model.visit_units(&mut |unit| {
            let hooks = Hooks { core: Arc::downgrade(&self.core), unit: self.units.len() };
            self.units.push(unit.add_hooks(Arc::new(hooks)));
        });
    }

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
            return Err(error.into());
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
    /// for everything, frees gathered parameters, gives all ranks rank 0's buffers ([`ZeroConfig::broadcast_buffers`]).
    ///
    /// # Errors
    /// If a parameter got no gradient (see [`ZeroConfig::find_unused`]), or as [`crate::comm::Pending::wait`].
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

    /// The Euclidean norm of all ranks' gradients, the same bits as [`phalanx_nn::grad_norm`] of the whole gradients. All
    /// ranks call it.
    ///
    /// # Errors
    /// If a gradient cannot be read, or as [`crate::comm::Pending::wait`].
    pub fn grad_norm(&self) -> Result<f64> {
        norm::grad_norm(&self.core)
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

/// Notes which entries are in which buffers.
fn place(entries: &mut [(String, Source)], groups: &[Group]) {
    for (_, source) in entries {
        let Source::Parameter(parameter) = source else { continue };
        let flats = groups
            .iter()
            .enumerate()
            .flat_map(|(g, group)| group.flats.iter().enumerate().map(move |(f, flat)| (g, f, flat)));
        let mut places = flats.filter_map(|(g, f, flat)| {
            Some((g, f, flat.members.iter().position(|m| m.parameter.is(parameter))?))
        });
        if let Some((g, f, m)) = places.next() {
            *source = Source::Flat(g, f, m);
        }
    }
}
