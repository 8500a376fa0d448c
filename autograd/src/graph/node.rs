//! Nodes and edges. A node is one recorded operation, a leaf, or a checkpoint. What it does in backward is its [`GradFn`],
//! whose implementations are in `backward.rs`, `leaf.rs` and `checkpoint.rs`.

use std::any::{Any, TypeId};
use std::cell::{Cell, RefCell};
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock};

use phalanx_tensor::{DType, Device, Dims, Tensor};
use smallvec::SmallVec;

use crate::graph::hooks::Hooks;
use crate::graph::memory::{FreeList, SmallList};
use crate::graph::rematerialized::Rematerialized;
use crate::{Error, Result, Var};

/// Gradients in the order of an operation's inputs; `None` where there is none.
pub type Grads = SmallVec<[Option<Var>; 2]>;

/// Gradients of a node's outputs.
pub(crate) type NodeGrads = SmallList<Option<Var>, 1>;

/// Edges to the inputs, in their order; `None` where an input needs no gradient.
pub(crate) type Edges = SmallList<Option<Edge>, 2>;

/// One output of a node. Two words, as is an `Option<Edge>`.
#[derive(Clone)]
pub(crate) struct Edge {
    pub(crate) node: Link,
    output: u32,
    kind: NodeKind,
}

/// How the engine runs a node. Each edge stores a copy of its node's kind, so that the engine seldom has to load the
/// node.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum NodeKind {
    /// [`GradFn::apply`] computes the gradients of its inputs.
    Operation,
    /// A leaf: adds the gradient to its slot.
    Leaf,
    /// [`GradFn::expand`] records a graph that takes its place.
    Subgraph,
}

impl Edge {
    #[inline]
    pub(crate) fn new(node: impl Into<Link>, output: usize) -> Edge {
        let node = node.into();
        Edge { output: output as u32, kind: node.kind, node }
    }

    /// Which of the node's outputs.
    #[inline]
    pub(crate) fn output(&self) -> usize {
        self.output as usize
    }

    /// The shape, dtype and device that the gradient must have.
    #[inline]
    pub(crate) fn meta(&self) -> &Meta {
        &self.node.outputs[self.output()]
    }

    /// Whether it leads to a leaf.
    #[inline]
    pub(crate) fn is_to_leaf(&self) -> bool {
        self.kind == NodeKind::Leaf
    }
}

/// Shape, dtype and device of an output, which its gradient must have too.
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

    /// Whether a tensor has this shape. (A loop: most shapes are too short for a call to compare them.)
    #[inline]
    pub(crate) fn has_shape_of(&self, tensor: &Tensor) -> bool {
        self.shape.iter().eq(tensor.shape())
    }

    /// Refuses a gradient of `op` that has another shape, dtype or device.
    #[inline]
    pub(crate) fn check(&self, op: &'static str, grad: &Var) -> Result<()> {
        let tensor = grad.tensor();
        let fits =
            self.has_shape_of(tensor) && tensor.dtype() == self.dtype && tensor.device() == self.device;
        if fits { Ok(()) } else { Err(self.misfit(op, tensor)) }
    }

    #[cold]
    fn misfit(&self, op: &'static str, grad: &Tensor) -> Error {
        Error::Gradient { op, got: Meta::of(grad).to_string(), wanted: self.to_string() }
    }
}

impl std::fmt::Display for Meta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {} on {}", &self.shape[..], self.dtype, self.device)
    }
}

/// A node: one allocation, with its [`GradFn`] at the end.
pub(crate) struct Node<F: ?Sized = dyn GradFn> {
    /// Later operations have higher numbers; see [`crate::graph::sequence`].
    pub(crate) seq: u64,
    /// A number that no other node has.
    pub(crate) id: u64,
    pub(crate) name: &'static str,
    pub(crate) inputs: Edges,
    pub(crate) outputs: SmallList<Meta, 1>,
    /// A parameter, or a view or cast of one: its gradient is weight work in a split backward.
    pub(crate) weight: bool,
    pub(crate) kind: NodeKind,
    pub(crate) hooks: OnceLock<Box<Mutex<Hooks>>>,
    /// Where it was recorded, in anomaly mode.
    pub(crate) recorded: Option<Box<str>>,
    pub(crate) grad_fn: F,
}

/// The backward function of a node (PyTorch's `grad_fn`).
pub(crate) trait GradFn: Any + Send + Sync {
    /// Computes the gradients of the inputs from `grads`, those of the outputs. `None` if what this needs was freed.
    fn apply(
        &self,
        _node: &Arc<Node>,
        _grads: &mut [Option<Var>],
        _call: &Call<'_>,
    ) -> Option<Result<Grads>> {
        None
    }

    /// Records the graph that stands in the node's place, and says for every output which value of that graph its gradient
    /// belongs to. `None` if what this needs was freed; it is freed now unless it is `kept` for another pass.
    fn expand(&self, _node: &Arc<Node>, _kept: bool) -> Option<Result<Vec<Option<Edge>>>> {
        None
    }

    /// Frees the saved values.
    fn free(&self) {}

    /// [`crate::Backward::release`]. Where another pass is using the function, nothing is freed.
    fn release(&self, _later: &dyn Fn(usize) -> bool) {}

    /// [`crate::Backward::keeps_gradient`].
    fn keeps_gradient(&self, _output: usize) -> bool {
        true
    }

    /// [`crate::Backward::rematerialized`].
    fn rematerialized(&self, _output: usize) -> Option<Arc<Rematerialized>> {
        None
    }

    /// [`crate::Backward::SPLITS`].
    fn splits(&self) -> bool {
        true
    }

    /// Drops its content, if the node can be filled again. Returns its type then.
    fn recycle(&mut self) -> Option<TypeId> {
        None
    }
}

/// The number that a backward pass gives a node: an index plus 1, so that an `Option` of it is no larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeIndex(NonZeroU32);

impl NodeIndex {
    #[inline]
    pub(crate) fn at(index: usize) -> NodeIndex {
        NodeIndex(NonZeroU32::MIN.saturating_add(index as u32))
    }

    #[inline]
    pub(crate) fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// One call of [`GradFn::apply`]: what the pass asks for.
pub(crate) struct Call<'a> {
    /// The node that each input's gradient goes to; `None` where none is wanted.
    pub(crate) targets: &'a [Option<NodeIndex>],
    pub(crate) create_graph: bool,
    /// Whether another pass will run the node.
    pub(crate) kept: bool,
    /// Whether hooks look at the outputs' gradients afterwards.
    pub(crate) watched: bool,
    /// Whether the pass returns a gradient of a node's.
    pub(crate) is_captured: &'a dyn Fn(&Arc<Node>) -> bool,
    /// The inputs whose gradient may be added to a leaf's buffer, and those for which that was done.
    pub(crate) sinks: InputMask,
    pub(crate) sunk: Cell<InputMask>,
    /// The inputs whose gradient went past the operation that has made them.
    pub(crate) passed_by: Cell<InputMask>,
}

impl Call<'_> {
    /// Whether the gradient of input `i` is wanted.
    #[inline]
    pub(crate) fn needs(&self, i: usize) -> bool {
        self.targets[i].is_some()
    }
}

/// A set of some of the first 64 inputs.
#[derive(Clone, Copy, Default)]
pub(crate) struct InputMask(u64);

impl InputMask {
    /// With input `i`, if it is one of the first 64.
    #[inline]
    pub(crate) fn and(self, i: usize) -> InputMask {
        if i < 64 { InputMask(self.0 | 1 << i) } else { self }
    }

    #[inline]
    pub(crate) fn contains(self, i: usize) -> bool {
        i < 64 && self.0 >> i & 1 == 1
    }
}

impl Node {
    /// The device whose worker runs it: its first output's.
    pub(crate) fn device(&self) -> Device {
        self.outputs[0].device
    }

    /// Priority among ready nodes: leaves first, so that their gradients are complete early; then the node that was
    /// recorded last.
    pub(crate) fn priority(&self) -> u64 {
        if self.kind == NodeKind::Leaf { u64::MAX } else { self.seq }
    }

    /// Whether a split backward defers the gradient of the input at this edge of the node's.
    #[inline]
    pub(crate) fn defers(&self, input: &Edge) -> bool {
        input.node.weight && self.grad_fn.splits()
    }

    pub(crate) fn hooks(&self) -> &Mutex<Hooks> {
        self.hooks.get_or_init(Box::default)
    }

    /// Drops its content beside its links, if it can be filled again: by a function of the type returned. (Its outputs'
    /// metadata stays; it is overwritten then.)
    fn recycle(&mut self) -> Option<TypeId> {
        let grad_fn = self.grad_fn.recycle()?;
        self.hooks.take();
        self.recorded = None;
        Some(grad_fn)
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
    /// The node, if this link is its only owner.
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
    /// Empty nodes of operations: to get one from the allocator and to return it takes longer than to fill it.
    static FREE: RefCell<FreeList<Arc<Node>>> = RefCell::default();
}

/// An empty node with a function of this type, if this thread has one.
pub(crate) fn take_free(grad_fn: TypeId) -> Option<Arc<Node>> {
    FREE.try_with(|free| free.try_borrow_mut().ok()?.take(grad_fn)).ok().flatten()
}

/// Keeps an empty node whose function is of this type.
fn keep_free(grad_fn: TypeId, node: Arc<Node>) {
    // While a thread ends its list may be gone; then the node is dropped.
    let _ = FREE.try_with(|free| free.try_borrow_mut().ok()?.put(grad_fn, node));
}

fn take_apart(node: Arc<Node>) {
    // While a thread ends its list may be gone; then the nodes are dropped by recursion.
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
                let Some(sole) = Arc::get_mut(&mut node) else { continue };
                next = unlink(&mut sole.inputs, &outermost);
                if let Some(grad_fn) = sole.recycle() {
                    keep_free(grad_fn, node);
                }
            }
        }
    });
}

/// Takes the links away. Returns one of the nodes that had no other owner; the others are dropped later.
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

/// The outermost drop on this thread, which takes apart the nodes that drops inside it leave.
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

#[cfg(test)]
mod tests {
    use super::InputMask;

    #[test]
    fn only_the_first_64_inputs_count() {
        let some = [0, 5, 63, 64, 70, 1 << 40].into_iter().fold(InputMask::default(), InputMask::and);
        let found: Vec<usize> = (0..200).filter(|&i| some.contains(i)).collect();
        assert_eq!(found, [0, 5, 63]);
    }
}
