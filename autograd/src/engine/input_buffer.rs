//! Input buffers: gradients that have arrived at a node, which wait there until all have.
//!
//! On one thread gradients arrive in the order in which they are summed, so an [`InputBuffer`] adds each at once. From
//! several threads they arrive in any order; a [`ReorderBuffer`] holds those back that came before their turn.
//!
//! ```text
//! senders, latest recorded first    c   b   a
//! arrives                           |   |   x    a waits in the reorder buffer
//!                                   x   |   |    c is summed
//!                                       x   |    b is summed, then a, which waited for it
//! ```

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::graph::node::{Node, NodeGrads};
use crate::leaf::add_in_place;
use crate::{Result, Var};

/// What arrives along an edge.
pub(super) enum Arrival {
    /// A gradient.
    Grad(Var),
    /// The sender has added its gradient to the leaf's buffer itself.
    InLeaf,
    /// There is none; the receiver need not wait for it.
    Nothing,
}

/// Where a gradient comes from: the sender's sequence number and id, the greatest first, and its edge. Gradients are
/// summed in this order, in which one thread sends them.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sender(Reverse<(u64, u64)>, usize);

impl Sender {
    /// Of what a node sends along its edge `i`.
    #[inline]
    pub(super) fn new(node: &Node, i: usize) -> Sender {
        Sender(Reverse((node.seq, node.id)), i)
    }
}

/// The sum of what has arrived at a node.
#[derive(Default)]
pub(super) struct InputBuffer {
    pub(super) grads: NodeGrads,
    /// Whether a sender has added its gradient to the leaf's buffer itself.
    pub(super) in_leaf: bool,
}

impl InputBuffer {
    /// Nothing yet, of a node with this many outputs.
    #[inline]
    pub(super) fn new(outputs: usize) -> InputBuffer {
        InputBuffer::of(NodeGrads::of_len(outputs))
    }

    /// Whether no gradient has arrived.
    pub(super) fn is_empty(&self) -> bool {
        !self.in_leaf && self.grads.iter().all(Option::is_none)
    }

    /// A root's gradients.
    pub(super) fn of(grads: NodeGrads) -> InputBuffer {
        InputBuffer { grads, in_leaf: false }
    }

    /// Adds what arrives.
    #[inline(always)]
    pub(super) fn take(&mut self, output: usize, arrival: Arrival, create_graph: bool) -> Result<()> {
        match arrival {
            Arrival::Grad(grad) => return self.add(output, grad, create_graph),
            Arrival::InLeaf => self.in_leaf = true,
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
        Some(sum) if create_graph => sum.add(&grad)?,
        Some(sum) => add_in_place(sum, grad)?,
        None => grad,
    });
    Ok(())
}

/// Puts the gradients of one node in the order of their senders. Each is due as soon as all before it have arrived, so no
/// more are held than necessary.
#[derive(Default)]
pub(super) struct ReorderBuffer {
    /// Senders still awaited, and gradients that arrived before their turn, with the output that they belong to.
    awaited: BTreeMap<Sender, Option<(usize, Var)>>,
    /// Whether a worker sums what was due.
    summing: bool,
}

impl ReorderBuffer {
    /// One more is to come.
    pub(super) fn expect(&mut self, from: Sender) {
        self.awaited.insert(from, None);
    }

    /// The number of senders that are still awaited or whose gradient is held back.
    pub(super) fn len(&self) -> usize {
        self.awaited.len()
    }

    /// Takes the gradient of one sender.
    pub(super) fn arrive(&mut self, from: Sender, output: usize, arrival: Arrival) {
        match arrival {
            Arrival::Grad(grad) => drop(self.awaited.insert(from, Some((output, grad)))),
            Arrival::InLeaf | Arrival::Nothing => drop(self.awaited.remove(&from)),
        }
    }

    /// The gradients whose turn it is. The caller sums them and then calls [`ReorderBuffer::summed`]. `None` while another
    /// worker sums.
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
