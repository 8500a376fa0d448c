//! A node of the graph: one recorded operation, or a leaf.
//!
//! ```text
//!     w (leaf) ----+
//!                  v
//!     x (leaf) -> mul -> sum -> loss        forward: results point at the node that made them
//!                  |      |
//!     x <---------mul <--sum <- backward    edges: a node points at the nodes of its inputs
//! ```
//! There is no tape: a result holds its node, a node holds its inputs' nodes, and what nobody holds is gone.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use phalanx_tensor::{DType, Device, Dims, Tensor};
use smallvec::SmallVec;

use crate::backward::Backward;
use crate::hooks::Hooks;
use crate::leaf::LeafState;

/// One place in the graph: output `output` of `node`.
#[derive(Clone)]
pub(crate) struct Edge {
    pub(crate) node: Arc<Node>,
    pub(crate) output: usize,
}

/// What a gradient must look like.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Meta {
    pub(crate) shape: Dims,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
}

impl Meta {
    pub(crate) fn of(tensor: &Tensor) -> Meta {
        Meta { shape: Dims::from_slice(tensor.shape()), dtype: tensor.dtype(), device: tensor.device() }
    }
}

impl std::fmt::Display for Meta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {} on {}", &self.shape[..], self.dtype, self.device)
    }
}

/// Edges to the inputs, in their order; `None` where an input needs no gradient.
pub(crate) type Edges = SmallVec<[Option<Edge>; 2]>;

/// An operation's record, or a leaf with its gradient.
pub(crate) struct Node {
    /// Later operations have higher numbers.
    pub(crate) seq: u64,
    pub(crate) name: &'static str,
    pub(crate) inputs: Edges,
    pub(crate) outputs: SmallVec<[Meta; 1]>,
    pub(crate) body: Body,
    /// A parameter, or a view or cast of one: its gradient is weight work in a split backward.
    pub(crate) weight: bool,
    pub(crate) hooks: OnceLock<Box<Mutex<Hooks>>>,
    /// Where it was recorded, in anomaly mode.
    pub(crate) recorded: Option<Box<str>>,
}

/// What a node does in backward.
pub(crate) enum Body {
    /// Accumulates.
    Leaf(LeafState),
    /// Computes its inputs' gradients; gone once its saved values are freed.
    Operation(Mutex<Option<Arc<dyn Backward>>>),
}

static SEQUENCE: AtomicU64 = AtomicU64::new(0);

/// The next sequence number.
pub(crate) fn next_sequence() -> u64 {
    SEQUENCE.fetch_add(1, Ordering::Relaxed)
}

impl Node {
    /// The device whose worker runs it: its first output's.
    pub(crate) fn device(&self) -> Device {
        self.outputs[0].device
    }

    pub(crate) fn leaf(&self) -> Option<&LeafState> {
        match &self.body {
            Body::Leaf(state) => Some(state),
            Body::Operation(_) => None,
        }
    }

    /// Order among the ready ones: leaves at once, so that gradients are complete early; else the latest first.
    pub(crate) fn priority(&self) -> u64 {
        if self.leaf().is_some() { u64::MAX } else { self.seq }
    }

    pub(crate) fn hooks(&self) -> &Mutex<Hooks> {
        self.hooks.get_or_init(Box::default)
    }
}

impl Drop for Node {
    /// Takes the graph behind it apart without recursion: a chain of a million operations must not overflow the
    /// stack.
    fn drop(&mut self) {
        release_body(&mut self.body);
        let mut waiting: SmallVec<[Edge; 8]> = self.inputs.drain(..).flatten().collect();
        while let Some(edge) = waiting.pop() {
            if let Some(mut node) = Arc::into_inner(edge.node) {
                // Saved values may hold nodes too, but only nodes that are also among the inputs, which are alive.
                release_body(&mut node.body);
                waiting.extend(node.inputs.drain(..).flatten());
            }
        }
    }
}

fn release_body(body: &mut Body) {
    if let Body::Operation(backward) = body {
        drop(backward.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}
