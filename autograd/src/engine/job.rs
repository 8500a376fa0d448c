//! One backward pass: what it is to do, and the running of one node.

use std::any::Any;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use phalanx_kernels as kernels;
use phalanx_tensor::Context;
use smallvec::SmallVec;

use super::plan::NodeMap;
use super::task::{Arrival, NodeGrads, Scheduler, Task, origin};
use super::{Options, check_gradient};
use crate::backward::{Backward, Cx};
use crate::checkpoint::Recomputation;
use crate::node::{Body, Edge, Node};
use crate::{Error, Result, Var, anomaly};

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
    targets: Vec<Option<Edge>>,
    captured: Mutex<Vec<Option<Var>>>,
    needed: RwLock<NodeMap<bool>>,
    deferred: Mutex<Vec<Task>>,
}

impl Job {
    pub(super) fn new(options: Options, mode: Mode, inputs: &[&Var]) -> Job {
        let context = Context { grad: options.create_graph, ..Context::current() };
        Job {
            options,
            mode,
            context,
            anomaly: anomaly::is_on(),
            targets: inputs.iter().map(|v| v.edge().cloned()).collect(),
            captured: Mutex::new(vec![None; inputs.len()]),
            needed: RwLock::default(),
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
    pub(super) fn into_deferred(self) -> Vec<Task> {
        let mut deferred = self.deferred.into_inner().unwrap_or_else(PoisonError::into_inner);
        deferred.sort_by_key(|task| Reverse(task.node.seq));
        deferred
    }

    /// Whether a gradient is passed along this edge.
    pub(super) fn follows(&self, edge: &Edge) -> bool {
        match self.mode {
            Mode::All => true,
            Mode::Capture => {
                let needed = self.needed.read().unwrap_or_else(PoisonError::into_inner);
                needed.get(&edge.node.id).copied().unwrap_or(false)
            }
            Mode::Inputs => !edge.node.weight,
            Mode::Weights => edge.node.weight,
        }
    }

    /// Marks the nodes from which a wanted value is reached. Inputs were recorded before what uses them, so in
    /// order of sequence numbers a node's inputs are decided before it.
    pub(super) fn find_needed<'a>(&self, roots: impl Iterator<Item = &'a Arc<Node>>) {
        if self.mode != Mode::Capture {
            return;
        }
        let mut marks = self.needed.write().unwrap_or_else(PoisonError::into_inner);
        let mut order: Vec<&Arc<Node>> = Vec::new();
        let mut waiting: Vec<&Arc<Node>> = roots.collect();
        while let Some(node) = waiting.pop() {
            if let Entry::Vacant(mark) = marks.entry(node.id) {
                mark.insert(false);
                order.push(node);
                waiting.extend(node.inputs.iter().flatten().map(|e| &e.node));
            }
        }
        for target in self.targets.iter().flatten() {
            if let Some(mark) = marks.get_mut(&target.node.id) {
                *mark = true;
            }
        }
        order.sort_by_key(|node| node.seq);
        for node in order {
            let reaches = |e: &Edge| marks.get(&e.node.id).copied().unwrap_or(false);
            if node.inputs.iter().flatten().any(reaches) {
                marks.insert(node.id, true);
            }
        }
    }

    /// Runs a node whose gradients are complete. A panic of its backward function or of a hook is an error.
    pub(super) fn run_node(&self, task: Task, scheduler: &mut impl Scheduler) -> Result<()> {
        let Task { node, mut grads, in_buffer } = task;
        let done =
            catch_unwind(AssertUnwindSafe(|| self.run_unguarded(&node, &mut grads, in_buffer, scheduler)));
        done.unwrap_or_else(|panic| Err(Error::Panicked { op: node.name, message: message_of(&*panic) }))
    }

    fn run_unguarded(
        &self,
        node: &Arc<Node>,
        grads: &mut NodeGrads,
        in_buffer: bool,
        scheduler: &mut impl Scheduler,
    ) -> Result<()> {
        if grads.iter().all(Option::is_none) && !in_buffer {
            return self.pass_nothing(node, scheduler);
        }
        // What was deferred has seen its hooks when its gradients were complete.
        if self.mode != Mode::Weights || node.weight {
            node.run_grad_hooks(grads)?;
        }
        self.capture(node, grads);
        match &node.body {
            Body::Leaf(_) if self.mode == Mode::Capture => Ok(()),
            Body::Leaf(leaf) => {
                if let Some(grad) = grads[0].take() {
                    leaf.accumulate(grad, self.options.create_graph)?;
                }
                node.run_accumulate_hooks()
            }
            Body::Operation(body) => self.run_operation(node, body, grads, scheduler),
            Body::Checkpoint(body) => self.run_checkpoint(node, body, grads, scheduler),
        }
    }

    fn keeps_graph(&self) -> bool {
        self.options.retain_graph || self.options.create_graph
    }

    fn run_operation(
        &self,
        node: &Arc<Node>,
        body: &Mutex<Option<Arc<dyn Backward>>>,
        grads: &mut NodeGrads,
        scheduler: &mut impl Scheduler,
    ) -> Result<()> {
        let needs: Flags = node.inputs.iter().map(|e| e.as_ref().is_some_and(|e| self.follows(e))).collect();
        let defers = self.mode == Mode::Inputs && node.inputs.iter().flatten().any(|e| e.node.weight);
        let keeps = defers || self.keeps_graph();
        if needs.contains(&true) {
            let mut body = body.lock().unwrap_or_else(PoisonError::into_inner);
            let operation = if keeps { body.clone() } else { body.take() };
            drop(body);
            let operation = operation.ok_or(Error::Freed { op: node.name })?;
            self.compute(node, operation, grads, &needs, scheduler)?;
        } else if !keeps {
            free(body);
        }
        if defers {
            release(body, |i| node.inputs[i].as_ref().is_some_and(|e| e.node.weight));
            let task = Task { node: node.clone(), grads: std::mem::take(grads), in_buffer: false };
            self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push(task);
        }
        Ok(())
    }

    /// Calls the backward function and sends what it made.
    fn compute(
        &self,
        node: &Arc<Node>,
        operation: Arc<dyn Backward>,
        grads: &[Option<Var>],
        needs: &[bool],
        scheduler: &mut impl Scheduler,
    ) -> Result<()> {
        let may_sink = !self.options.create_graph && self.mode != Mode::Capture;
        let mut sinks = Flags::new();
        if may_sink && node.inputs.iter().flatten().any(|e| e.node.takes_in_place()) {
            let sink = |(i, edge): (usize, &Option<Edge>)| {
                let edge = edge.as_ref().filter(|e| needs[i] && e.node.takes_in_place());
                edge.is_some_and(|e| scheduler.is_sole(&e.node))
            };
            sinks = node.inputs.iter().enumerate().map(sink).collect();
        }
        let sunk = RefCell::new(SmallVec::new());
        let cx =
            Cx { node, grads, needs, create_graph: self.options.create_graph, sinks: &sinks, sunk: &sunk };
        let mut made = operation.backward(&cx).map_err(|source| match source {
            located @ (Error::InBackward { .. } | Error::Panicked { .. } | Error::Modified { .. }) => located,
            source => Error::InBackward { op: node.name, source: Box::new(source) },
        })?;
        drop(operation);
        if self.anomaly {
            check_nan(node, &made)?;
        }
        node.run_node_hooks(grads, &made)?;
        let sunk = sunk.into_inner();
        for (i, edge) in node.inputs.iter().enumerate() {
            let (Some(edge), true) = (edge, needs[i]) else { continue };
            let grad = match made.get_mut(i).and_then(Option::take) {
                Some(grad) => {
                    check_gradient(&edge.node, edge.output, &grad).map_err(|e| named(e, node.name))?;
                    Arrival::Grad(grad)
                }
                None if sunk.contains(&i) => Arrival::InBuffer,
                None => Arrival::Nothing,
            };
            scheduler.send(edge, origin(node, i), grad)?;
        }
        Ok(())
    }

    /// Puts the recomputed graph in the checkpoint's place: its gradients go to that graph's outputs, and that graph
    /// sends to the nodes that the checkpoint stood before.
    fn run_checkpoint(
        &self,
        node: &Arc<Node>,
        body: &Mutex<Option<Arc<Recomputation>>>,
        grads: &mut NodeGrads,
        scheduler: &mut impl Scheduler,
    ) -> Result<()> {
        let recomputation = body.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let recomputation = recomputation.ok_or(Error::Freed { op: node.name })?;
        let outputs = recomputation.take(node)?;
        if !self.keeps_graph() {
            free(body);
        }
        drop(recomputation);
        let (mut entries, mut arriving) = (Vec::new(), Vec::new());
        for (edge, grad) in outputs.into_iter().zip(std::mem::take(grads)) {
            if let (Some(edge), Some(grad)) = (edge.filter(|e| self.follows_entry(e)), grad) {
                entries.push(edge);
                arriving.push(grad);
            }
        }
        scheduler.extend(&entries);
        for (i, (to, grad)) in entries.iter().zip(arriving).enumerate() {
            scheduler.send(to, origin(node, i), Arrival::Grad(grad))?;
        }
        self.pass_nothing(node, scheduler)
    }

    /// Whether a checkpoint's gradient goes to this place of the recomputed graph.
    fn follows_entry(&self, edge: &Edge) -> bool {
        self.mode != Mode::Capture || {
            self.find_needed([&edge.node].into_iter());
            self.follows(edge)
        }
    }

    /// Tells those behind a node not to wait for it.
    fn pass_nothing(&self, node: &Arc<Node>, scheduler: &mut impl Scheduler) -> Result<()> {
        for (i, edge) in node.inputs.iter().enumerate() {
            if let Some(edge) = edge.as_ref().filter(|e| self.follows(e)) {
                scheduler.send(edge, origin(node, i), Arrival::Nothing)?;
            }
        }
        Ok(())
    }

    fn capture(&self, node: &Arc<Node>, grads: &[Option<Var>]) {
        if self.mode != Mode::Capture {
            return;
        }
        let mut captured = self.captured.lock().unwrap_or_else(PoisonError::into_inner);
        for (target, kept) in self.targets.iter().zip(captured.iter_mut()) {
            if let Some(target) = target.as_ref().filter(|t| Arc::ptr_eq(&t.node, node)) {
                *kept = grads[target.output].clone();
            }
        }
    }
}

/// One flag an input.
type Flags = SmallVec<[bool; 4]>;

/// Frees what a node saved.
fn free<T: ?Sized>(body: &Mutex<Option<Arc<T>>>) {
    let freed = body.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(freed);
}

/// Frees of what a node saved whatever serves only gradients that are not wanted any more. Where another pass is
/// using it, it stays.
fn release(body: &Mutex<Option<Arc<dyn Backward>>>, later: impl Fn(usize) -> bool) {
    if let Some(operation) = &mut *body.lock().unwrap_or_else(PoisonError::into_inner)
        && let Some(operation) = Arc::get_mut(operation)
    {
        operation.release(&later);
    }
}

fn named(error: Error, op: &'static str) -> Error {
    match error {
        Error::Gradient { got, wanted, .. } => Error::Gradient { op, got, wanted },
        other => other,
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

/// The text of a panic.
pub(super) fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".into())
}
