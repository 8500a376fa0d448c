//! Gradients that wait at nodes until all have arrived.

use super::add;
use super::task::{Arrival, NodeGrads};
use crate::{Result, Var};

/// The sum of what has arrived at a node.
#[derive(Default)]
pub(super) struct Pending {
    pub(super) grads: NodeGrads,
    /// Whether a sender has added its gradient to the leaf's buffer itself.
    pub(super) in_buffer: bool,
}

impl Pending {
    /// Nothing yet, of a node with this many outputs.
    #[inline]
    pub(super) fn new(outputs: usize) -> Pending {
        Pending::of(NodeGrads::of_len(outputs))
    }

    /// Whether nothing has come.
    pub(super) fn is_empty(&self) -> bool {
        !self.in_buffer && self.grads.iter().all(Option::is_none)
    }

    /// A root's gradients.
    pub(super) fn of(grads: NodeGrads) -> Pending {
        Pending { grads, in_buffer: false }
    }

    /// Adds what arrives.
    #[inline(always)]
    pub(super) fn take(&mut self, output: usize, grad: Arrival, create_graph: bool) -> Result<()> {
        match grad {
            Arrival::Grad(grad) => return self.add(output, grad, create_graph),
            Arrival::InBuffer => self.in_buffer = true,
            Arrival::Nothing => {}
        }
        Ok(())
    }

    #[inline(always)]
    pub(super) fn add(&mut self, output: usize, grad: Var, create_graph: bool) -> Result<()> {
        let slot = &mut self.grads[output];
        if slot.is_some() {
            return add_to(slot, grad, create_graph);
        }
        *slot = Some(grad);
        Ok(())
    }
}

/// Adds to what has come already.
#[inline(never)]
fn add_to(slot: &mut Option<Var>, grad: Var, create_graph: bool) -> Result<()> {
    *slot = Some(match slot.take() {
        Some(sum) => add(sum, grad, create_graph)?,
        None => grad,
    });
    Ok(())
}
