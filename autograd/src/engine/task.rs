//! What moves through a pass: nodes with their gradients, and gradients on their way to nodes.

use std::cmp::Reverse;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::Arc;

use super::pending::Pending;
use crate::node::{Edge, Node};
use crate::short::Short;
use crate::{Result, Var};

/// Gradients of a node's outputs.
pub(crate) type NodeGrads = Short<Option<Var>, 1>;

/// A node that a pass begins at, with the gradients that it has.
pub(super) struct Root {
    pub(super) node: Arc<Node>,
    pub(super) grads: NodeGrads,
}

/// A node of the pass: of the graph behind the roots, which are there until it ends, or of one recorded since.
#[derive(Clone)]
pub(super) enum Held<'g> {
    Lent(&'g Arc<Node>),
    Own(Arc<Node>),
}

impl Deref for Held<'_> {
    type Target = Arc<Node>;

    #[inline]
    fn deref(&self) -> &Arc<Node> {
        match self {
            Held::Lent(node) => node,
            Held::Own(node) => node,
        }
    }
}

/// A node's place in the plan: its index and 1, so that one that may be none is a number too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place(NonZeroU32);

impl Place {
    #[inline]
    pub(super) fn at(index: usize) -> Place {
        Place(NonZeroU32::MIN.saturating_add(index as u32))
    }

    #[inline]
    pub(super) fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// Where the gradients of a node's inputs go; `None` where none is wanted.
pub(super) type Targets = Short<Option<Place>, 2>;

/// A node that has everything it waited for. The greatest runs first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ready {
    pub(super) priority: u64,
    pub(super) id: u64,
    pub(super) place: Place,
}

/// A node that runs, with what has reached it.
pub(super) struct Task<'g> {
    pub(super) node: Held<'g>,
    pub(super) targets: Targets,
    pub(super) pending: Pending,
}

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
#[inline]
pub(super) fn origin(node: &Node, i: usize) -> Origin {
    (Reverse((node.seq, node.id)), i)
}

/// Where a node that runs hands its gradients to.
pub(super) trait Scheduler {
    /// Whether one gradient is still to come for the node, and no other came before.
    fn is_sole(&mut self, to: Place) -> bool;
    /// Takes what arrives at an output of a node.
    fn send(&mut self, to: Place, output: usize, from: Origin, grad: Arrival) -> Result<()>;
    /// Learns of a graph recorded during the pass; a gradient for each place that it returns follows, from `node`.
    fn extend(&mut self, node: &Node, entries: &[Edge]) -> Targets;
}
