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

use std::any::{Any, TypeId};
use std::cell::Cell;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock};

use phalanx_tensor::{DType, Device, Dims, Tensor};

use crate::checkpoint::Recomputation;
use crate::hooks::Hooks;
use crate::leaf::LeafState;
use crate::operation::Operation;
use crate::short::Short;
use crate::spare;

/// One place in the graph: an output of a node. Two words, as is an edge that may be none.
#[derive(Clone)]
pub(crate) struct Edge {
    pub(crate) node: Link,
    output: u32,
    kind: Kind,
}

/// Whether the node is a leaf, so that few have to look at it.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Inner,
    Leaf,
}

impl Edge {
    #[inline]
    pub(crate) fn new(node: impl Into<Link>, output: usize) -> Edge {
        let node = node.into();
        let kind = if node.is_leaf { Kind::Leaf } else { Kind::Inner };
        Edge { output: output as u32, kind, node }
    }

    /// Which of the node's outputs.
    #[inline]
    pub(crate) fn output(&self) -> usize {
        self.output as usize
    }

    /// What the gradient must look like.
    #[inline]
    pub(crate) fn meta(&self) -> &Meta {
        &self.node.outputs[self.output()]
    }

    /// Whether a gradient may be added to the buffer of the leaf that it leads to unseen.
    #[inline]
    pub(crate) fn takes_in_place(&self) -> bool {
        self.leaf().is_some_and(LeafState::has_buffer) && !self.node.has_grad_hooks()
    }

    /// The leaf that it leads to, if it is one.
    #[inline]
    pub(crate) fn leaf(&self) -> Option<&LeafState> {
        if self.kind == Kind::Leaf { self.node.leaf() } else { None }
    }
}

/// What a gradient must look like.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Meta {
    pub(crate) shape: Dims,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
}

impl Default for Meta {
    fn default() -> Meta {
        Meta { shape: Dims::new(), dtype: DType::F32, device: Device::CPU }
    }
}

impl Meta {
    #[inline]
    pub(crate) fn of(tensor: &Tensor) -> Meta {
        Meta { shape: tensor.layout().dims(), dtype: tensor.dtype(), device: tensor.device() }
    }

    /// Whether a tensor has this shape. (A loop: most are too short for a call to compare them.)
    #[inline]
    pub(crate) fn has_shape_of(&self, tensor: &Tensor) -> bool {
        self.shape.iter().eq(tensor.shape())
    }

    /// Whether it is this tensor's.
    #[inline]
    pub(crate) fn is_of(&self, tensor: &Tensor) -> bool {
        self.has_shape_of(tensor) && tensor.dtype() == self.dtype && tensor.device() == self.device
    }
}

impl std::fmt::Display for Meta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {} on {}", &self.shape[..], self.dtype, self.device)
    }
}

/// Edges to the inputs, in their order; `None` where an input needs no gradient.
pub(crate) type Edges = Short<Option<Edge>, 2>;

/// An operation's record, or a leaf with its gradient: one allocation, the body at its end.
pub(crate) struct Node<B: ?Sized = dyn Body> {
    /// Later operations have higher numbers; see [`crate::sequence`].
    pub(crate) seq: u64,
    /// A number that no other node has.
    pub(crate) id: u64,
    pub(crate) name: &'static str,
    pub(crate) inputs: Edges,
    pub(crate) outputs: Short<Meta, 1>,
    /// A parameter, or a view or cast of one: its gradient is weight work in a split backward.
    pub(crate) weight: bool,
    pub(crate) is_leaf: bool,
    pub(crate) hooks: OnceLock<Box<Mutex<Hooks>>>,
    /// Where it was recorded, in anomaly mode.
    pub(crate) recorded: Option<Box<str>>,
    pub(crate) body: B,
}

/// What a node does in backward: one of three things.
pub(crate) trait Body: Any + Send + Sync {
    /// It accumulates.
    fn leaf(&self) -> Option<&LeafState> {
        None
    }

    /// It computes its inputs' gradients.
    fn operation(&self) -> Option<&dyn Operation> {
        None
    }

    /// It gives way to the graph that it recomputes; gone once that has happened.
    fn checkpoint(&self) -> Option<&Mutex<Option<Arc<Recomputation>>>> {
        None
    }

    /// Takes away what it holds, if it can be filled again; returns its type then.
    fn empty(&mut self) -> Option<TypeId> {
        None
    }
}

impl Node {
    /// The device whose worker runs it: its first output's.
    pub(crate) fn device(&self) -> Device {
        self.outputs[0].device
    }

    #[inline]
    pub(crate) fn leaf(&self) -> Option<&LeafState> {
        if self.is_leaf { self.body.leaf() } else { None }
    }

    /// Order among the ready ones: leaves at once, so that gradients are complete early; else the latest first.
    pub(crate) fn priority(&self) -> u64 {
        if self.is_leaf { u64::MAX } else { self.seq }
    }

    pub(crate) fn hooks(&self) -> &Mutex<Hooks> {
        self.hooks.get_or_init(Box::default)
    }

    /// Takes away what it holds beside its links, if it can be filled again: by a body of the type returned. (What its
    /// outputs looked like is no matter.)
    fn empty(&mut self) -> Option<TypeId> {
        let body = self.body.empty()?;
        self.hooks.take();
        self.recorded = None;
        Some(body)
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

impl Link {
    /// The node, if nobody else holds it.
    #[inline]
    fn take_sole(&mut self) -> Option<Arc<Node>> {
        // Where others hold it too, and let go at this very moment, the node goes here and its links take over.
        self.0.take_if(|node| Arc::strong_count(node) == 1)
    }
}

impl Drop for Link {
    #[inline]
    fn drop(&mut self) {
        if let Some(node) = self.take_sole() {
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
            let mut next = Some(node);
            while let Some(mut node) = next.take().or_else(|| outermost.next()) {
                let Some(empty) = Arc::get_mut(&mut node) else { continue };
                next = unlink(&mut empty.inputs, &outermost);
                if let Some(body) = empty.empty() {
                    spare::keep(body, node);
                }
            }
        }
    });
}

/// Takes the links away. Returns one of the nodes that nobody else holds; the others are to be dropped later.
fn unlink(inputs: &mut Edges, outermost: &Outermost<'_>) -> Option<Arc<Node>> {
    let mut first = None;
    for edge in inputs.iter_mut().flatten() {
        if let Some(node) = edge.node.take_sole()
            && let Some(other) = first.replace(node)
        {
            outermost.later(other);
        }
    }
    inputs.clear();
    first
}

/// The drop that takes the others' remains apart.
struct Outermost<'a>(&'a Cell<Option<Vec<Arc<Node>>>>);

impl Outermost<'_> {
    fn later(&self, node: Arc<Node>) {
        let mut list = self.0.take().unwrap_or_default();
        list.push(node);
        self.0.set(Some(list));
    }

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
