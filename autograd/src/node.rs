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

use std::cell::Cell;
use std::sync::{Arc, Mutex, OnceLock};

use phalanx_tensor::{DType, Device, Dims, Tensor};
use smallvec::SmallVec;

use crate::backward::Backward;
use crate::checkpoint::Recomputation;
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
    /// Later operations have higher numbers; see [`crate::sequence`].
    pub(crate) seq: u64,
    /// A number that no other node has.
    pub(crate) id: u64,
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
    Leaf(Box<LeafState>),
    /// Computes its inputs' gradients; gone once its saved values are freed.
    Operation(Mutex<Option<Arc<dyn Backward>>>),
    /// Gives way to the graph that it recomputes; gone once that has happened.
    Checkpoint(Mutex<Option<Arc<Recomputation>>>),
}

impl Node {
    /// The device whose worker runs it: its first output's.
    pub(crate) fn device(&self) -> Device {
        self.outputs[0].device
    }

    pub(crate) fn leaf(&self) -> Option<&LeafState> {
        match &self.body {
            Body::Leaf(state) => Some(state),
            Body::Operation(_) | Body::Checkpoint(_) => None,
        }
    }

    /// Order among the ready ones: leaves at once, so that gradients are complete early; else the latest first.
    pub(crate) fn priority(&self) -> u64 {
        if self.leaf().is_some() { u64::MAX } else { self.seq }
    }

    /// Whether a gradient may be added to the leaf's buffer unseen.
    pub(crate) fn takes_in_place(&self) -> bool {
        self.leaf().is_some_and(LeafState::has_buffer) && !self.has_grad_hooks()
    }

    pub(crate) fn hooks(&self) -> &Mutex<Hooks> {
        self.hooks.get_or_init(Box::default)
    }
}

/// What a node kept alive.
struct Kept {
    _inputs: Edges,
    _body: Body,
}

thread_local! {
    /// What nodes dropped during another node's drop have kept, to be dropped after it; `None` outside of one.
    static DROPPED: Cell<Option<Vec<Kept>>> = const { Cell::new(None) };
}

impl Drop for Node {
    /// Takes the graph behind it apart without recursion: neither a chain of a million operations nor one that
    /// runs through saved values overflows the stack.
    fn drop(&mut self) {
        if self.leaf().is_some() {
            return;
        }
        let body = std::mem::replace(&mut self.body, Body::Operation(Mutex::new(None)));
        let kept = Kept { _inputs: std::mem::take(&mut self.inputs), _body: body };
        // While a thread ends its list may be gone; then there is nothing for it but recursion.
        let _ = DROPPED.try_with(|dropped| match dropped.take() {
            Some(mut list) => {
                list.push(kept);
                dropped.set(Some(list));
            }
            None => {
                dropped.set(Some(Vec::new()));
                let outermost = Outermost(dropped);
                drop(kept);
                while let Some(kept) = outermost.next() {
                    drop(kept);
                }
            }
        });
    }
}

/// The drop that takes the others' remains apart.
struct Outermost<'a>(&'a Cell<Option<Vec<Kept>>>);

impl Outermost<'_> {
    fn next(&self) -> Option<Kept> {
        let mut list = self.0.take()?;
        let next = list.pop();
        self.0.set(Some(list));
        next
    }
}

impl Drop for Outermost<'_> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}
