//! Recording: how an operation joins the graph.

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::sync::Arc;

use phalanx_tensor::{Context, Result as TensorResult, Tensor};
use smallvec::SmallVec;

use crate::backward::{Backward, Recorded};
use crate::graph::node::{Edge, Link, Meta, Node, NodeKind, take_free};
use crate::graph::rematerialized::{Rematerialized, Source};
use crate::graph::saved_variable::SavedVariable;
use crate::graph::sequence::{next_sequence, pass_over};
use crate::mode::{ContextMode, is_grad_enabled};
use crate::{Error, Result, Var, profile};

/// The inputs and outputs of an operation while it is recorded, of which it saves those that backward needs (torch: `ctx` in
/// `save_for_backward`).
pub struct SaveContext<'a> {
    name: &'static str,
    inputs: &'a [&'a Var],
    outputs: &'a [Tensor],
}

impl SaveContext<'_> {
    /// Keeps input `i`.
    ///
    /// # Errors
    /// If a saved-value hook refuses.
    pub fn input(&self, i: usize) -> Result<SavedVariable> {
        SavedVariable::input(i, self.inputs[i])
    }

    /// Keeps output `i`.
    ///
    /// # Errors
    /// If a saved-value hook refuses.
    pub fn output(&self, i: usize) -> Result<SavedVariable> {
        SavedVariable::output(i, &self.outputs[i])
    }

    /// How output `i` is computed again of some inputs, which the operation saves or which are small: to be offered by
    /// [`Backward::rematerialized`]. `None` if one of them may be released before backward, as a sharded parameter is, or if the device's
    /// results are kept ([`ContextMode::rematerializes`]).
    pub fn rematerialized(
        &self,
        i: usize,
        inputs: impl IntoIterator<Item = usize>,
        compute: impl Fn(&[Tensor]) -> TensorResult<Tensor> + Send + Sync + 'static,
    ) -> Option<Arc<Rematerialized>> {
        self.rematerializes(i)?;
        let sources = inputs.into_iter().map(|i| kept(self.inputs[i])).collect::<Option<_>>()?;
        Some(Rematerialized::new(self.name, &self.outputs[i], sources, compute))
    }

    /// [`SaveContext::rematerialized`] of output `of`, which the operation saves, and of some inputs.
    pub(crate) fn rematerialized_of_output(
        &self,
        i: usize,
        of: usize,
        inputs: impl IntoIterator<Item = usize>,
        compute: impl Fn(&[Tensor]) -> TensorResult<Tensor> + Send + Sync + 'static,
    ) -> Option<Arc<Rematerialized>> {
        self.rematerializes(i)?;
        let inputs = inputs.into_iter().map(|i| kept(self.inputs[i]));
        let sources =
            [Some(Source::of(&self.outputs[of]))].into_iter().chain(inputs).collect::<Option<_>>()?;
        Some(Rematerialized::new(self.name, &self.outputs[i], sources, compute))
    }

    /// How the output is computed again of some inputs, one of which is rematerialized itself, but not of another such (so
    /// that no chain of these is long). The other inputs are as for [`SaveContext::rematerialized`].
    pub(crate) fn rematerialized_of_rematerialized<const N: usize>(
        &self,
        inputs: [usize; N],
        compute: impl Fn(&[Tensor]) -> TensorResult<Tensor> + Send + Sync + 'static,
    ) -> Option<Arc<Rematerialized>> {
        let behind = inputs.map(|i| self.inputs[i].rematerialized());
        if behind.iter().all(Option::is_none) || behind.iter().flatten().any(|value| value.is_nested()) {
            return None;
        }
        let source = |(i, value)| match value {
            Some(value) => Some(Source::Rematerialized(value)),
            None => kept(self.inputs[i]),
        };
        let sources = std::iter::zip(inputs, behind).map(source).collect::<Option<_>>()?;
        Some(Rematerialized::new(self.name, &self.outputs[0], sources, compute))
    }

    fn rematerializes(&self, output: usize) -> Option<()> {
        Context::current().rematerializes(self.outputs[output].device()).then_some(())
    }

    /// Whether input `i` requires a gradient: what only its gradient needs need not be saved otherwise.
    pub fn needs(&self, i: usize) -> bool {
        self.inputs[i].requires_grad()
    }
}

/// A source of a rematerialized value: an input that its operation keeps for backward, or that is small. `None` if it
/// is a leaf whose tensor may be released before backward: the source would keep that memory. (A source is no leaf's
/// handle, since the second half of a split backward may run without parameters.)
fn kept(var: &Var) -> Option<Source> {
    let leaf = var.as_leaf().or_else(|| var.holder());
    leaf.is_none_or(|leaf| leaf.stays()).then(|| Source::of(var.tensor()))
}

/// Makes an operation's result a [`Var`]: linked into the graph if gradients are recorded and an input requires
/// one, else plain. `backward` is called only in the first case, to save what it needs.
///
/// # Errors
/// If saving fails.
pub fn record<B: Backward + 'static>(
    name: &'static str,
    inputs: &[&Var],
    output: Tensor,
    backward: impl FnOnce(&SaveContext<'_>) -> Result<B>,
) -> Result<Var> {
    profile::forward(name, inputs, std::slice::from_ref(&output));
    if !joins(name, inputs) {
        return Ok(Var::from_parts(output, None));
    }
    let outputs = std::slice::from_ref(&output);
    let node = new_node(name, inputs, outputs, backward(&SaveContext { name, inputs, outputs })?);
    Ok(Var::from_parts(output, Some(Edge::new(node, 0))))
}

/// [`record`] for an operation of several outputs. Outputs of integer or bool dtype are never linked.
///
/// # Errors
/// If saving fails.
pub fn record_many<B: Backward + 'static>(
    name: &'static str,
    inputs: &[&Var],
    outputs: SmallVec<[Tensor; 4]>,
    backward: impl FnOnce(&SaveContext<'_>) -> Result<B>,
) -> Result<SmallVec<[Var; 4]>> {
    profile::forward(name, inputs, &outputs);
    if !joins(name, inputs) || outputs.is_empty() {
        return Ok(outputs.into_iter().map(|t| Var::from_parts(t, None)).collect());
    }
    let node = new_node(name, inputs, &outputs, backward(&SaveContext { name, inputs, outputs: &outputs })?);
    let link = |(output, tensor): (usize, Tensor)| {
        let edge = tensor.dtype().is_float().then(|| Edge::new(node.clone(), output));
        Var::from_parts(tensor, edge)
    };
    Ok(outputs.into_iter().enumerate().map(link).collect())
}

/// The result of an operation that has no derivative.
///
/// # Errors
/// If gradients are recorded and an input requires one: a gradient is never dropped silently.
pub fn record_none(name: &'static str, inputs: &[&Var], output: Tensor) -> Result<Var> {
    profile::forward(name, inputs, std::slice::from_ref(&output));
    if output.dtype().is_float() && joins(name, inputs) {
        return Err(Error::NotDifferentiable { op: name });
    }
    Ok(Var::from_parts(output, None))
}

/// Whether an operation on these inputs joins the graph.
pub fn is_recording(inputs: &[&Var]) -> bool {
    inputs.iter().any(|v| v.requires_grad()) && is_grad_enabled()
}

/// [`is_recording`]. Counts an operation that does not join, and tells a checkpoint around it which inputs it uses.
fn joins(name: &'static str, inputs: &[&Var]) -> bool {
    if !inputs.iter().any(|v| v.requires_grad()) {
        pass_over();
        return false;
    }
    let recording = is_grad_enabled();
    if !recording {
        pass_over();
        hear_use(name, inputs);
    }
    recording
}

/// Called with an operation that is not recorded although an input requires a gradient, and with its inputs.
type UseListener = dyn Fn(&'static str, &[&Var]);

thread_local! {
    static USE_LISTENER: RefCell<Option<Box<UseListener>>> = const { RefCell::new(None) };
}

#[cold]
fn hear_use(name: &'static str, inputs: &[&Var]) {
    USE_LISTENER.with_borrow(|listener| listener.iter().for_each(|hear| hear(name, inputs)));
}

/// Calls `hear` with every operation of this thread that is not recorded although an input requires a gradient, until the
/// guard is dropped. `hear` must not run operations.
pub(crate) fn listen_to_uses(hear: impl Fn(&'static str, &[&Var]) + 'static) -> UseListenerGuard {
    UseListenerGuard { before: USE_LISTENER.replace(Some(Box::new(hear))) }
}

/// Ends the effect of [`listen_to_uses`].
pub(crate) struct UseListenerGuard {
    before: Option<Box<UseListener>>,
}

impl Drop for UseListenerGuard {
    fn drop(&mut self) {
        USE_LISTENER.set(self.before.take());
    }
}

fn new_node<B: Backward + 'static>(
    name: &'static str,
    inputs: &[&Var],
    outputs: &[Tensor],
    backward: B,
) -> Link {
    let mut node = take_free(TypeId::of::<Recorded<B>>()).unwrap_or_else(|| {
        let (inputs, outputs, hooks) = Default::default();
        let (weight, kind, recorded) = (false, NodeKind::Operation, None);
        let grad_fn = Recorded::<B>::empty();
        Arc::new(Node { seq: 0, id: 0, name, inputs, outputs, weight, kind, hooks, recorded, grad_fn })
    });
    let Some(empty) = Arc::get_mut(&mut node) else {
        unreachable!("the node was just made, or is a free one, which has no other owner")
    };
    fill(empty, name, inputs, outputs, backward.is_view());
    match (&mut empty.grad_fn as &mut dyn Any).downcast_mut::<Recorded<B>>() {
        Some(recorded) => recorded.set(backward),
        None => unreachable!("it was asked for by this type"),
    }
    node.into()
}

/// Makes an empty node this operation's.
fn fill(node: &mut Node, name: &'static str, inputs: &[&Var], outputs: &[Tensor], is_view: bool) {
    (node.seq, node.id) = next_sequence();
    node.name = name;
    node.inputs.fill(inputs.iter().map(|v| v.edge().cloned()));
    node.outputs.fill(outputs.iter().map(Meta::of));
    node.weight = is_view && node.inputs.iter().flatten().all(|e| e.node.weight);
    node.recorded = crate::anomaly::recorded_here();
}
