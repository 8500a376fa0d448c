//! What an operation implements to be differentiable.

use std::cell::Cell;
use std::sync::Arc;

use phalanx_tensor::Tensor;
use smallvec::SmallVec;

use crate::engine::Place;
use crate::node::{Edge, Node};
use crate::remade::Remade;
use crate::saved::Saved;
use crate::{Result, Var, profile};

/// Gradients in the order of an operation's inputs; `None` where there is none.
pub type Grads = SmallVec<[Option<Var>; 2]>;

/// The backward function of one recorded operation.
pub trait Backward: Send + Sync {
    /// Whether [`Backward::remade`] offers anything.
    const REMAKES: bool = false;

    /// The gradients of the inputs, given those of the outputs (in `cx`). Only those that [`Cx::needs`] names are
    /// used. Written with operations on [`Var`], so that gradients of gradients are recorded when asked for
    /// ([`Cx::create_graph`]).
    ///
    /// In a split backward it is called twice: for the inputs' gradients first, for the weights' later.
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

    /// How output `i` is made again, for those that would save it.
    fn remade(&self, i: usize) -> Option<&Arc<Remade>> {
        let _ = i;
        None
    }

    /// Whether the output is the input in another shape or dtype. Such an operation on a parameter belongs to the
    /// weight work of a split backward.
    fn is_view(&self) -> bool {
        false
    }
}

/// What a backward function finds around it.
pub struct Cx<'a> {
    pub(crate) node: &'a Arc<Node>,
    pub(crate) grads: &'a mut [Option<Var>],
    /// Where the inputs' gradients go; `None` if they are not wanted.
    pub(crate) targets: &'a [Option<Place>],
    pub(crate) create_graph: bool,
    /// Whether somebody looks at `grads` afterwards.
    pub(crate) watched: bool,
    /// The inputs whose gradient may go straight into a buffer, and those for which it has.
    pub(crate) sinks: Few,
    pub(crate) sunk: &'a Cell<Few>,
}

/// Some of the first 64 inputs.
#[derive(Clone, Copy, Default)]
pub(crate) struct Few(u64);

impl Few {
    /// With input `i`, if it is one of the first.
    #[inline]
    pub(crate) fn and(self, i: usize) -> Few {
        if i < 64 { Few(self.0 | 1 << i) } else { self }
    }

    #[inline]
    pub(crate) fn contains(self, i: usize) -> bool {
        i < 64 && self.0 >> i & 1 == 1
    }
}

impl Cx<'_> {
    /// The gradient of the only output.
    #[inline]
    pub fn dy(&self) -> &Var {
        // A node runs only once one of its outputs has a gradient; with one output it is this one.
        self.grads[0].as_ref().unwrap_or_else(|| unreachable!("{} ran without a gradient", self.node.name))
    }

    /// The gradient of the only output, which is not asked for again: whoever gets it may be alone with it.
    ///
    /// # Panics
    /// If it was taken before.
    pub fn take_dy(&mut self) -> Var {
        if self.watched {
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
        self.targets[i].is_some()
    }

    /// Whether the gradients will be differentiated again: then everything must be made of differentiable
    /// operations.
    pub fn create_graph(&self) -> bool {
        self.create_graph
    }

    /// A saved value, as it was in the forward pass.
    ///
    /// # Errors
    /// If it was modified in place since.
    pub fn get(&self, saved: &Saved) -> Result<Var> {
        let value = saved.unpack(self.node, self.create_graph)?;
        profile::reads(value.tensor());
        Ok(value)
    }

    /// A saved value that is not needed again: its memory may be written where nobody else sees it
    /// ([`Tensor::is_sole_owner`]).
    ///
    /// # Errors
    /// As [`Cx::get`].
    pub fn take(&self, saved: Saved) -> Result<Tensor> {
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
    /// the leaf's slot is [`crate::Slot::Into`] or has an earlier gradient, nobody else contributes in this pass, and the input is
    /// one of the first 64. `write` adds to the
    /// buffer with an accumulating kernel and returns whether it did (it may decline, for example for the
    /// buffer's dtype). If this returns true, `None` is to be returned for the input.
    ///
    /// # Errors
    /// Whatever `write` returns.
    pub fn accumulate_into(&self, i: usize, write: impl FnOnce(&mut Tensor) -> Result<bool>) -> Result<bool> {
        if !self.sinks.contains(i) {
            return Ok(false);
        }
        let leaf = self.node.inputs[i].as_ref().and_then(Edge::leaf);
        let done = leaf.map(|leaf| leaf.with_buffer(write)).transpose()?.flatten().unwrap_or(false);
        if done {
            self.sunk.set(self.sunk.get().and(i));
        }
        Ok(done)
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

#[cfg(test)]
mod tests {
    use super::Few;

    #[test]
    fn only_the_first_64_inputs_count() {
        let some = [0, 5, 63, 64, 70, 1 << 40].into_iter().fold(Few::default(), Few::and);
        let found: Vec<usize> = (0..200).filter(|&i| some.contains(i)).collect();
        assert_eq!(found, [0, 5, 63]);
    }
}
