//! One backward pass: what it is to do, and the running of one node.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use phalanx_kernels as kernels;
use phalanx_tensor::Context;
use smallvec::SmallVec;

use super::plan::{Key, NodeMap, key};
use super::{Options, check_gradient};
use crate::backward::{Backward, Cx};
use crate::node::{Body, Edge, Node};
use crate::{Error, Result, Var, anomaly};

/// Gradients of a node's outputs.
pub(crate) type NodeGrads = SmallVec<[Option<Var>; 1]>;

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
    needed: OnceLock<NodeMap<bool>>,
    deferred: Mutex<Vec<(Arc<Node>, NodeGrads)>>,
}

/// What arrives along an edge.
pub(super) enum Arrival {
    /// A gradient.
    Grad(Var),
    /// The sender has added its gradient to the leaf's buffer itself.
    InBuffer,
    /// There is none; the receiver need not wait for it.
    Nothing,
}

/// A gradient on its way to a node.
pub(super) struct Message {
    pub(super) to: Edge,
    /// Where it comes from: the sender's sequence number and edge, the order in which gradients are summed.
    pub(super) from: (u64, usize),
    pub(super) grad: Arrival,
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
            needed: OnceLock::new(),
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
    pub(super) fn into_deferred(self) -> Vec<(Arc<Node>, NodeGrads)> {
        let mut deferred = self.deferred.into_inner().unwrap_or_else(PoisonError::into_inner);
        deferred.sort_by_key(|d| std::cmp::Reverse(d.0.seq));
        deferred
    }

    /// Whether a gradient is passed along this edge.
    pub(super) fn follows(&self, edge: &Edge) -> bool {
        match self.mode {
            Mode::All => true,
            Mode::Capture => self.needs(key(&edge.node)),
            Mode::Inputs => !edge.node.weight,
            Mode::Weights => edge.node.weight,
        }
    }

    fn needs(&self, node: Key) -> bool {
        self.needed.get().is_some_and(|needed| needed.get(&node).copied().unwrap_or(false))
    }

    /// Marks the nodes from which a wanted value is reached. Inputs were recorded before what uses them, so in
    /// order of sequence numbers a node's inputs are decided before it.
    pub(super) fn find_needed(&self, roots: &[(Arc<Node>, NodeGrads)]) {
        if self.mode != Mode::Capture {
            return;
        }
        let mut marks = NodeMap::default();
        let mut order: Vec<&Arc<Node>> = Vec::new();
        let mut waiting: Vec<&Arc<Node>> = roots.iter().map(|r| &r.0).collect();
        while let Some(node) = waiting.pop() {
            if marks.insert(key(node), false).is_none() {
                order.push(node);
                waiting.extend(node.inputs.iter().flatten().map(|e| &e.node));
            }
        }
        for target in self.targets.iter().flatten() {
            if let Some(mark) = marks.get_mut(&key(&target.node)) {
                *mark = true;
            }
        }
        order.sort_by_key(|node| node.seq);
        for node in order {
            let reaches = |e: &Edge| marks.get(&key(&e.node)).copied().unwrap_or(false);
            if node.inputs.iter().flatten().any(reaches) {
                marks.insert(key(node), true);
            }
        }
        let _ = self.needed.set(marks);
    }

    /// Runs a node whose gradients are complete. `sole(edge)` tells whether this node is the only one to
    /// contribute to a leaf.
    pub(super) fn run_node(
        &self,
        node: &Arc<Node>,
        mut grads: NodeGrads,
        in_buffer: bool,
        sole: impl Fn(&Edge) -> bool,
    ) -> Result<Vec<Message>> {
        if grads.iter().all(Option::is_none) && !in_buffer {
            return Ok(self.pass_nothing(node));
        }
        if self.mode != Mode::Weights || node.leaf().is_some() {
            node.run_grad_hooks(&mut grads)?;
        }
        self.capture(node, &grads);
        match &node.body {
            Body::Leaf(_) if self.mode == Mode::Capture => Ok(Vec::new()),
            Body::Leaf(leaf) => {
                if let Some(grad) = grads[0].take() {
                    leaf.accumulate(grad, self.options.create_graph)?;
                }
                node.run_accumulate_hooks()?;
                Ok(Vec::new())
            }
            Body::Operation(body) => {
                let needs: SmallVec<[bool; 4]> =
                    node.inputs.iter().map(|e| e.as_ref().is_some_and(|e| self.follows(e))).collect();
                let defers = self.mode == Mode::Inputs && node.inputs.iter().flatten().any(|e| e.node.weight);
                let messages = match needs.contains(&true) {
                    true => self.run_operation(node, body, &grads, &needs, sole)?,
                    false => Vec::new(),
                };
                if defers {
                    self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push((node.clone(), grads));
                } else if !self.options.retain_graph && !self.options.create_graph {
                    body.lock().unwrap_or_else(PoisonError::into_inner).take();
                }
                Ok(messages)
            }
        }
    }

    fn run_operation(
        &self,
        node: &Arc<Node>,
        body: &Mutex<Option<Arc<dyn Backward>>>,
        grads: &[Option<Var>],
        needs: &[bool],
        sole: impl Fn(&Edge) -> bool,
    ) -> Result<Vec<Message>> {
        let operation = body.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let operation = operation.ok_or(Error::Freed { op: node.name })?;
        let sinks: SmallVec<[bool; 4]> = node
            .inputs
            .iter()
            .zip(needs)
            .map(|(edge, &needed)| match edge {
                Some(edge) if needed && !self.options.create_graph && self.mode != Mode::Capture => {
                    edge.node.leaf().is_some_and(|leaf| leaf.has_buffer()) && sole(edge)
                }
                _ => false,
            })
            .collect();
        let sunk = RefCell::new(SmallVec::from_elem(false, needs.len()));
        let cx =
            Cx { node, grads, needs, create_graph: self.options.create_graph, sinks: &sinks, sunk: &sunk };
        let made = catch_unwind(AssertUnwindSafe(|| operation.backward(&cx)));
        let made = made.map_err(|panic| Error::Panicked { op: node.name, message: message_of(&*panic) })?;
        let made = made.map_err(|source| match source {
            located @ (Error::InBackward { .. } | Error::Panicked { .. } | Error::Modified { .. }) => located,
            source => Error::InBackward { op: node.name, source: Box::new(source) },
        })?;
        drop(operation);
        if self.anomaly {
            check_nan(node, &made)?;
        }
        node.run_node_hooks(grads, &made)?;
        let sunk = sunk.into_inner();
        let mut messages = Vec::with_capacity(made.len());
        for (i, (edge, grad)) in
            node.inputs.iter().zip(made.into_iter().chain(std::iter::repeat(None))).enumerate()
        {
            let (Some(edge), true) = (edge, needs[i]) else { continue };
            let grad = match grad {
                Some(grad) => {
                    check_gradient(&edge.node, edge.output, &grad).map_err(|e| named(e, node.name))?;
                    Arrival::Grad(grad)
                }
                None if sunk[i] => Arrival::InBuffer,
                None => Arrival::Nothing,
            };
            messages.push(Message { to: edge.clone(), from: (node.seq, i), grad });
        }
        Ok(messages)
    }

    /// A node that no gradient has reached tells those behind it not to wait.
    fn pass_nothing(&self, node: &Arc<Node>) -> Vec<Message> {
        let followed = node.inputs.iter().enumerate().filter_map(|(i, e)| Some((i, e.as_ref()?)));
        let tell =
            |(i, e): (usize, &Edge)| Message { to: e.clone(), from: (node.seq, i), grad: Arrival::Nothing };
        followed.filter(|(_, e)| self.follows(e)).map(tell).collect()
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
