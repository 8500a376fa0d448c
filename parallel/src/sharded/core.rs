//! [`ZeroCore`]: the state of [`Zero`](super::Zero), which hooks of parameters and modules change.
//!
//! An [`FsdpUnit`] is the parameters that are unsharded together: those of a wrapped module, of several modules that share one
//! (a table and the head tied to it), or those of no module, the root's. A module inside another one has a unit of its own; the
//! other's unit has the rest. Gradients are sent unit by unit in an order that all ranks know before the pass, whatever the order in
//! which they come, since all ranks must call collectives in one order.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use phalanx_nn::Parameter;

use phalanx_tensor::unpoisoned;

use super::ZeroConfig;
use super::flat_parameter::{FlatParameter, Ranks, ReduceScatter};

use super::order::Order;

/// The ranks, the settings, and the state of all FSDP units.
pub(super) struct ZeroCore {
    pub(super) ranks: Ranks,
    pub(super) config: ZeroConfig,
    pub(super) modules: Vec<WrappedModule>,
    /// The trained parameters, and each one's unit.
    pub(super) parameters: Vec<(Parameter, usize)>,
    /// Whether this rank has gradients that were not added to the others'.
    pub(super) unreduced: AtomicBool,
    /// Whether another wrapper has the parameters.
    pub(super) replaced: AtomicBool,
    /// Whether a pass has ever begun.
    pub(super) used: AtomicBool,
    pub(super) state: Mutex<ZeroState>,
}

/// What changes in a pass.
pub(super) struct ZeroState {
    pub(super) units: Vec<FsdpUnit>,
    /// Whether `begin` was called and the pass has not ended.
    pub(super) begun: bool,
    /// Whether a pass was refused, which may have added to any leaf.
    pub(super) refused: bool,
    /// Sites of each parameter that backward has not come to.
    pub(super) sites_left: Vec<usize>,
    /// Whether a parameter got a gradient since the last synchronisation.
    pub(super) touched: Vec<bool>,
    pub(super) order: Order,
    /// Units that are unsharded for modules which are expected soon.
    pub(super) prefetched: Vec<usize>,
    /// How many [`Gathered`](super::Gathered) live, for which all values stay here.
    pub(super) held: usize,
    /// Why values that were written meanwhile are lost, if they are.
    pub(super) not_kept: Option<String>,
    /// The order in which units send their gradients, the last first: the same on all ranks.
    pub(super) send_order: Vec<usize>,
    /// How many units have not sent their gradients in this pass: the first ones of that order.
    pub(super) unsent: usize,
    /// In which order forward passes use units, where every rank keeps all values; none until it is known.
    pub(super) use_order: Option<Vec<usize>>,
    /// How many times rank 0 was asked for it.
    pub(super) asked: usize,
    /// Reduce-scatters under way: unit, flat parameter, call.
    pub(super) sent: VecDeque<(usize, usize, ReduceScatter)>,
}

/// A module with hooks. Modules are numbered in order of registration, each before those inside it.
pub(super) struct WrappedModule {
    pub(super) unit: usize,
    /// The other units of the modules around it.
    pub(super) around: Vec<usize>,
}

/// Parameters that are unsharded together, in a flat parameter for each dtype.
pub(super) struct FsdpUnit {
    pub(super) flats: Vec<FlatParameter>,
    /// The modules it belongs to: the first and the last.
    pub(super) modules: Option<(usize, usize)>,
    /// Whether parameters are used outside modules, so that values stay until a pass is over.
    pub(super) outside: bool,
    /// Parameters whose gradients have not arrived.
    pub(super) missing: usize,
    /// Trained parameters.
    pub(super) trained: usize,
}

impl FsdpUnit {
    pub(super) fn new(flats: Vec<FlatParameter>, modules: Option<(usize, usize)>) -> FsdpUnit {
        let trained = flats.iter().filter(|f| f.trained).map(|f| f.members.len()).sum();
        FsdpUnit { flats, modules, outside: modules.is_none(), missing: trained, trained }
    }
}

/// Where a tensor that is spread is: its FSDP unit, the flat parameter there, and the member there, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) unit: usize,
    pub(super) flat: usize,
    pub(super) member: usize,
}

impl ZeroState {
    /// The flat parameter of a place.
    pub(super) fn flat(&mut self, place: &Place) -> &mut FlatParameter {
        &mut self.units[place.unit].flats[place.flat]
    }
}

impl ZeroCore {
    pub(super) fn new(
        ranks: Ranks,
        config: ZeroConfig,
        units: Vec<FsdpUnit>,
        modules: Vec<WrappedModule>,
    ) -> ZeroCore {
        let of_unit = |(u, unit): (usize, &FsdpUnit)| {
            let trained = unit.flats.iter().filter(|f| f.trained).flat_map(|f| &f.members);
            trained.map(move |m| (m.parameter.clone(), u)).collect::<Vec<_>>()
        };
        let parameters: Vec<_> = units.iter().enumerate().flat_map(of_unit).collect();
        let sites_left = parameters.iter().map(|(p, _)| p.leaves().len()).collect();
        let (touched, unsent) = (vec![false; parameters.len()], units.len());
        let state = ZeroState {
            units,
            begun: false,
            refused: false,
            sites_left,
            touched,
            order: Order::new(modules.len()),
            prefetched: Vec::new(),
            held: 0,
            not_kept: None,
            send_order: (0..unsent).collect(),
            unsent,
            use_order: None,
            asked: 0,
            sent: VecDeque::new(),
        };
        let ([unreduced, replaced, used], state) = ([false; 3].map(AtomicBool::new), Mutex::new(state));
        ZeroCore { ranks, config, modules, parameters, unreduced, replaced, used, state }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ZeroState> {
        unpoisoned(self.state.lock())
    }

    /// Another wrapper has the parameters.
    pub(super) fn mark_replaced(&self) {
        self.replaced.store(true, Ordering::Relaxed);
    }

    /// Whether a pass has ever begun.
    pub(super) fn was_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn is_replaced(&self) -> bool {
        self.replaced.load(Ordering::Relaxed)
    }

    /// Whether this rank has gradients that were not added to the others'.
    pub(super) fn has_unreduced(&self) -> bool {
        self.unreduced.load(Ordering::Relaxed)
    }

    /// The trained parameters of the model.
    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().map(|(parameter, _)| parameter)
    }
}
