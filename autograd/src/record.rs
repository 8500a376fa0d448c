//! Recording: how an operation joins the graph.

use std::any::{Any, TypeId};
use std::sync::Arc;

use phalanx_tensor::{Context, Result as TensorResult, Tensor};
use smallvec::SmallVec;

use crate::backward::Backward;
use crate::checkpoint::note_use;
use crate::node::{Edge, Link, Meta, Node};
use crate::operation::Recorded;
use crate::remade::{Remade, Source};
use crate::saved::Saved;
use crate::sequence::{next_sequence, pass_over};
use crate::{Error, Result, Var, profile, spare};

/// Saves values for backward, while an operation is recorded.
pub struct Saver<'a> {
    name: &'static str,
    inputs: &'a [&'a Var],
    outputs: &'a [Tensor],
}

impl Saver<'_> {
    /// Keeps input `i`.
    ///
    /// # Errors
    /// If a saved-value hook refuses.
    pub fn input(&self, i: usize) -> Result<Saved> {
        Saved::input(i, self.inputs[i])
    }

    /// Keeps output `i`.
    ///
    /// # Errors
    /// If a saved-value hook refuses.
    pub fn output(&self, i: usize) -> Result<Saved> {
        Saved::output(i, &self.outputs[i])
    }

    /// How output `i` is made again of some inputs, which the operation saves (or which are small): to be offered by
    /// [`Backward::remade`]. None where they cannot be counted on, as parameters that are sharded.
    pub fn remade(
        &self,
        i: usize,
        inputs: impl IntoIterator<Item = usize>,
        make: impl Fn(&[Tensor]) -> TensorResult<Tensor> + Send + Sync + 'static,
    ) -> Option<Arc<Remade>> {
        let sources = inputs.into_iter().map(|i| Source::kept(self.inputs[i])).collect::<Option<_>>()?;
        Some(Remade::new(self.name, &self.outputs[i], sources, make))
    }

    /// [`Saver::remade`] of output `of`, which the operation saves, and of some inputs.
    pub(crate) fn remade_of_output(
        &self,
        i: usize,
        of: usize,
        inputs: impl IntoIterator<Item = usize>,
        make: impl Fn(&[Tensor]) -> TensorResult<Tensor> + Send + Sync + 'static,
    ) -> Option<Arc<Remade>> {
        let inputs = inputs.into_iter().map(|i| Source::kept(self.inputs[i]));
        let sources =
            [Some(Source::of(&self.outputs[of]))].into_iter().chain(inputs).collect::<Option<_>>()?;
        Some(Remade::new(self.name, &self.outputs[i], sources, make))
    }

    /// How the output is made again of some inputs, if one of them is made again itself (and not of another such: no chain of
    /// these is long). The others are as for [`Saver::remade`].
    pub(crate) fn remade_of_remade<const N: usize>(
        &self,
        inputs: [usize; N],
        make: impl Fn(&[Tensor]) -> TensorResult<Tensor> + Send + Sync + 'static,
    ) -> Option<Arc<Remade>> {
        let behind = inputs.map(|i| Remade::behind(self.inputs[i]));
        if behind.iter().all(Option::is_none) || behind.iter().flatten().any(|remade| remade.is_nested()) {
            return None;
        }
        let source = |(i, remade)| match remade {
            Some(remade) => Some(Source::Remade(remade)),
            None => Source::kept(self.inputs[i]),
        };
        let sources = std::iter::zip(inputs, behind).map(source).collect::<Option<_>>()?;
        Some(Remade::new(self.name, &self.outputs[0], sources, make))
    }

    /// Whether input `i` requires a gradient: what only its gradient needs need not be saved otherwise.
    pub fn needs(&self, i: usize) -> bool {
        self.inputs[i].requires_grad()
    }
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
    backward: impl FnOnce(&Saver<'_>) -> Result<B>,
) -> Result<Var> {
    profile::forward(name, inputs, std::slice::from_ref(&output));
    if !joins(name, inputs) {
        return Ok(Var::from_parts(output, None));
    }
    let outputs = std::slice::from_ref(&output);
    let node = new_node(name, inputs, outputs, backward(&Saver { name, inputs, outputs })?);
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
    backward: impl FnOnce(&Saver<'_>) -> Result<B>,
) -> Result<SmallVec<[Var; 4]>> {
    profile::forward(name, inputs, &outputs);
    if !joins(name, inputs) || outputs.is_empty() {
        return Ok(outputs.into_iter().map(|t| Var::from_parts(t, None)).collect());
    }
    let node = new_node(name, inputs, &outputs, backward(&Saver { name, inputs, outputs: &outputs })?);
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
    inputs.iter().any(|v| v.requires_grad()) && Context::current().grad
}

/// [`is_recording`], and if not, what others must know of the operation.
fn joins(name: &'static str, inputs: &[&Var]) -> bool {
    if !inputs.iter().any(|v| v.requires_grad()) {
        pass_over();
        return false;
    }
    let recording = Context::current().grad;
    if !recording {
        pass_over();
        note_use(name, inputs);
    }
    recording
}

fn new_node<B: Backward + 'static>(
    name: &'static str,
    inputs: &[&Var],
    outputs: &[Tensor],
    backward: B,
) -> Link {
    let mut node = spare::take(TypeId::of::<Recorded<B>>()).unwrap_or_else(|| {
        let (inputs, outputs, hooks) = Default::default();
        let (weight, is_leaf, recorded) = (false, false, None);
        let body = Recorded::<B>::empty();
        Arc::new(Node { seq: 0, id: 0, name, inputs, outputs, weight, is_leaf, hooks, recorded, body })
    });
    let Some(empty) = Arc::get_mut(&mut node) else {
        unreachable!("the node was just made, or nobody held it when it was laid by")
    };
    fill(empty, name, inputs, outputs, backward.is_view());
    match (&mut empty.body as &mut dyn Any).downcast_mut::<Recorded<B>>() {
        Some(body) => body.set(backward),
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
