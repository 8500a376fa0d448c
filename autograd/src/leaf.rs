//! [`Leaf`]: a tensor that requires a gradient, such as a parameter; [`Slot`]: where its gradient is accumulated.

use std::any::Any;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use phalanx_kernels as kernels;
use phalanx_tensor::{Category, Context, DType, Tensor, unpoisoned};

use crate::graph::hooks::HookHandle;
use crate::graph::memory::SmallList;
use crate::graph::node::{Edge, GradFn, Meta, Node, NodeKind};
use crate::graph::sequence::next_sequence;
use crate::{Error, Result, Var};

/// Where a leaf's gradient goes.
#[derive(Clone, Debug)]
pub enum Slot {
    /// Into a tensor of the leaf's own, made by the first contribution, in this dtype (`None`: the leaf's).
    Owned(Option<DType>),
    /// Always accumulated in place into this tensor, a view into a buffer that the caller owns and zeroes. Its
    /// dtype may differ from the leaf's (f32 main gradients of a bf16 model).
    Into(Tensor),
}

/// The content of a leaf's node: its tensor and its gradient slot.
pub(crate) struct LeafState {
    held: RwLock<Held>,
    slot: Mutex<SlotState>,
}

/// The tensor and a version that counts on when the tensor is replaced.
#[derive(Clone)]
struct Held {
    tensor: Tensor,
    base: u64,
    attached: u64,
    /// Whether its tensor was ever released, that is, replaced by a stand-in without elements (as ZeRO-3 does between
    /// uses).
    was_released: bool,
}

struct SlotState {
    slot: Slot,
    grad: Option<Var>,
    /// How often the gradient was zeroed.
    zeroed: u64,
}

/// A leaf's tensor with its version, to be restored later: see [`Leaf::stash`]. For weight stashing (PipeDream).
#[derive(Clone)]
pub struct Stash(Held);

/// A handle on a leaf: the tensor it holds, its gradient slot, its hooks. Cloning shares it.
#[derive(Clone)]
pub struct Leaf(pub(crate) Arc<Node>);

impl Leaf {
    /// A leaf that holds `tensor`. In a split backward pass the gradient of a `parameter` is left out by
    /// [`crate::backward_inputs`] and computed by [`crate::WeightWork::run`] (the W of zero-bubble pipelines).
    ///
    /// # Errors
    /// If the dtype is not a floating-point one.
    pub fn new(tensor: Tensor, parameter: bool) -> Result<Leaf> {
        if !tensor.dtype().is_float() {
            let wanted = "a floating-point dtype, to require a gradient";
            return Err(phalanx_tensor::Error::dtype("leaf", tensor.dtype(), wanted).into());
        }
        let outputs = SmallList::of([Meta::of(&tensor)].into_iter());
        let held = Held { base: 0, attached: tensor.version(), tensor, was_released: false };
        let held = RwLock::new(held);
        let slot = Mutex::new(SlotState { slot: Slot::Owned(None), grad: None, zeroed: 0 });
        let (seq, id) = next_sequence();
        Ok(Leaf(Arc::new(Node {
            seq,
            id,
            name: "leaf",
            inputs: SmallList::default(),
            outputs,
            grad_fn: LeafState { held, slot },
            weight: parameter,
            kind: NodeKind::Leaf,
            hooks: Default::default(),
            recorded: None,
        })))
    }

    fn state(&self) -> &LeafState {
        self.0.leaf().unwrap_or_else(|| unreachable!("a Leaf is made only of leaf nodes"))
    }

    /// The leaf as a value to compute with.
    pub fn var(&self) -> Var {
        Var::of_leaf(&self.0)
    }

    /// The leaf as a constant to compute with: no gradient is recorded for it, and backward reads whatever tensor the leaf
    /// holds then, as it does of [`Leaf::var`].
    pub fn constant(&self) -> Var {
        Var::held_by(self.tensor(), self.0.clone())
    }

    pub(crate) fn tensor_and_version(&self) -> (Tensor, u64) {
        self.state().tensor_and_version()
    }

    /// Whether its tensor was never released, so that another operation may recompute its result from it.
    pub(crate) fn stays(&self) -> bool {
        !unpoisoned(self.state().held.read()).was_released
    }

    /// The tensor it holds now.
    pub fn tensor(&self) -> Tensor {
        self.state().tensor()
    }

    /// Lets it hold another tensor of the same dtype and device (and, unless one of them is a stand-in without
    /// elements, shape). This is no modification: values saved for backward stay valid, and backward reads the new
    /// tensor. A stand-in is a tensor of no elements, or one whose elements are [withheld](Tensor::withheld).
    ///
    /// # Errors
    /// If the dtype or device differs.
    pub fn set_tensor(&self, tensor: Tensor) -> Result<()> {
        let wanted = &self.0.outputs[0];
        let got = Meta::of(&tensor);
        let shapes_fit = got.shape == wanted.shape || tensor.numel() == 0;
        if got.dtype != wanted.dtype || got.device != wanted.device || !shapes_fit {
            let got = format!("a tensor of {got}");
            return Err(
                phalanx_tensor::Error::shape("set_tensor", got, format!("{wanted}, as the leaf")).into()
            );
        }
        let mut held = unpoisoned(self.state().held.write());
        let base = held.version();
        let is_stand_in = got.shape != wanted.shape || tensor.why_withheld().is_some();
        let was_released = held.was_released || is_stand_in;
        *held = Held { base, attached: tensor.version(), tensor, was_released };
        Ok(())
    }

    /// The value that it holds, to be [restored](Leaf::restore) after it has held others. The tensor is the leaf's own,
    /// no copy: to keep its elements, let the leaf hold a copy before it is written.
    pub fn stash(&self) -> Stash {
        Stash(unpoisoned(self.state().held.read()).clone())
    }

    /// Lets it hold a value again, and be of the version that it was of then: what was saved for backward of this value is
    /// valid again, and what was saved of a later one is found to be modified until that one is restored.
    ///
    /// # Errors
    /// As [`Leaf::set_tensor`], if it is another leaf's.
    pub fn restore(&self, stash: &Stash) -> Result<()> {
        self.set_tensor(stash.0.tensor.clone())?;
        *unpoisoned(self.state().held.write()) = stash.0.clone();
        Ok(())
    }

    /// How often the value was modified; not changed by [`Leaf::set_tensor`].
    pub fn version(&self) -> u64 {
        self.state().version()
    }

    /// The gradient accumulated so far.
    pub fn grad(&self) -> Option<Var> {
        let state = self.state().lock();
        match &state.slot {
            Slot::Owned(_) => state.grad.clone(),
            Slot::Into(buffer) => Some(Var::new(buffer.clone())),
        }
    }

    /// Replaces the gradient. An `Into` slot's buffer belongs to the caller and stays: it is zeroed, or takes the
    /// values of a gradient of its shape.
    pub fn set_grad(&self, grad: Option<Var>) {
        let mut state = self.state().lock();
        let Slot::Into(buffer) = &mut state.slot else {
            state.grad = grad;
            return;
        };
        // This can fail only if another thread writes the buffer, or the gradient has another shape than the leaf.
        let _ = match &grad {
            None => kernels::fill_(buffer, -0.0),
            Some(grad) => kernels::copy_(buffer, grad.tensor()),
        };
        state.zeroed += u64::from(grad.is_none());
    }

    /// Takes a gradient that was computed elsewhere as a backward pass does one of its own: adds it to the slot and
    /// calls the hooks. Its dtype may be the slot's instead of the leaf's.
    ///
    /// # Errors
    /// If the shape or device differs, or a hook fails.
    pub fn accumulate(&self, grad: Tensor) -> Result<()> {
        self.check("accumulate", &grad)?;
        self.state().accumulate(Var::new(grad), false)?;
        self.0.run_accumulate_hooks()
    }

    /// Refuses a gradient of another shape or device than the leaf's, or of integers.
    fn check(&self, op: &'static str, grad: &Tensor) -> Result<()> {
        let (got, wanted) = (Meta::of(grad), &self.0.outputs[0]);
        if got.shape == wanted.shape && got.device == wanted.device && got.dtype.is_float() {
            return Ok(());
        }
        let wanted = format!("{wanted}, in any floating-point dtype");
        Err(Error::Gradient { op, got: got.to_string(), wanted })
    }

    /// Where gradients go.
    pub fn slot(&self) -> Slot {
        self.state().lock().slot.clone()
    }

    /// Says where gradients go from now on; a gradient in the old place stays there.
    ///
    /// # Errors
    /// If an `Into` buffer has another shape or device, or the dtype is not a floating-point one.
    pub fn set_slot(&self, slot: Slot) -> Result<()> {
        if let Slot::Owned(Some(dtype)) = slot
            && !dtype.is_float()
        {
            let wanted = "a floating-point dtype".into();
            return Err(Error::Gradient { op: "set_slot", got: dtype.to_string(), wanted });
        }
        if let Slot::Into(buffer) = &slot {
            self.check("set_slot", buffer)?;
        }
        let mut state = self.state().lock();
        *state = SlotState { slot, grad: None, zeroed: state.zeroed };
        Ok(())
    }

    /// Forgets the gradient; an `Into` slot's buffer is zeroed.
    ///
    /// # Errors
    /// If the buffer cannot be written.
    pub fn zero_grad(&self) -> Result<()> {
        let mut state = self.state().lock();
        state.grad = None;
        state.zeroed += 1;
        match &mut state.slot {
            Slot::Owned(_) => Ok(()),
            // What changes nothing that is added to it; 0 would make 0 of -0.
            Slot::Into(buffer) => Ok(kernels::fill_(buffer, -0.0)?),
        }
    }

    /// How often [`Leaf::zero_grad`] was called: whether a gradient is still there without looking at it.
    pub fn times_zeroed(&self) -> u64 {
        self.state().lock().zeroed
    }
}

impl Held {
    fn version(&self) -> u64 {
        self.base + (self.tensor.version() - self.attached)
    }
}

impl GradFn for LeafState {}

impl Node {
    /// The leaf's part of it, if it is one.
    #[inline]
    pub(crate) fn leaf(&self) -> Option<&LeafState> {
        if self.kind == NodeKind::Leaf { (&self.grad_fn as &dyn Any).downcast_ref() } else { None }
    }

    /// Calls the hooks of a leaf that has taken a gradient.
    pub(crate) fn run_accumulate_hooks(self: &Arc<Node>) -> Result<()> {
        let hooks = self.accumulate_hooks();
        if hooks.is_empty() {
            return Ok(());
        }
        let leaf = Var::of_leaf(self);
        hooks.iter().try_for_each(|hook| hook(&leaf))
    }
}

impl Edge {
    /// The leaf that it leads to, if it is one.
    #[inline]
    pub(crate) fn leaf(&self) -> Option<&LeafState> {
        if self.is_to_leaf() { self.node.leaf() } else { None }
    }

    /// Whether a gradient may be added to the buffer of the leaf that it leads to without a hook seeing the gradient.
    #[inline]
    pub(crate) fn takes_in_place(&self) -> bool {
        self.leaf().is_some_and(LeafState::has_buffer) && !self.node.has_grad_hooks()
    }
}

impl LeafState {
    pub(crate) fn tensor(&self) -> Tensor {
        unpoisoned(self.held.read()).tensor.clone()
    }

    pub(crate) fn tensor_and_version(&self) -> (Tensor, u64) {
        let held = unpoisoned(self.held.read());
        (held.tensor.clone(), held.version())
    }

    pub(crate) fn version(&self) -> u64 {
        unpoisoned(self.held.read()).version()
    }

    fn lock(&self) -> MutexGuard<'_, SlotState> {
        unpoisoned(self.slot.lock())
    }

    /// Whether there is a tensor that gradients are added to.
    pub(crate) fn has_buffer(&self) -> bool {
        self.lock().buffer(|_| ()).is_some()
    }

    /// Calls `write` with the tensor that gradients are added to; `None` if there is none.
    pub(crate) fn with_buffer<T>(&self, write: impl FnOnce(&mut Tensor) -> Result<T>) -> Result<Option<T>> {
        self.lock().buffer(write).transpose()
    }

    /// Takes a finished gradient: stores the first, adds each further one.
    pub(crate) fn accumulate(&self, grad: Var, create_graph: bool) -> Result<()> {
        let mut state = self.lock();
        let SlotState { slot, grad: kept, .. } = &mut *state;
        let dtype = match slot {
            Slot::Into(buffer) => return Ok(kernels::accumulate_(buffer, grad.tensor())?),
            Slot::Owned(dtype) => dtype.unwrap_or(grad.tensor().dtype()),
        };
        let sum = match kept.take() {
            Some(sum) if create_graph => sum.add(&grad)?,
            Some(sum) => add_in_place(sum, grad)?,
            None if create_graph => grad,
            None => own(grad, dtype)?,
        };
        sum.tensor().storage().set_category(Category::Gradients);
        *kept = Some(sum);
        Ok(())
    }
}

impl SlotState {
    /// Calls `write` with the tensor that the next gradient is added to: a buffer, or an earlier gradient that is owned
    /// by the slot alone and that has no graph of its own.
    fn buffer<T>(&mut self, write: impl FnOnce(&mut Tensor) -> T) -> Option<T> {
        if let Slot::Into(buffer) = &mut self.slot {
            return Some(write(buffer));
        }
        let kept = self.grad.take_if(|grad| !grad.requires_grad())?;
        let mut sum = kept.into_tensor();
        let done = (sum.is_contiguous() && sum.is_sole_owner()).then(|| write(&mut sum));
        self.grad = Some(Var::new(sum));
        done
    }
}

/// A gradient with a storage of its own, so that adding to it changes nothing else.
fn own(grad: Var, dtype: DType) -> Result<Var> {
    let _category = Context::with(|c| c.category = Category::Gradients);
    let grad = grad.into_tensor();
    if grad.dtype() != dtype {
        return Ok(Var::new(kernels::cast(&grad, dtype)?.contiguous()?));
    }
    if grad.is_contiguous() && grad.is_sole_owner() { Ok(Var::new(grad)) } else { Ok(Var::new(grad.copy()?)) }
}

/// `sum + grad`, written over `sum` if that has no other owner.
pub(crate) fn add_in_place(sum: Var, grad: Var) -> Result<Var> {
    let mut sum = sum.into_tensor();
    if sum.is_contiguous() && sum.is_sole_owner() {
        kernels::accumulate_(&mut sum, grad.tensor())?;
        return Ok(Var::new(sum));
    }
    let mut copy = sum.copy()?;
    kernels::accumulate_(&mut copy, grad.tensor())?;
    Ok(Var::new(copy))
}

impl Leaf {
    /// Whether both are handles on the same leaf.
    pub fn is(&self, other: &Leaf) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A number that no other leaf has.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Whether anything is called when it has taken a gradient ([`Leaf::on_accumulate`]).
    pub fn is_watched(&self) -> bool {
        self.0.has_accumulate_hooks()
    }

    /// Calls `hook` after a backward pass has added its gradient to the slot.
    pub fn on_accumulate(&self, hook: impl Fn(&Var) -> Result<()> + Send + Sync + 'static) -> HookHandle {
        self.0.add_accumulate_hook(Arc::new(hook))
    }
}

impl Var {
    /// A leaf that requires a gradient; see [`Leaf`].
    ///
    /// # Errors
    /// If the dtype is not a floating-point one.
    pub fn leaf(tensor: Tensor) -> Result<Var> {
        Ok(Leaf::new(tensor, false)?.var())
    }

    /// The handle on the leaf that it is, if it is one.
    pub fn as_leaf(&self) -> Option<Leaf> {
        let edge = self.edge()?;
        edge.leaf().map(|_| Leaf(Arc::clone(&edge.node)))
    }

    /// The gradient: a leaf's accumulated one, or that of a value on which [`Var::retain_grad`] was called.
    pub fn grad(&self) -> Option<Var> {
        let edge = self.edge()?;
        match self.as_leaf() {
            Some(leaf) => leaf.grad(),
            None => edge.node.retained_grad(edge.output()),
        }
    }

    /// The leaf that holds it, if it is a constant of one ([`Leaf::constant`]).
    pub(crate) fn holder(&self) -> Option<Leaf> {
        self.holding_node().cloned().map(Leaf)
    }

    /// The leaves of parameters ([`Leaf::new`]) that a backward pass from this value comes to, as far as its graph
    /// tells: not those that only a recomputed part uses.
    pub fn parameter_leaves(&self) -> Vec<Leaf> {
        let (mut found, mut seen) = (Vec::new(), HashSet::new());
        let mut open: Vec<&Arc<Node>> = self.edge().map(|edge| &*edge.node).into_iter().collect();
        while let Some(node) = open.pop() {
            if !seen.insert(node.id) {
                continue;
            }
            if node.kind == NodeKind::Leaf && node.weight {
                found.push(Leaf(Arc::clone(node)));
            }
            open.extend(node.inputs.iter().flatten().map(|edge| &*edge.node));
        }
        found
    }

    pub(crate) fn of_leaf(node: &Arc<Node>) -> Var {
        let tensor = node.leaf().map(LeafState::tensor);
        let tensor = tensor.unwrap_or_else(|| unreachable!("called with leaf nodes only"));
        Var::from_parts(tensor, Some(Edge::new(node.clone(), 0)))
    }
}
