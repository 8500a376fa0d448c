//! (sharded/core/mod.rs)
//! [`Core`]: when values are gathered and freed, and when gradients are sent.
//!
//! A group is what is gathered together: the parameters of a unit, of several units that share one (a table and the
//! head tied to it), or those of no unit, the root's: these are gathered before the first unit computes, or when one of them
//! is first used, and freed when the backward pass is over. Gradients are sent group by group, the last first, whatever the order in which
//! they come: collectives must meet in one order.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use phalanx_nn::Parameter;

use super::ZeroConfig;
use super::flat_parameter::{Flat, Ranks, Sent};
use crate::panics::unpoisoned;

pub(super) use super::unshard::Pass;

pub(super) struct Core {
    pub(super) ranks: Ranks,
    pub(super) config: ZeroConfig,
    /// Each unit's group.
    pub(super) units: Vec<usize>,
    /// The trained parameters, and each one's group.
    pub(super) parameters: Vec<(Parameter, usize)>,
    /// Whether this rank has gradients that were not added to the others'.
    pub(super) local: AtomicBool,
    /// Whether another wrapper has the parameters.
    pub(super) lost: AtomicBool,
    /// Whether a pass has ever begun.
    pub(super) used: AtomicBool,
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    pub(super) groups: Vec<Group>,
    /// Whether a pass was announced that is not over.
    pub(super) begun: bool,
    /// Whether a pass was refused, which may have added to any leaf.
    pub(super) refused: bool,
    /// Sites of each parameter that backward has not come to.
    pub(super) sites: Vec<usize>,
    /// Whether a parameter got a gradient since the last synchronisation.
    pub(super) touched: Vec<bool>,
    /// A group that is gathered for a unit that has not come yet. If another comes, the guess was wrong.
    pub(super) ahead: Option<usize>,
    /// How many want all values to stay here.
    pub(super) held: usize,
    /// Groups whose gradients are not yet sent in this pass: those below this number.
    pub(super) unsent: usize,
    /// Of a group and its buffer.
    pub(super) sent: VecDeque<(usize, usize, Sent)>,
}

pub(super) struct Group {
    pub(super) flats: Vec<Flat>,
    /// The units it belongs to: the first and the last.
    pub(super) units: Option<(usize, usize)>,
    /// Whether parameters are used outside units, so that values stay until a pass is over.
    pub(super) outside: bool,
    /// Parameters whose gradients have not come.
    pub(super) missing: usize,
    /// Those that are trained.
    pub(super) trained: usize,
}

impl Group {
    pub(super) fn new(flats: Vec<Flat>, units: Option<(usize, usize)>) -> Group {
        let trained = flats.iter().filter(|f| f.trained).map(|f| f.members.len()).sum();
        Group { flats, units, outside: units.is_none(), missing: trained, trained }
    }
}

impl Core {
    pub(super) fn new(ranks: Ranks, config: ZeroConfig, groups: Vec<Group>, units: Vec<usize>) -> Core {
        let of_group = |(g, group): (usize, &Group)| {
            let trained = group.flats.iter().filter(|f| f.trained).flat_map(|f| &f.members);
            trained.map(move |m| (m.parameter.clone(), g)).collect::<Vec<_>>()
        };
        let parameters: Vec<_> = groups.iter().enumerate().flat_map(of_group).collect();
        let sites = parameters.iter().map(|(p, _)| p.leaves().len()).collect();
        let (touched, unsent) = (vec![false; parameters.len()], groups.len());
        let state = State {
            groups,
            begun: false,
            refused: false,
            sites,
            touched,
            ahead: None,
            held: 0,
            unsent,
            sent: VecDeque::new(),
        };
        let ([local, lost, used], state) = ([false; 3].map(AtomicBool::new), Mutex::new(state));
        Core { ranks, config, units, parameters, local, lost, used, state }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        unpoisoned(self.state.lock())
    }

    /// Another wrapper has the parameters.
    pub(super) fn lose(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// Whether a pass has ever begun.
    pub(super) fn was_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Whether this rank has gradients that were not added to the others'.
    pub(super) fn has_local(&self) -> bool {
        self.local.load(Ordering::Relaxed)
    }

    /// The trained parameters of the model.
    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().map(|(parameter, _)| parameter)
    }
}
