//! One backward pass: what it is to do, and the running of one node.

use std::any::Any;
use std::cell::Cell;
use std::cmp::Reverse;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use phalanx_kernels as kernels;
use phalanx_tensor::Context;

use super::task::{Arrival, NodeGrads, Root, Scheduler, Targets, Task, origin};
use super::{Options, misfit};
use crate::backward::{Cx, Few};
use crate::checkpoint::Recomputation;
use crate::node::{Edge, Node};
use crate::operation::Operation;
use crate::{Error, Result, Var, anomaly, profile};

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
pub(super) struct Job {
    options: Options,
    mode: Mode,
    /// The context of the call, in which backward functions run.
    pub(super) context: Context,
    pub(super) anomaly: bool,
    wanted: Vec<Option<Edge>>,
    captured: Mutex<Vec<Option<Var>>>,
    deferred: Mutex<Vec<Root>>,
}

impl Job {
    pub(super) fn new(options: Options, mode: Mode, inputs: &[&Var]) -> Job {
        let context = Context { grad: options.create_graph, ..Context::current() };
        Job {
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
        self.captured.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// The deferred nodes, latest first.
    pub(super) fn into_deferred(self) -> Vec<Root> {
        let mut deferred = self.deferred.into_inner().unwrap_or_else(PoisonError::into_inner);
        deferred.sort_by_key(|root| Reverse(root.node.seq));
        deferred
    }

    /// Whether a gradient may be passed along this edge.
    #[inline]
    pub(super) fn passes(&self, edge: &Edge) -> bool {
        match self.mode {
            Mode::All | Mode::Capture => true,
            Mode::Inputs => !edge.node.weight,
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
    pub(super) fn run_node(&self, mut task: Task<'_>, scheduler: &mut impl Scheduler) -> Result<()> {
        let Task { node, targets, pending } = &mut task;
        let (node, grads) = (&**node, &mut *pending.grads);
        if grads.iter().all(Option::is_none) && !pending.in_buffer {
            return pass_nothing(node, targets, scheduler);
        }
        // What was deferred has seen its hooks when its gradients were complete.
        if self.mode != Mode::Weights || node.weight {
            node.run_grad_hooks(grads)?;
        }
        if self.captures() && self.is_captured(node) {
            self.capture(node, grads);
        }
        if let Some(operation) = node.body.operation() {
            return self.run_operation(operation, node, grads, targets, scheduler);
        }
        match (node.leaf(), node.body.checkpoint()) {
            (Some(_), _) if self.captures() => Ok(()),
            (Some(leaf), _) => {
                if let Some(grad) = grads[0].take() {
                    let timed = profile::node_begins(&[]).map(|timed| (timed, leaf.has_buffer()));
                    leaf.accumulate(grad, self.options.create_graph)?;
                    if let Some((timed, adds)) = timed {
                        // The first gradient is kept as it is.
                        timed.ends("accumulate", &[], node.outputs.iter().filter(|_| adds));
                    }
                }
                node.run_accumulate_hooks()
            }
            (None, Some(body)) => self.run_checkpoint(node, body, grads, targets, scheduler),
            (None, None) => unreachable!("a node is one of the three"),
        }
    }

    fn keeps_graph(&self) -> bool {
        self.options.retain_graph || self.options.create_graph
    }

    fn run_operation(
        &self,
        operation: &dyn Operation,
        node: &Arc<Node>,
        grads: &mut [Option<Var>],
        targets: &Targets,
        scheduler: &mut impl Scheduler,
    ) -> Result<()> {
        let weight = |edge: &Option<Edge>| edge.as_ref().is_some_and(|e| e.node.weight);
        let defers = self.mode == Mode::Inputs && node.inputs.iter().any(weight);
        let keeps = defers || self.keeps_graph();
        if targets.iter().any(Option::is_some) {
            self.compute(operation, keeps, node, grads, targets, scheduler)?;
        } else if !keeps {
            operation.free();
        }
        if defers {
            operation.release(&|i| weight(&node.inputs[i]));
            let kept =
                |(i, grad): (usize, &Option<Var>)| grad.clone().filter(|_| operation.keeps_gradient(i));
            let grads = NodeGrads::of(grads.iter().enumerate().map(kept));
            let root = Root { node: Arc::clone(node), grads };
            self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push(root);
        }
        Ok(())
    }

    /// Calls the backward function and sends what it made.
    fn compute(
        &self,
        operation: &dyn Operation,
        keeps: bool,
        node: &Arc<Node>,
        grads: &mut [Option<Var>],
        targets: &Targets,
        scheduler: &mut impl Scheduler,
    ) -> Result<()> {
        let create_graph = self.options.create_graph;
        let may_sink = !create_graph && !self.captures();
        let (inputs, targets) = (&*node.inputs, &**targets);
        let (mut sinks, sunk) = (Few::default(), Cell::default());
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
        let mut cx = Cx { node, grads, targets, create_graph, watched, sinks, sunk: &sunk };
        let mut made = match operation.run(&mut cx, keeps) {
            Some(Ok(made)) => made,
            Some(Err(error)) => return Err(located(error, node.name)),
            None => return Err(Error::Freed { op: node.name }),
        };
        if let Some(timed) = timed {
            let is_added = |i: &usize| sunk.get().contains(*i);
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
            let grad = match made.get_mut(i).and_then(Option::take) {
                Some(grad) if !edge.meta().is_of(grad.tensor()) => {
                    return Err(misfit(node.name, &grad, edge.meta()));
                }
                Some(grad) => Arrival::Grad(grad),
                None if sunk.get().contains(i) => Arrival::InBuffer,
                None => Arrival::Nothing,
            };
            scheduler.send(to, edge.output(), origin(node, i), grad)?;
        }
        Ok(())
    }

    /// Puts the recomputed graph in the checkpoint's place: its gradients go to that graph's outputs, and that graph
    /// sends to the nodes that the checkpoint stood before.
    fn run_checkpoint(
        &self,
        node: &Arc<Node>,
        body: &Mutex<Option<Arc<Recomputation>>>,
        grads: &mut [Option<Var>],
        targets: &Targets,
        scheduler: &mut impl Scheduler,
    ) -> Result<()> {
        let lock = || body.lock().unwrap_or_else(PoisonError::into_inner);
        let recomputation = lock().clone();
        let recomputation = recomputation.ok_or(Error::Freed { op: node.name })?;
        let outputs = recomputation.take(node)?;
        if !self.keeps_graph() {
            let freed = lock().take();
            drop(freed);
        }
        drop(recomputation);
        let (mut entries, mut arriving) = (Vec::new(), Vec::new());
        for (edge, grad) in outputs.into_iter().zip(grads) {
            if let (Some(edge), Some(grad)) = (edge, grad.take()) {
                entries.push(edge);
                arriving.push(grad);
            }
        }
        let places = scheduler.extend(node, &entries);
        for (i, ((edge, to), grad)) in entries.iter().zip(places.iter()).zip(arriving).enumerate() {
            if let &Some(to) = to {
                scheduler.send(to, edge.output(), origin(node, i), Arrival::Grad(grad))?;
            }
        }
        pass_nothing(node, targets, scheduler)
    }

    #[cold]
    fn capture(&self, node: &Arc<Node>, grads: &[Option<Var>]) {
        let mut captured = self.captured.lock().unwrap_or_else(PoisonError::into_inner);
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
            scheduler.send(to, 0, origin(node, i), Arrival::Nothing)?;
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
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".into())
}
