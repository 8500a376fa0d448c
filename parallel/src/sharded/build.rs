//! How [`Zero`] takes a model in hand.

use std::sync::{Arc, OnceLock};

use phalanx_nn::{Buffer, Entry, Holder, Parameter, Parameters};

use super::core::{Core, Group};
use super::flat::{Flat, Ranks};
use super::grouping::{group, runs};
use super::hands::{Hands, ShareHands};
use super::hooks::Hooks;
use super::{Cuts, Zero, ZeroConfig};
use crate::Result;
use crate::comm::Comm;
use crate::data_parallel::{Synchronise, hands, same};

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
        hands::check_values("Zero", model)?;
        same::check(model, &config.told(), &comm)?;
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
