//! (sharded/build.rs)
//! How [`Zero`] takes a model in hand.
//!
//! (sharded/grouping.rs)
//! Which parameters are gathered together, and which of them can lie in one buffer.
//!
//! (sharded/hands.rs)
//! What others may do with the parameters of a model that is spread, and with this rank's shares of them.
//!
//! (sharded/hooks.rs)
//! What happens around a unit's passes.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};

use phalanx_nn::{Buffer, Entry, Holder, Parameter, Parameters, UnitHooks, Usage};
use phalanx_tensor::{DType, Device};

use super::core::{Core, Group, Pass};
use super::flat_parameter::{Flat, Ranks};
use super::{Cuts, Stage, Zero, ZeroConfig};
use crate::Result;
use crate::comm::Comm;
use crate::data_parallel::{Synchronise, consistency};

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
    /// If the ranks hold different models or have different settings, which are named; if the settings do not fit the model or the
    /// ranks; if the model has no values, because another `Zero` spreads them; if memory is short, or as
    /// [`crate::comm::Pending::wait`].
    pub fn new(model: &(impl Parameters + ?Sized), comm: Comm, config: ZeroConfig) -> Result<Zero> {
        consistency::check_values("Zero", model)?;
        consistency::check_same_model(model, &config.told(), &comm)?;
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
                let elements: Vec<usize> = alike.iter().map(|p| p.tensor().numel()).collect();
                let cuts = Cuts::new(config.ownership, &elements, &mut loads);
                flats.push(Flat::new(&alike, cuts, ranks.shard.rank(), &config)?);
            }
            groups.push(Group::new(flats, bounds));
        }
        let hands: Vec<_> =
            (0..groups.len()).map(|group| Arc::new(Hands { core: OnceLock::new(), group })).collect();
        place(&mut entries, &groups);
        let core = Arc::new(Core::new(ranks, config, groups, units));
        let of_groups = hands.into_iter().map(|hands| {
            let _ = hands.core.set(Arc::downgrade(&core));
            let hands: Arc<dyn Holder> = hands;
            hands
        });
        let mut zero = Zero {
            hands: of_groups.collect(),
            core,
            entries,
            frozen: model.parameters().into_iter().filter(|p| !p.is_trained()).collect(),
            synchronise: Synchronise::default(),
            hooks: Vec::new(),
            units: Vec::new(),
        };
        zero.take_in_hand();
        zero.hook(model);
        Ok(zero)
    }

    fn take_in_hand(&self) {
        let shares: Arc<dyn Holder> = Arc::new(ShareHands(Arc::downgrade(&self.core)));
        for (group, hands) in self.core.lock().groups.iter().zip(&self.hands) {
            for flat in &group.flats {
                flat.members.iter().for_each(|member| member.parameter.hand_to(hands.clone()));
                flat.pieces.iter().for_each(|piece| piece.hand_to(shares.clone()));
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
        model.visit_units(&mut |unit| {
            let hooks = Hooks { core: Arc::downgrade(&self.core), unit: self.units.len() };
            self.units.push(unit.add_hooks(Arc::new(hooks)));
        });
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

/// Parameters that are gathered together, and the first and last of the units that use them.
pub(super) type Grouped = (Vec<Parameter>, Option<(usize, usize)>);

/// The groups of a model, in the order of their first units, that of no unit, the root, in front; and each unit's group.
pub(super) fn group(model: &(impl Parameters + ?Sized)) -> (Vec<Grouped>, Vec<usize>) {
    let mut used: Vec<Vec<Parameter>> = Vec::new();
    model.visit_units(&mut |unit| used.push([unit.parameters(), unit.borrowed()].concat()));
    // Units that share a parameter are one group, which has the number of its first unit.
    let mut units: Vec<usize> = (0..used.len()).collect();
    for (a, b) in (0..used.len()).flat_map(|a| (a + 1..used.len()).map(move |b| (a, b))) {
        if used[a].iter().any(|p| used[b].iter().any(|q| p.is(q))) {
            let (from, to) = (units[a].max(units[b]), units[a].min(units[b]));
            units.iter_mut().filter(|unit| **unit == from).for_each(|unit| *unit = to);
        }
    }
    let mut groups: Vec<Grouped> = vec![(Vec::new(), None)];
    let mut numbers: BTreeMap<usize, usize> = BTreeMap::new();
    for (unit, group) in units.iter_mut().enumerate() {
        let number = *numbers.entry(*group).or_insert(groups.len());
        match groups.get_mut(number) {
            Some((_, bounds)) => *bounds = bounds.map(|(first, _)| (first, unit)),
            None => groups.push((Vec::new(), Some((unit, unit)))),
        }
        *group = number;
    }
    for parameter in model.parameters() {
        let unit = used.iter().position(|used| used.iter().any(|p| p.is(&parameter)));
        groups[unit.map_or(0, |unit| units[unit])].0.push(parameter);
    }
    (groups, units)
}

/// A group's parameters in sets that can lie in one buffer. Frozen ones are spread only where parameters are.
pub(super) fn runs(parameters: Vec<Parameter>, stage: Stage) -> Vec<Vec<Parameter>> {
    let mut sets: Vec<((DType, Device, bool), Vec<Parameter>)> = Vec::new();
    let spread = |p: &Parameter| p.is_trained() || stage == Stage::Parameters;
    for parameter in parameters.into_iter().filter(spread) {
        let kind = (parameter.dtype(), parameter.device(), parameter.is_trained());
        match sets.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, set)) => set.push(parameter),
            None => sets.push((kind, vec![parameter])),
        }
    }
    sets.into_iter().map(|(_, set)| set).collect()
}

/// Those of a group's parameters.
pub(super) struct Hands {
    pub(super) core: OnceLock<Weak<Core>>,
    pub(super) group: usize,
}

impl Holder for Hands {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        Some(match usage {
            Usage::Update => "is sharded by Zero: build the optimizer over `zero.parameters()`",
            Usage::Norm => "is sharded by Zero: ask for `zero.grad_norm()` or `zero.clip_grad_norm(..)`",
            Usage::ZeroGrad => "is sharded by Zero: call `zero.zero_grad()`, or the optimizer's",
            Usage::Gradients => "is sharded by Zero: choose `ZeroConfig::grad_dtype`",
        })
    }

    fn lost(&self) {
        self.core.get().and_then(Weak::upgrade).iter().for_each(|core| core.lose());
    }

    fn hears_of_uses(&self) -> bool {
        true
    }

    /// What goes wrong has ended the run of all ranks, and the next call says so; whatever computes with the parameter finds its
    /// values withheld.
    fn before_use(&self, _: &Parameter) {
        if let Some(core) = self.core.get().and_then(Weak::upgrade) {
            let _ = core.used(self.group);
        }
    }
}

/// Those of this rank's shares, which an optimizer updates.
pub(super) struct ShareHands(pub(super) Weak<Core>);

impl Holder for ShareHands {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        let Some(core) = self.0.upgrade() else {
            let gone = "is a share of a model whose `Zero` was dropped: build the optimizer over what trains the model now";
            return (usage == Usage::Update).then_some(gone);
        };
        match usage {
            Usage::Update => core.has_local().then_some(consistency::LOCAL),
            Usage::Norm => (core.ranks.shard.size() > 1).then_some(
                "is this rank's share alone: ask for `zero.grad_norm()` or `zero.clip_grad_norm(..)`",
            ),
            Usage::Gradients => Some("is this rank's share: choose `ZeroConfig::grad_dtype`"),
            Usage::ZeroGrad => None,
        }
    }
}

/// A unit's part.
pub(super) struct Hooks {
    pub(super) core: Weak<Core>,
    pub(super) unit: usize,
}

impl Hooks {
    fn with(&self, f: impl FnOnce(&Core) -> Result<()>) -> phalanx_nn::Result<()> {
        let core = self.core.upgrade().filter(|core| !core.is_lost());
        let done = core.map_or(Ok(()), |core| f(&core));
        Ok(done.map_err(phalanx_nn::autograd::Error::from)?)
    }
}

impl UnitHooks for Hooks {
    fn pre_forward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.enter(self.unit, Pass::Forward))
    }
    fn post_forward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.leave(self.unit, Pass::Forward))
    }
    fn pre_recompute(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.enter_again(self.unit))
    }
    fn pre_backward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.enter(self.unit, Pass::Backward))
    }
    fn post_backward(&self) -> phalanx_nn::Result<()> {
        self.with(|core| core.leave(self.unit, Pass::Backward))
    }
}
