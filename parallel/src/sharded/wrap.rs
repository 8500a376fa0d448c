//! How [`Zero`] wraps a model: groups its parameters into FSDP units, becomes the owner of its parameters and of
//! this rank's pieces, and adds hooks to its leaves and wrapped modules.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use phalanx_nn::autograd::is_recomputing;
use phalanx_nn::{AnyUnit, Entry, Parameter, ParameterOwner, Parameters, UnitHooks, Usage};
use phalanx_tensor::{DType, Device};

use super::core::{FsdpUnit, Place, WrappedModule, ZeroCore};
use super::flat_parameter::{FlatParameter, Member, Ranks, held_tensor};
use super::offload::OffloadStreams;
use super::order::Pass;
use super::zero::EntryStorage;
use super::{Cuts, Zero, ZeroConfig, ZeroStage};
use crate::comm::Comm;
use crate::data_parallel::{Synchronise, consistency};
use crate::{Error, Result};

impl Zero {
    /// Gives all ranks rank 0's values and shards the parameters, unit by unit. Values that are [deferred](phalanx_nn::Scope::deferred) are
    /// drawn here, so a rank never holds more than a unit whole. All ranks of `comm` call it with models of the same parameters.
    ///
    /// # Errors
    /// If the ranks hold different models or have different settings, which are named; if the settings do not fit the model or the
    /// ranks, or name parameters to be ignored that are not there; if the model has no values, because another `Zero` spreads them; if
    /// memory is short, or as [`crate::comm::Pending::wait`].
    pub fn new(model: &(impl Parameters + ?Sized), comm: Comm, config: ZeroConfig) -> Result<Zero> {
        let ignored = config.ignored_of(model)?;
        let rest = Without { model, ignored: &ignored };
        consistency::check_values("Zero", &rest)?;
        consistency::check_same_model(&rest, &config.shared_settings(), &comm)?;
        config.check(&rest)?;
        let (shard, replicas) = config.groups(comm.rank(), comm.size())?;
        // Each rank keeps its own values of these.
        ignored.iter().try_for_each(Parameter::materialize)?;
        let mut entries = Vec::new();
        model.visit("", &mut |path, entry| {
            entries.push((
                path.to_string(),
                match entry {
                    Entry::Parameter(p) => EntryStorage::Parameter(p.clone()),
                    Entry::Buffer(b) => EntryStorage::Buffer(b.clone()),
                },
            ));
        });
        let ranks = Ranks { shard: comm.group(&shard)?, replicas: comm.group(&replicas)?, all: comm };
        // Other ranks may wait in a broadcast.
        let fail = |error: &Error| ranks.all.fail(&error.to_string());
        let (parameters_of, modules) = fsdp_units(&rest);
        let mut loads = vec![0; ranks.shard.size()];
        let (mut units, mut streams) = (Vec::new(), OffloadStreams::default());
        for (parameters, bounds) in parameters_of {
            let mut flats = Vec::new();
            for same in alike(parameters, config.stage) {
                let elements: Vec<usize> =
                    same.iter().map(|(p, number)| held_tensor(p, *number).numel()).collect();
                let cuts = Cuts::new(config.ownership, &elements, &mut loads);
                let flat = FlatParameter::new(&same, cuts, &ranks, &config, &mut streams);
                flats.push(flat.inspect_err(fail)?);
            }
            units.push(FsdpUnit::new(flats, bounds));
        }
        let owners: Vec<_> =
            (0..units.len()).map(|unit| Arc::new(UnitOwner { core: OnceLock::new(), unit })).collect();
        locate(&mut entries, &units);
        let mut shared_buffers = Vec::new();
        for (path, source) in &entries {
            match source {
                EntryStorage::Parameter(p) if rest.ignores(&Entry::Parameter(p)) => continue,
                EntryStorage::Buffer(_) if rest.ignores_buffer(path) => continue,
                EntryStorage::Buffer(buffer) => shared_buffers.push(buffer.clone()),
                _ => {}
            }
            source.broadcast(&ranks.all).inspect_err(fail)?;
        }
        let core = Arc::new(ZeroCore::new(ranks, config, units, modules));
        let of_units = owners.into_iter().map(|owner| {
            let _ = owner.core.set(Arc::downgrade(&core));
            let owner: Arc<dyn ParameterOwner> = owner;
            owner
        });
        let mut zero = Zero {
            owners: of_units.collect(),
            core,
            entries,
            frozen: rest.parameters().into_iter().filter(|p| !p.is_trained()).collect(),
            ignored: ignored.clone(),
            ignored_grads: Mutex::default(),
            shared_buffers,
            synchronise: Synchronise::default(),
            hooks: Vec::new(),
            module_hooks: Vec::new(),
        };
        zero.own_parameters();
        zero.hook(model);
        Ok(zero)
    }

    fn own_parameters(&self) {
        let shard_owner: Arc<dyn ParameterOwner> = Arc::new(ShardOwner(Arc::downgrade(&self.core)));
        for (unit, owner) in self.core.lock().units.iter().zip(&self.owners) {
            for flat in &unit.flats {
                flat.members.iter().for_each(|member| member.parameter.set_owner(owner.clone()));
                flat.pieces.iter().for_each(|piece| piece.set_owner(shard_owner.clone()));
            }
        }
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
        // A parameter without a hook would be refused as one that no wrapper knows.
        let ignored = self.ignored.iter().flat_map(Parameter::leaves);
        self.hooks.extend(ignored.map(|leaf| leaf.on_accumulate(|_| Ok(()))));
        let frozen = self.frozen.iter().flat_map(|p| consistency::refuse_gradients("Zero", p));
        self.hooks.extend(frozen.collect::<Vec<_>>());
        visit_modules(model, &mut |module, _| {
            let hooks = ModuleHooks { core: Arc::downgrade(&self.core), module: self.module_hooks.len() };
            self.module_hooks.push(module.add_hooks(Arc::new(hooks)));
        });
    }
}

/// A model without the parameters that are ignored.
struct Without<'a, M: ?Sized> {
    model: &'a M,
    ignored: &'a [Parameter],
}

impl<M: Parameters + ?Sized> Without<'_, M> {
    fn ignores(&self, entry: &Entry<'_>) -> bool {
        matches!(entry, Entry::Parameter(p) if self.ignored.iter().any(|ignored| ignored.is(p)))
    }

    /// Whether all parameters of a module around a buffer, of which there are some, are ignored.
    fn ignores_buffer(&self, path: &str) -> bool {
        let all = self.model.named_parameters();
        let mut modules = path.match_indices('.').map(|(end, _)| &path[..=end]);
        modules.any(|module| {
            let mut inside = all.iter().filter(|(path, _)| path.starts_with(module)).peekable();
            inside.peek().is_some() && inside.all(|(_, p)| self.ignores(&Entry::Parameter(p)))
        })
    }
}

impl<M: Parameters + ?Sized> Parameters for Without<'_, M> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.model.visit(path, &mut |path, entry| {
            if !self.ignores(&entry) {
                visitor(path, entry);
            }
        });
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.model.visit_units(visitor);
    }
}

/// Finds the flat parameter of every entry that has one.
fn locate(entries: &mut [(String, EntryStorage)], units: &[FsdpUnit]) {
    for (_, source) in entries {
        let EntryStorage::Parameter(parameter) = source else { continue };
        let is = |m: &Member, number: usize| m.parameter.is(parameter) && m.number == number;
        let find = |number: usize| {
            let flats = units
                .iter()
                .enumerate()
                .flat_map(|(u, unit)| unit.flats.iter().enumerate().map(move |f| (u, f)));
            let mut places = flats.filter_map(|(unit, (flat, of))| {
                let member = of.members.iter().position(|m| is(m, number))?;
                Some(Place { unit, flat, member })
            });
            places.next()
        };
        match [find(0), find(1)] {
            [Some(codes), Some(scales)] => *source = EntryStorage::Int8(parameter.clone(), [codes, scales]),
            [Some(place), None] => *source = EntryStorage::Sharded(place),
            _ => {}
        }
    }
}

/// The parameters of an FSDP unit, and the first and last of the wrapped modules that use them.
type UnitParameters = (Vec<Parameter>, Option<(usize, usize)>);

/// Calls `visitor` with every wrapped module, each before those inside it, and the numbers of the modules around it.
fn visit_modules(model: &(impl Parameters + ?Sized), visitor: &mut dyn FnMut(&dyn AnyUnit, &[usize])) {
    fn inside(
        module: &dyn AnyUnit,
        around: &[usize],
        count: &mut usize,
        visitor: &mut dyn FnMut(&dyn AnyUnit, &[usize]),
    ) {
        let mut around = around.to_vec();
        if module.is_wrapped() {
            visitor(module, &around);
            around.push(*count);
            *count += 1;
        }
        module.visit_inner_units(&mut |inner| inside(inner, &around, count, visitor));
    }
    let mut count = 0;
    model.visit_units(&mut |module| inside(module, &[], &mut count, visitor));
}

/// The FSDP units of a model, the root first, then in the order of their first modules; and the modules. A parameter belongs to the
/// innermost module that has it.
fn fsdp_units<M: Parameters + ?Sized>(model: &Without<'_, M>) -> (Vec<UnitParameters>, Vec<WrappedModule>) {
    let (mut used, mut around): (Vec<Vec<Parameter>>, Vec<Vec<usize>>) = (Vec::new(), Vec::new());
    visit_modules(model, &mut |module, outer| {
        let mut own = [module.parameters(), module.borrowed()].concat();
        own.retain(|p| !model.ignores(&Entry::Parameter(p)));
        outer.iter().for_each(|&outer| used[outer].retain(|p| !own.iter().any(|q| p.is(q))));
        used.push(own);
        around.push(outer.to_vec());
    });
    // Modules that share a parameter are one unit, which has the number of its first module.
    let mut modules: Vec<usize> = (0..used.len()).collect();
    for (a, b) in (0..used.len()).flat_map(|a| (a + 1..used.len()).map(move |b| (a, b))) {
        if used[a].iter().any(|p| used[b].iter().any(|q| p.is(q))) {
            let (from, to) = (modules[a].max(modules[b]), modules[a].min(modules[b]));
            modules.iter_mut().filter(|module| **module == from).for_each(|module| *module = to);
        }
    }
    let mut units: Vec<UnitParameters> = vec![(Vec::new(), None)];
    let mut numbers: BTreeMap<usize, usize> = BTreeMap::new();
    for (module, unit) in modules.iter_mut().enumerate() {
        let number = *numbers.entry(*unit).or_insert(units.len());
        match units.get_mut(number) {
            Some((_, bounds)) => *bounds = bounds.map(|(first, _)| (first, module)),
            None => units.push((Vec::new(), Some((module, module)))),
        }
        *unit = number;
    }
    for parameter in model.parameters() {
        let module = used.iter().position(|used| used.iter().any(|p| p.is(&parameter)));
        units[module.map_or(0, |module| modules[module])].0.push(parameter);
    }
    let wrapped = |(&unit, around): (&usize, Vec<usize>)| {
        let mut around: Vec<usize> = around.into_iter().map(|outer| modules[outer]).collect();
        around.retain(|outer| *outer != unit);
        around.dedup();
        WrappedModule { unit, around }
    };
    let wrapped = modules.iter().zip(around).map(wrapped).collect();
    (units, wrapped)
}

/// The tensors that hold a unit's parameters, each by its number, in sets of one dtype, device, trained flag and kind of sites. Frozen
/// parameters are sharded only where values are.
fn alike(parameters: Vec<Parameter>, stage: ZeroStage) -> Vec<Vec<(Parameter, usize)>> {
    type Kind = (DType, Device, bool, bool);
    let mut sets: Vec<(Kind, Vec<(Parameter, usize)>)> = Vec::new();
    let spread = |p: &Parameter| p.is_trained() || stage == ZeroStage::Parameters;
    for parameter in parameters.into_iter().filter(spread) {
        for (number, tensor) in parameter.held_in().into_iter().enumerate() {
            let (trained, replicas) = (parameter.is_trained(), parameter.has_replica_sites());
            let (kind, held) =
                ((tensor.dtype(), tensor.device(), trained, replicas), (parameter.clone(), number));
            match sets.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, set)) => set.push(held),
                None => sets.push((kind, vec![held])),
            }
        }
    }
    sets.into_iter().map(|(_, set)| set).collect()
}

/// Answers, for the parameters of an FSDP unit, what other code may do with them.
pub(super) struct UnitOwner {
    pub(super) core: OnceLock<Weak<ZeroCore>>,
    pub(super) unit: usize,
}

impl ParameterOwner for UnitOwner {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        Some(match usage {
            Usage::Update => "is sharded by Zero: build the optimizer over `zero.parameters()`",
            Usage::Norm => "is sharded by Zero: ask for `zero.grad_norm()` or `zero.clip_grad_norm(..)`",
            Usage::ZeroGrad => "is sharded by Zero: call `zero.zero_grad()`, or the optimizer's",
            Usage::Gradients => "is sharded by Zero: choose `ZeroConfig::grad_dtype`",
        })
    }

    fn replaced(&self) {
        self.core.get().and_then(Weak::upgrade).iter().for_each(|core| core.mark_replaced());
    }

    fn observes_uses(&self) -> bool {
        true
    }

    /// An error ends the run of all ranks, and the next call returns it; code that computes with the parameter finds its
    /// values withheld.
    fn before_use(&self, _: &Parameter) {
        if let Some(core) = self.core.get().and_then(Weak::upgrade) {
            let _ = core.used(self.unit);
        }
    }
}

/// Answers the same for this rank's pieces, which an optimizer updates.
pub(super) struct ShardOwner(pub(super) Weak<ZeroCore>);

impl ParameterOwner for ShardOwner {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        let Some(core) = self.0.upgrade() else {
            let gone = "is a share of a model whose `Zero` was dropped: build the optimizer over what trains the model now";
            return (usage == Usage::Update).then_some(gone);
        };
        match usage {
            Usage::Update => core.has_unreduced().then_some(consistency::UNREDUCED),
            Usage::Norm => (core.ranks.shard.size() > 1).then_some(
                "is this rank's share alone: ask for `zero.grad_norm()` or `zero.clip_grad_norm(..)`",
            ),
            Usage::Gradients => Some("is this rank's share: choose `ZeroConfig::grad_dtype`"),
            Usage::ZeroGrad => None,
        }
    }
}

/// The hooks of a wrapped module.
pub(super) struct ModuleHooks {
    pub(super) core: Weak<ZeroCore>,
    pub(super) module: usize,
}

impl ModuleHooks {
    fn with(&self, f: impl FnOnce(&ZeroCore) -> Result<()>) -> phalanx_nn::Result<()> {
        let core = self.core.upgrade().filter(|core| !core.is_replaced());
        let done = core.map_or(Ok(()), |core| f(&core));
        Ok(done.map_err(phalanx_nn::autograd::Error::from)?)
    }
}

/// The pass of a module whose forward method is called.
fn forward_pass() -> Pass {
    if is_recomputing() { Pass::Recompute } else { Pass::Forward }
}

impl UnitHooks for ModuleHooks {
    fn pre_forward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.enter(self.module, forward_pass()))
    }
    fn post_forward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.leave(self.module, forward_pass()))
    }
    fn pre_recompute(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.enter_again(self.module))
    }
    fn pre_backward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.enter(self.module, Pass::Backward))
    }
    fn post_backward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.leave(self.module, Pass::Backward))
    }
}
