//! [`Backward`]: what an operation implements to be differentiable, and the [`GradFn`] that a node makes of it.

use std::any::{Any, TypeId};
use std::sync::{Arc, Mutex, MutexGuard};

use phalanx_tensor::{Tensor, unpoisoned};
use smallvec::SmallVec;

use crate::graph::node::{Call, Edge, GradFn, Grads, Node};
use crate::graph::rematerialized::Rematerialized;
use crate::graph::saved_variable::SavedVariable;
use crate::{Result, Var, profile};

/// The backward function of one recorded operation.
pub trait Backward: Send + Sync {
    /// Whether [`Backward::rematerialized`] offers anything.
    const REMATERIALIZES: bool = false;
    /// Whether a split backward computes the gradients of weights later, without the weights. If not, it computes them together with
    /// the other inputs'.
    const SPLITS: bool = true;

    /// The gradients of the inputs, given those of the outputs (in `cx`). Only those that [`Cx::needs`] names are
    /// used. Written with operations on [`Var`], so that gradients of gradients are recorded when asked for
    /// ([`Cx::create_graph`]).
    ///
    /// In a split backward it is called twice, if it [splits](Backward::SPLITS): for the inputs' gradients first, for the weights' later.
    ///
    /// # Errors
    /// Whatever its operations refuse, or a saved value that was modified.
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads>;

    /// [`Backward::backward`] for the last time, so that saved values ([`Cx::take`]) and the output's gradient
    /// ([`Cx::take_dy`]) may be used up.
    ///
    /// # Errors
    /// As [`Backward::backward`].
    fn backward_once(self, cx: &mut Cx<'_>) -> Result<Grads>
    where
        Self: Sized,
    {
        self.backward(cx)
    }

    /// Called between the two halves of a split backward, when the gradient of input `i` will still be asked for if
    /// `later(i)`, and no other: frees what serves only the others.
    fn release(&mut self, later: &dyn Fn(usize) -> bool) {
        let _ = later;
    }

    /// Whether the second half of a split backward will look at the gradient of output `i`; if not, it is freed between
    /// the halves.
    fn keeps_gradient(&self, i: usize) -> bool {
        let _ = i;
        true
    }

    /// How output `i` is computed again, for operations that would save it.
    fn rematerialized(&self, i: usize) -> Option<&Arc<Rematerialized>> {
        let _ = i;
        None
    }

    /// Whether the output is a view or a cast of the input. Such an operation on a parameter runs with the parameters'
    /// gradients in a split backward pass ([`crate::backward_inputs`]).
    fn is_view(&self) -> bool {
        false
    }
}

/// The arguments of a backward function: the gradients of the outputs, which input gradients are wanted, and access to
/// saved values.
pub struct Cx<'a> {
    node: &'a Arc<Node>,
    grads: &'a mut [Option<Var>],
    call: &'a Call<'a>,
}

impl Cx<'_> {
    /// The gradient of the only output.
    #[inline]
    pub fn dy(&self) -> &Var {
        // A node runs only once one of its outputs has a gradient; with one output it is this one.
        self.grads[0].as_ref().unwrap_or_else(|| unreachable!("{} ran without a gradient", self.node.name))
    }

    /// The gradient of the only output, for the last time: the caller may overwrite it in place if no other handle
    /// exists ([`Tensor::is_sole_owner`]).
    ///
    /// # Panics
    /// If it was taken before.
    pub fn take_dy(&mut self) -> Var {
        if self.call.watched {
            return self.dy().clone();
        }
        self.grads[0].take().unwrap_or_else(|| panic!("{}: its gradient was taken before", self.node.name))
    }

    /// The gradient of output `i`, if any came.
    pub fn dy_at(&self, i: usize) -> Option<&Var> {
        self.grads[i].as_ref()
    }

    /// How many outputs the operation has.
    pub fn outputs(&self) -> usize {
        self.grads.len()
    }

    /// Whether the gradient of input `i` is wanted now.
    #[inline]
    pub fn needs(&self, i: usize) -> bool {
        self.call.needs(i)
    }

    /// Whether the gradients will be differentiated again: then everything must be made of differentiable
    /// operations.
    pub fn create_graph(&self) -> bool {
        self.call.create_graph
    }

    /// A saved value, as it was in the forward pass.
    ///
    /// # Errors
    /// If it was modified in place since.
    pub fn get(&self, saved: &SavedVariable) -> Result<Var> {
        let value = saved.unpack(self.node, self.call.create_graph)?;
        profile::reads(value.tensor());
        Ok(value)
    }

    /// A saved value that is not needed again: its memory may be written if it has no other owner
    /// ([`Tensor::is_sole_owner`]).
    ///
    /// # Errors
    /// As [`Cx::get`].
    pub fn take(&self, saved: SavedVariable) -> Result<Tensor> {
        let value = saved.take(self.node)?;
        profile::reads(&value);
        Ok(value)
    }

    /// A gradient summed over what was broadcast from input `i`, which requires one.
    ///
    /// # Errors
    /// If the input's shape does not broadcast to the gradient's.
    #[inline(always)]
    pub fn sum_to_input(&self, i: usize, grad: Var) -> Result<Var> {
        match &self.node.inputs[i] {
            Some(edge) if !edge.meta().has_shape_of(grad.tensor()) => summed(&grad, edge),
            _ => Ok(grad),
        }
    }

    /// Accumulates the gradient of input `i` straight into its leaf's buffer instead of returning it: possible if
    /// the leaf's slot is [`crate::Slot::Into`] or has an earlier gradient, no other operation contributes in this
    /// pass, and the input is one of the first 64. `write` adds to the buffer with an accumulating kernel and returns
    /// whether it did (it may decline, for example for the buffer's dtype). If this returns true, `None` is to be returned for the input.
    ///
    /// # Errors
    /// Whatever `write` returns.
    pub fn accumulate_into(&self, i: usize, write: impl FnOnce(&mut Tensor) -> Result<bool>) -> Result<bool> {
        if !self.call.sinks.contains(i) {
            return Ok(false);
        }
        let leaf = self.node.inputs[i].as_ref().and_then(Edge::leaf);
        let done = leaf.map(|leaf| leaf.with_buffer(write)).transpose()?.flatten().unwrap_or(false);
        if done {
            self.call.sunk.set(self.call.sunk.get().and(i));
        }
        Ok(done)
    }
}

/// For gradients that go past an operation.
impl Cx<'_> {
    /// A value that the operation of input `i` has saved, so that its derivative can be applied here, and the gradient be sent to its
    /// input at once: then `None` is to be returned for input `i`. None if the gradients are to be differentiated, or something looks
    /// at the gradient of input `i`: a hook, or the pass's caller.
    pub(crate) fn saved_by_input<B: Backward + 'static>(
        &self,
        i: usize,
        find: impl FnOnce(&B) -> Option<&SavedVariable>,
    ) -> Result<Option<Var>> {
        let Some(Edge { node, .. }) = &self.node.inputs[i] else { return Ok(None) };
        if self.call.create_graph || node.hooks.get().is_some() || (self.call.is_captured)(node) {
            return Ok(None);
        }
        let Some(recorded) = Recorded::<B>::of(node) else { return Ok(None) };
        let value = recorded.look(|backward| find(backward).map(|saved| saved.unpack(node, false)));
        let value = value.flatten().transpose()?;
        if let Some(value) = &value {
            profile::reads(value.tensor());
            self.call.passed_by.set(self.call.passed_by.get().and(i));
        }
        Ok(value)
    }
}

impl Node {
    /// Whether `find` finds a value that this operation has saved.
    pub(crate) fn saves<B: Backward + 'static>(
        self: &Arc<Node>,
        find: impl FnOnce(&B) -> Option<&SavedVariable>,
    ) -> bool {
        Recorded::<B>::of(self).and_then(|recorded| recorded.look(|backward| find(backward).is_some()))
            == Some(true)
    }
}

#[inline(never)]
fn summed(grad: &Var, to: &Edge) -> Result<Var> {
    grad.sum_to(&to.meta().shape)
}

/// One gradient, as a backward function returns it.
///
/// # Errors
/// Never; a result so that a backward function can end with it.
#[inline]
pub fn grads1(a: Var) -> Result<Grads> {
    Ok(SmallVec::from_buf_and_len([Some(a), None], 1))
}

/// Two gradients, each perhaps none, as a backward function returns them.
///
/// # Errors
/// Never; a result so that a backward function can end with it.
#[inline]
pub fn grads2(a: Option<Var>, b: Option<Var>) -> Result<Grads> {
    Ok(SmallVec::from_buf([a, b]))
}

/// The [`GradFn`] of an operation: its backward function with the values that it saved, until they are freed.
pub(crate) struct Recorded<B>(Mutex<State<B>>);

enum State<B> {
    Own(B),
    /// One that was run and kept; it may be running again.
    Shared(Arc<B>),
    Freed,
}

impl<B> Recorded<B> {
    pub(crate) fn empty() -> Recorded<B> {
        Recorded(Mutex::new(State::Freed))
    }

    /// Puts a function in the place of one that was freed.
    #[inline]
    pub(crate) fn set(&mut self, backward: B) {
        *self.state() = State::Own(backward);
    }

    fn state(&mut self) -> &mut State<B> {
        unpoisoned(self.0.get_mut())
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        unpoisoned(self.0.lock())
    }

    /// The function of a node, if it is of this type.
    fn of(node: &Node) -> Option<&Recorded<B>>
    where
        B: Backward + 'static,
    {
        (&node.grad_fn as &dyn Any).downcast_ref()
    }

    /// Looks at the function, unless it was freed.
    fn look<R>(&self, look: impl FnOnce(&B) -> R) -> Option<R> {
        match &*self.lock() {
            State::Own(backward) => Some(look(backward)),
            State::Shared(backward) => Some(look(backward)),
            State::Freed => None,
        }
    }

    fn take(&self) -> State<B> {
        std::mem::replace(&mut *self.lock(), State::Freed)
    }

    fn share(&self) -> Option<Arc<B>> {
        let mut state = self.lock();
        let shared = match std::mem::replace(&mut *state, State::Freed) {
            State::Own(backward) => Arc::new(backward),
            State::Shared(backward) => backward,
            State::Freed => return None,
        };
        *state = State::Shared(shared.clone());
        Some(shared)
    }
}

impl<B: Backward + 'static> GradFn for Recorded<B> {
    fn apply(&self, node: &Arc<Node>, grads: &mut [Option<Var>], call: &Call<'_>) -> Option<Result<Grads>> {
        let mut cx = Cx { node, grads, call };
        if call.kept {
            return Some(self.share()?.backward(&cx));
        }
        match self.take() {
            State::Own(backward) => Some(backward.backward_once(&mut cx)),
            State::Shared(backward) => Some(backward.backward(&cx)),
            State::Freed => None,
        }
    }

    fn free(&self) {
        drop(self.take());
    }

    fn release(&self, later: &dyn Fn(usize) -> bool) {
        match &mut *self.lock() {
            State::Own(backward) => backward.release(later),
            State::Shared(backward) => {
                if let Some(backward) = Arc::get_mut(backward) {
                    backward.release(later);
                }
            }
            State::Freed => {}
        }
    }

    fn keeps_gradient(&self, i: usize) -> bool {
        match &*self.lock() {
            State::Own(backward) => backward.keeps_gradient(i),
            State::Shared(backward) => backward.keeps_gradient(i),
            State::Freed => true,
        }
    }

    fn rematerialized(&self, output: usize) -> Option<Arc<Rematerialized>> {
        if !B::REMATERIALIZES {
            return None;
        }
        match &*self.lock() {
            State::Own(backward) => backward.rematerialized(output).cloned(),
            State::Shared(backward) => backward.rematerialized(output).cloned(),
            State::Freed => None,
        }
    }

    fn splits(&self) -> bool {
        B::SPLITS
    }

    fn recycle(&mut self) -> Option<TypeId> {
        *self.state() = State::Freed;
        Some(TypeId::of::<Recorded<B>>())
    }
}
