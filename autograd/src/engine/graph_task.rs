//! [`GraphTask`]: one backward pass: its options, which gradients it wants, and [`GraphTask::run_node`].
//! [`NodeTask`]: a node with the gradients that have arrived.

use std::any::Any;
use std::cell::Cell;
use std::cmp::Reverse;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use phalanx_kernels as kernels;
use phalanx_tensor::{Context, panic_message, unpoisoned};

use super::input_buffer::{Arrival, InputBuffer, Sender};
use crate::graph::memory::SmallList;
pub(super) use crate::graph::node::NodeIndex;
use crate::graph::node::{Call, Edge, InputMask, Node, NodeGrads, NodeKind};
use crate::leaf::LeafState;
use crate::mode::ContextMode;
use crate::{Error, Result, Var, anomaly, profile};

/// How a backward pass treats the graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Keep saved values, so that the graph can be run backward again.
    pub retain_graph: bool,
    /// Record the gradients' own graph, so that they can be differentiated; implies `retain_graph`.
    pub create_graph: bool,
}

/// A node that a pass begins at, with the gradients that it has.
pub(super) struct Root {
    pub(super) node: Arc<Node>,
    pub(super) grads: NodeGrads,
}

/// A node of the pass: borrowed from the graph behind the roots, or owned, if a checkpoint recorded it during the pass.
#[derive(Clone)]
pub(super) enum NodeRef<'g> {
    Borrowed(&'g Arc<Node>),
    Owned(Arc<Node>),
}

impl Deref for NodeRef<'_> {
    type Target = Arc<Node>;

    #[inline]
    fn deref(&self) -> &Arc<Node> {
        match self {
            NodeRef::Borrowed(node) => node,
            NodeRef::Owned(node) => node,
        }
    }
}

/// Where the gradients of a node's inputs go; `None` where none is wanted.
pub(super) type Targets = SmallList<Option<NodeIndex>, 2>;

/// A node whose gradients are complete. The greatest runs first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ready {
    pub(super) priority: u64,
    pub(super) id: u64,
    pub(super) index: NodeIndex,
}

/// A node that runs, with what has reached it.
pub(super) struct NodeTask<'g> {
    pub(super) node: NodeRef<'g>,
    pub(super) targets: Targets,
    pub(super) buffer: InputBuffer,
}

/// Takes the gradients that a node sends when it has run.
pub(super) trait Scheduler {
    /// Whether the node awaits exactly one gradient and has none yet, so that the sender may write that one straight
    /// into a leaf's slot.
    fn is_sole(&mut self, to: NodeIndex) -> bool;
    /// Takes what arrives at an output of a node.
    fn send(&mut self, to: NodeIndex, output: usize, from: Sender, arrival: Arrival) -> Result<()>;
    /// Adds a graph that a checkpoint has recorded during the pass. Returns the node index of each entry; `node` then
    /// sends one gradient to each.
    fn extend(&mut self, node: &Node, entries: &[Edge]) -> Targets;
}

/// Which gradients are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Every leaf's, into its slot.
    All,
    /// Those of given values, returned.
    Capture,
    /// Those of activations; parameters' are deferred.
    Inputs,
    /// Those that were deferred.
    Weights,
}

/// A backward pass under way; shared by the workers.
pub(super) struct GraphTask {
    options: Options,
    mode: Mode,
    /// The context of the call, in which backward functions run.
    pub(super) context: Context,
    pub(super) anomaly: bool,
    wanted: Vec<Option<Edge>>,
    captured: Mutex<Vec<Option<Var>>>,
    deferred: Mutex<Vec<Root>>,
}

impl GraphTask {
    pub(super) fn new(options: Options, mode: Mode, inputs: &[&Var]) -> GraphTask {
        let mut context = Context::current();
        context.set_grad(options.create_graph);
        GraphTask {
            options,
            mode,
            context,
            anomaly: anomaly::is_detecting_anomaly(),
            wanted: inputs.iter().map(|v| v.edge().cloned()).collect(),
            captured: Mutex::new(vec![None; inputs.len()]),
            deferred: Mutex::default(),
        }
    }

    pub(super) fn create_graph(&self) -> bool {
        self.options.create_graph
    }

    pub(super) fn into_captured(self) -> Vec<Option<Var>> {
        unpoisoned(self.captured.into_inner())
    }

    /// The deferred nodes, latest first.
    pub(super) fn into_deferred(self) -> Vec<Root> {
        let mut deferred = unpoisoned(self.deferred.into_inner());
        deferred.sort_by_key(|root| Reverse(root.node.seq));
        deferred
    }

    /// Whether this pass sends gradients along this edge of a node's.
    #[inline]
    pub(super) fn passes(&self, node: &Node, edge: &Edge) -> bool {
        match self.mode {
            Mode::All | Mode::Capture => true,
            Mode::Inputs => !node.defers(edge),
            Mode::Weights => edge.node.weight,
        }
    }

    /// Whether only the gradients that lead to captured ones are wanted.
    pub(super) fn captures(&self) -> bool {
        self.mode == Mode::Capture
    }

    /// Whether a gradient of this node's is captured.
    #[inline]
    pub(super) fn is_captured(&self, node: &Arc<Node>) -> bool {
        self.wanted.iter().flatten().any(|wanted| Arc::ptr_eq(&wanted.node, node))
    }

    /// Runs a node whose gradients are complete, inside [`guarded`].
    #[inline]
    pub(super) fn run_node(&self, mut task: NodeTask<'_>, scheduler: &mut impl Scheduler) -> Result<()> {
        let NodeTask { node, targets, buffer } = &mut task;
        let (node, grads) = (&**node, &mut *buffer.grads);
        if grads.iter().all(Option::is_none) && !buffer.in_leaf {
            return pass_nothing(node, targets, scheduler);
        }
        // What was deferred has seen its hooks when its gradients were complete.
        if self.mode != Mode::Weights || node.weight {
            node.run_grad_hooks(grads)?;
        }
        if self.captures() && self.is_captured(node) {
            self.capture(node, grads);
        }
        match node.kind {
            NodeKind::Operation => self.run_operation(node, grads, targets, scheduler),
            NodeKind::Leaf if self.captures() => Ok(()),
            NodeKind::Leaf => {
                if let (Some(leaf), Some(grad)) = (node.leaf(), grads[0].take()) {
                    self.accumulate(leaf, node, grad)?;
                }
                node.run_accumulate_hooks()
            }
            NodeKind::Subgraph => self.run_subgraph(node, grads, targets, scheduler),
        }
    }

    fn accumulate(&self, leaf: &LeafState, node: &Node, grad: Var) -> Result<()> {
        let timed = profile::node_begins(&[]).map(|timed| (timed, leaf.has_buffer()));
        leaf.accumulate(grad, self.options.create_graph)?;
        if let Some((timed, adds)) = timed {
            // The first gradient is kept as it is.
            timed.ends("accumulate", &[], node.outputs.iter().filter(|_| adds));
        }
        Ok(())
    }

    fn keeps_graph(&self) -> bool {
        self.options.retain_graph || self.options.create_graph
    }

    fn run_operation(
        &self,
        node: &Arc<Node>,
        grads: &mut [Option<Var>],
        targets: &Targets,
        scheduler: &mut impl Scheduler,
    ) -> Result<()> {
        let weight = |edge: &Option<Edge>| edge.as_ref().is_some_and(|edge| node.defers(edge));
        let defers = self.mode == Mode::Inputs && node.inputs.iter().any(weight);
        let kept = defers || self.keeps_graph();
        if targets.iter().any(Option::is_some) {
            self.apply(node, kept, grads, targets, scheduler)?;
        } else if !kept {
            node.grad_fn.free();
        }
        if defers {
            node.grad_fn.release(&|i| weight(&node.inputs[i]));
            let kept =
                |(i, grad): (usize, &Option<Var>)| grad.clone().filter(|_| node.grad_fn.keeps_gradient(i));
            let grads = NodeGrads::of(grads.iter().enumerate().map(kept));
            let root = Root { node: Arc::clone(node), grads };
            unpoisoned(self.deferred.lock()).push(root);
        }
        Ok(())
    }

    /// Calls the backward function and sends the gradients of the inputs.
    fn apply(
        &self,
        node: &Arc<Node>,
        kept: bool,
        grads: &mut [Option<Var>],
        targets: &Targets,
        scheduler: &mut impl Scheduler,
    ) -> Result<()> {
        let create_graph = self.options.create_graph;
        let (inputs, targets) = (&*node.inputs, &**targets);
        let may_sink = !create_graph && !self.captures();
        let mut sinks = InputMask::default();
        if may_sink {
            for (i, edge) in inputs.iter().enumerate() {
                if edge.as_ref().is_some_and(Edge::takes_in_place)
                    && targets[i].is_some_and(|to| scheduler.is_sole(to))
                {
                    sinks = sinks.and(i);
                }
            }
        }
        let watched = node.hooks.get().is_some();
        let timed = profile::node_begins(grads);
        let is_captured = &|node: &Arc<Node>| self.captures() && self.is_captured(node);
        let (sunk, passed_by) = Default::default();
        let call = Call { targets, create_graph, kept, watched, is_captured, sinks, sunk, passed_by };
        let mut made = match node.grad_fn.apply(node, grads, &call) {
            Some(Ok(made)) => made,
            Some(Err(error)) => return Err(located(error, node.name)),
            None => return Err(Error::Freed { op: node.name }),
        };
        let (sunk, passed_by) = (call.sunk.get(), call.passed_by.get());
        if let Some(timed) = timed {
            let is_added = |i: &usize| sunk.contains(*i);
            let added = (0..inputs.len()).filter(is_added).filter_map(|i| inputs[i].as_ref().map(Edge::meta));
            timed.ends(node.name, &made, added);
        }
        if self.anomaly {
            check_nan(node, &made)?;
        }
        if watched {
            node.run_node_hooks(grads, &made)?;
        }
        for (i, &to) in targets.iter().enumerate() {
            let (Some(edge), Some(to)) = (&inputs[i], to) else { continue };
            let arrival = match made.get_mut(i).and_then(Option::take) {
                Some(grad) => {
                    edge.meta().check(node.name, &grad)?;
                    Arrival::Grad(grad)
                }
                None if sunk.contains(i) => Arrival::InLeaf,
                None => {
                    // The last one to go past an operation that gets no gradient frees what it has saved.
                    if passed_by.contains(i) && !self.keeps_graph() && scheduler.is_sole(to) {
                        edge.node.grad_fn.free();
                    }
                    Arrival::Nothing
                }
            };
            scheduler.send(to, edge.output(), Sender::new(node, i), arrival)?;
        }
        Ok(())
    }

    /// Puts the recomputed graph in the checkpoint's place: its gradients go to that graph's outputs, and that graph
    /// sends to the nodes that the checkpoint stood before.
    fn run_subgraph(
        &self,
        node: &Arc<Node>,
        grads: &mut [Option<Var>],
        targets: &Targets,
        scheduler: &mut impl Scheduler,
    ) -> Result<()> {
        let outputs = node.grad_fn.expand(node, self.keeps_graph());
        let outputs = outputs.ok_or(Error::Freed { op: node.name })??;
        let (mut entries, mut arriving) = (Vec::new(), Vec::new());
        for (edge, grad) in outputs.into_iter().zip(grads) {
            if let (Some(edge), Some(grad)) = (edge, grad.take()) {
                entries.push(edge);
                arriving.push(grad);
            }
        }
        let indices = scheduler.extend(node, &entries);
        for (i, ((edge, to), grad)) in entries.iter().zip(indices.iter()).zip(arriving).enumerate() {
            if let &Some(to) = to {
                scheduler.send(to, edge.output(), Sender::new(node, i), Arrival::Grad(grad))?;
            }
        }
        pass_nothing(node, targets, scheduler)
    }

    #[cold]
    fn capture(&self, node: &Arc<Node>, grads: &[Option<Var>]) {
        let mut captured = unpoisoned(self.captured.lock());
        for (target, kept) in self.wanted.iter().zip(captured.iter_mut()) {
            if let Some(target) = target.as_ref().filter(|t| Arc::ptr_eq(&t.node, node)) {
                *kept = grads[target.output()].clone();
            }
        }
    }
}

/// Tells those behind a node not to wait for it.
fn pass_nothing(node: &Arc<Node>, targets: &Targets, scheduler: &mut impl Scheduler) -> Result<()> {
    for (i, to) in targets.iter().enumerate() {
        if let &Some(to) = to {
            scheduler.send(to, 0, Sender::new(node, i), Arrival::Nothing)?;
        }
    }
    Ok(())
}

/// An error of a backward function, with the operation's name if it has none.
#[cold]
fn located(error: Error, op: &'static str) -> Error {
    match error {
        Error::InBackward { .. } | Error::Panicked { .. } | Error::Modified { .. } => error,
        source => Error::InBackward { op, source: Box::new(source) },
    }
}

fn check_nan(node: &Node, made: &[Option<Var>]) -> Result<()> {
    for grad in made.iter().flatten() {
        if !grad.device().is_meta() && kernels::any_nan(grad.tensor())? {
            let recorded = node.recorded.as_deref().unwrap_or("(anomaly mode was off in the forward pass)");
            return Err(Error::Nan { op: node.name, recorded: recorded.to_string() });
        }
    }
    Ok(())
}

/// Runs nodes; a panic of a backward function or of a hook is an error that names the one that `op` holds.
pub(super) fn guarded(op: &Cell<&'static str>, run: impl FnOnce() -> Result<()>) -> Result<()> {
    let done = catch_unwind(AssertUnwindSafe(run));
    done.unwrap_or_else(|panic| Err(Error::Panicked { op: op.get(), message: message_of(&*panic) }))
}

/// The text of a panic.
fn message_of(panic: &(dyn Any + Send)) -> String {
    panic_message(panic).unwrap_or("(no message)").into()
}
