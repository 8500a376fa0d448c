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

use std::any::Any;
use std::cell::Cell;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock};

use phalanx_tensor::{DType, Device, Dims, Tensor};
use smallvec::SmallVec;

use crate::checkpoint::Recomputation;
use crate::hooks::Hooks;
use crate::leaf::LeafState;
use crate::operation::Operation;
use crate::spare;

/// One place in the graph: output `output` of `node`.
#[derive(Clone)]
pub(crate) struct Edge {
    pub(crate) node: Link,
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
        Meta { shape: tensor.layout().dims(), dtype: tensor.dtype(), device: tensor.device() }
    }

    /// Whether a tensor has this shape. (A loop: most are too short for a call to compare them.)
    #[inline]
    pub(crate) fn has_shape_of(&self, tensor: &Tensor) -> bool {
        self.shape.iter().eq(tensor.shape())
    }
}

impl std::fmt::Display for Meta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {} on {}", &self.shape[..], self.dtype, self.device)
    }
}

/// Edges to the inputs, in their order; `None` where an input needs no gradient.
pub(crate) type Edges = SmallVec<[Option<Edge>; 2]>;

/// An operation's record, or a leaf with its gradient: one allocation, the body at its end.
pub(crate) struct Node<B: ?Sized = dyn Body> {
    /// Later operations have higher numbers; see [`crate::sequence`].
    pub(crate) seq: u64,
    /// A number that no other node has.
    pub(crate) id: u64,
    pub(crate) name: &'static str,
    pub(crate) inputs: Edges,
    pub(crate) outputs: SmallVec<[Meta; 1]>,
    /// A parameter, or a view or cast of one: its gradient is weight work in a split backward.
    pub(crate) weight: bool,
    pub(crate) hooks: OnceLock<Box<Mutex<Hooks>>>,
    /// Where it was recorded, in anomaly mode.
    pub(crate) recorded: Option<Box<str>>,
    pub(crate) body: B,
}

/// What a node does in backward.
pub(crate) trait Body: Any + Send + Sync {
    /// Which of the three it is.
    fn kind(&self) -> Kind<'_>;

    /// Takes away what it holds, if it can be filled again.
    fn empty(&mut self) -> bool {
        false
    }
}

/// The bodies that there are.
pub(crate) enum Kind<'a> {
    /// Accumulates.
    Leaf(&'a LeafState),
    /// Computes its inputs' gradients.
    Operation(&'a dyn Operation),
    /// Gives way to the graph that it recomputes; gone once that has happened.
    Checkpoint(&'a Mutex<Option<Arc<Recomputation>>>),
}

impl Node {
    /// The device whose worker runs it: its first output's.
    pub(crate) fn device(&self) -> Device {
        self.outputs[0].device
    }

    pub(crate) fn leaf(&self) -> Option<&LeafState> {
        match self.body.kind() {
            Kind::Leaf(state) => Some(state),
            Kind::Operation(_) | Kind::Checkpoint(_) => None,
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

/// A node that is held by the graph. The last link takes the graph behind it apart without recursion: neither a chain
/// of a million operations nor one that runs through saved values overflows the stack.
#[derive(Clone)]
pub(crate) struct Link(Option<Arc<Node>>);

impl From<Arc<Node>> for Link {
    #[inline]
    fn from(node: Arc<Node>) -> Link {
        Link(Some(node))
    }
}

impl Deref for Link {
    type Target = Arc<Node>;

    #[inline]
    fn deref(&self) -> &Arc<Node> {
        self.0.as_ref().unwrap_or_else(|| unreachable!("only drop takes the node"))
    }
}

impl Drop for Link {
    #[inline]
    fn drop(&mut self) {
        // Where others hold it too, and let go at this very moment, the node goes here and its links take over.
        if let Some(node) = self.0.take_if(|node| Arc::strong_count(node) == 1) {
            take_apart(node);
        }
    }
}

thread_local! {
    /// Nodes to be dropped after the one that is being dropped; `None` outside of that.
    static DROPPED: Cell<Option<Vec<Arc<Node>>>> = const { Cell::new(None) };
}

fn take_apart(node: Arc<Node>) {
    // While a thread ends its list may be gone; then there is nothing for it but recursion.
    let _ = DROPPED.try_with(|dropped| match dropped.take() {
        Some(mut list) => {
            list.push(node);
            dropped.set(Some(list));
        }
        None => {
            dropped.set(Some(Vec::new()));
            let outermost = Outermost(dropped);
            spare::keep(node);
            while let Some(node) = outermost.next() {
                spare::keep(node);
            }
        }
    });
}

/// The drop that takes the others' remains apart.
struct Outermost<'a>(&'a Cell<Option<Vec<Arc<Node>>>>);

impl Outermost<'_> {
    fn next(&self) -> Option<Arc<Node>> {
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
