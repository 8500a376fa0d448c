//! [`Core`]: when values are gathered and freed, and when gradients are sent.
//!
//! A group is what is gathered together: the parameters of a unit, of several units that share one (a table and the
//! head tied to it), or those of no unit. Gradients are sent group by group, the last first, whatever the order in which
//! they come: collectives must meet in one order.

mod gradients;
mod values;

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use phalanx_nn::Parameter;

use super::ZeroConfig;
use super::flat::{Flat, Ranks, Sent};

pub(super) use values::Pass;

pub(in crate::sharded) struct Core {
    pub(in crate::sharded) ranks: Ranks,
    pub(in crate::sharded) config: ZeroConfig,
    /// Each unit's group.
    units: Vec<usize>,
    /// The trained parameters, and each one's group.
    parameters: Vec<(Parameter, usize)>,
    state: Mutex<State>,
}

pub(in crate::sharded) struct State {
    pub(in crate::sharded) groups: Vec<Group>,
    /// Sites of each parameter that backward has not come to.
    sites: Vec<usize>,
    /// Whether a parameter got a gradient since the last synchronisation.
    touched: Vec<bool>,
    /// A group that is gathered for a unit that has not come yet. If another comes, the guess was wrong.
    ahead: Option<usize>,
    /// How many want all values to stay here.
    held: usize,
    /// Groups whose gradients are not yet sent in this pass: those below this number.
    unsent: usize,
    /// Of a group and its buffer.
    sent: VecDeque<(usize, usize, Sent)>,
}

pub(in crate::sharded) struct Group {
    pub(in crate::sharded) flats: Vec<Flat>,
    /// The units it belongs to: the first and the last.
    units: Option<(usize, usize)>,
    /// Parameters whose gradients have not come.
    missing: usize,
    /// Those that are trained.
    trained: usize,
}

impl Group {
    pub(in crate::sharded) fn new(flats: Vec<Flat>, units: Option<(usize, usize)>) -> Group {
        let trained = flats.iter().filter(|f| f.trained).map(|f| f.members.len()).sum();
        Group { flats, units, missing: trained, trained }
    }
}

impl Core {
    pub(in crate::sharded) fn new(
        ranks: Ranks,
        config: ZeroConfig,
        groups: Vec<Group>,
        units: Vec<usize>,
    ) -> Core {
        let of_group = |(g, group): (usize, &Group)| {
            let trained = group.flats.iter().filter(|f| f.trained).flat_map(|f| &f.members);
            trained.map(move |m| (m.parameter.clone(), g)).collect::<Vec<_>>()
        };
        let parameters: Vec<_> = groups.iter().enumerate().flat_map(of_group).collect();
        let sites = parameters.iter().map(|(p, _)| p.leaves().len()).collect();
        let (touched, unsent) = (vec![false; parameters.len()], groups.len());
        let state = State { groups, sites, touched, ahead: None, held: 0, unsent, sent: VecDeque::new() };
        Core { ranks, config, units, parameters, state: Mutex::new(state) }
    }

    pub(in crate::sharded) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The trained parameters of the model.
    pub(in crate::sharded) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().map(|(parameter, _)| parameter)
    }
}
