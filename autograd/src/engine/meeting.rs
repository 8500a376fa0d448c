//! Where gradients meet that arrive in an order of chance.

use std::collections::BTreeMap;

use super::task::{Arrival, Origin};
use crate::Var;

/// Gradients for one place, summed in the order of their origins, each as soon as all before it have come: no more are
/// kept than have to be.
#[derive(Default)]
pub(super) struct Meeting {
    /// Those still awaited, and those that have come before their turn, with the output that they belong to.
    awaited: BTreeMap<Origin, Option<(usize, Var)>>,
    /// Whether a worker sums what was due.
    summing: bool,
}

impl Meeting {
    /// One more is to come.
    pub(super) fn expect(&mut self, from: Origin) {
        self.awaited.insert(from, None);
    }

    /// How many are still awaited or kept.
    pub(super) fn len(&self) -> usize {
        self.awaited.len()
    }

    /// One has come.
    pub(super) fn arrive(&mut self, from: Origin, output: usize, grad: Arrival) {
        match grad {
            Arrival::Grad(grad) => drop(self.awaited.insert(from, Some((output, grad)))),
            Arrival::InBuffer | Arrival::Nothing => drop(self.awaited.remove(&from)),
        }
    }

    /// Those whose turn it is, for the caller to sum, who then says [`Meeting::summed`]; `None` while another does.
    pub(super) fn due(&mut self) -> Option<Vec<(usize, Var)>> {
        if self.summing {
            return None;
        }
        let mut due = Vec::new();
        while let Some(first) = self.awaited.first_entry()
            && first.get().is_some()
        {
            due.extend(first.remove());
        }
        self.summing = !due.is_empty();
        Some(due)
    }

    /// What was due has been summed.
    pub(super) fn summed(&mut self) {
        self.summing = false;
    }
}
