//! What moves through a pass: nodes with their gradients, and gradients on their way to nodes.

use std::cmp::Reverse;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::node::{Edge, Node};
use crate::{Result, Var};

/// Gradients of a node's outputs.
pub(crate) type NodeGrads = SmallVec<[Option<Var>; 1]>;

/// A node with the gradients that reached it. The greatest runs first.
pub(super) struct Task {
    pub(super) node: Arc<Node>,
    pub(super) grads: NodeGrads,
    /// Whether a sender has added its gradient to the leaf's buffer itself.
    pub(super) in_buffer: bool,
}

impl Ord for Task {
    fn cmp(&self, other: &Task) -> std::cmp::Ordering {
        let key = |t: &Task| (t.node.priority(), t.node.id);
        key(self).cmp(&key(other))
    }
}

impl PartialOrd for Task {
    fn partial_cmp(&self, other: &Task) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Task {
    fn eq(&self, other: &Task) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Task {}

/// What arrives along an edge.
pub(super) enum Arrival {
    /// A gradient.
    Grad(Var),
    /// The sender has added its gradient to the leaf's buffer itself.
    InBuffer,
    /// There is none; the receiver need not wait for it.
    Nothing,
}

/// Where a gradient comes from: the sender's sequence number and number, the greatest first, and its edge. Gradients
/// are summed in this order, in which one thread sends them.
pub(super) type Origin = (Reverse<(u64, u64)>, usize);

/// The origin of what a node sends along its edge `i`.
pub(super) fn origin(node: &Node, i: usize) -> Origin {
    (Reverse((node.seq, node.id)), i)
}

/// Where a node that runs hands its gradients to.
pub(super) trait Scheduler {
    /// Whether one gradient is still to come for the node, and no other came before.
    fn is_sole(&mut self, to: &Arc<Node>) -> bool;
    /// Takes what arrives at the end of an edge.
    fn send(&mut self, to: &Edge, from: Origin, grad: Arrival) -> Result<()>;
    /// Learns of a graph recorded during the pass; a gradient for each of `entries` follows.
    fn extend(&mut self, entries: &[Edge]);
}
