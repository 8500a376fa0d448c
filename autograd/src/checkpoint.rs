//! Recomputation: a part of the graph whose values are not kept, but computed again when backward needs them.
//!
//! Two nodes stand for the part, tied by a fork and a join:
//!
//! ```text
//! forward    x --> Checkpoint --> fork --------> join --> y'      the function runs without a graph
//!                                    \ phony     /
//!                                     Recompute
//!
//! backward   1. join passes its gradient to fork, which waits for Recompute
//!            2. Recompute runs the function again, now with a graph, under the context of the first run
//!            3. Checkpoint gives way to that graph, which hangs on the very nodes that x and the parameters have
//! ```
//! `Recompute` may be tied to any later value ([`Recompute::before`]), so that a stage of a pipeline recomputes while
//! its gradient is still on the way.
//!
//! The recomputed graph becomes part of the pass that is under way; there is no pass inside the pass. Its nodes get
//! the sequence numbers that they would have had ([`crate::graph::sequence`]). So gradients are the same bits, in the same
//! order, with the same hooks, as without a checkpoint, also those of parameters that are used elsewhere too; the
//! gradient of any value can be asked for, split backward passes work, and so do second derivatives.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use phalanx_tensor::{Context, Device, unpoisoned};

use crate::dependency::{fork, join, phony};
use crate::function::{Outputs, reassemble};
use crate::graph::memory::SmallList;
use crate::graph::node::{Edge, GradFn, Meta, Node, NodeKind};
use crate::graph::saved_variable::SavedVariable;
use crate::graph::sequence::{self, next_sequence};
use crate::mode::ContextMode;
use crate::record::{UseListenerGuard, listen_to_uses};
use crate::{Backward, Cx, Error, Grads, Result, SaveContext, Var, grads1, record};

/// Runs `f` without keeping what it computes; backward computes it again. Gradients are the same bits as those of
/// `f(inputs)`, dropout included.
///
/// `f` must be a function: of the same inputs it computes the same, twice. What it asks of the outside, and what may have
/// changed by the time of the backward pass, it asks by way of [`repeated`]. Values and parameters that it captures get
/// their gradients too. Without gradients this is `f(inputs)`.
///
/// # Errors
/// Whatever `f` returns.
///
/// ```
/// use phalanx_autograd::{Var, checkpoint, tensor::{Device, Tensor}};
/// let x = Var::leaf(Tensor::scalar(0.5f64, Device::CPU)?)?;
/// let y = checkpoint(|v| v[0].tanh()?.tanh(), &[&x])?;
/// y.backward()?;
/// let with = x.grad().unwrap().item::<f64>()?;
/// x.as_leaf().unwrap().zero_grad()?;
/// x.tanh()?.tanh()?.backward()?;
/// assert_eq!(with, x.grad().unwrap().item::<f64>()?);
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
pub fn checkpoint<O: Outputs>(
    f: impl Fn(&[Var]) -> Result<O> + Send + Sync + 'static,
    inputs: &[&Var],
) -> Result<O> {
    let (mut outputs, recompute) = apart(erased(f), inputs)?;
    if let (Some(recompute), Some(first)) = (recompute, outputs.iter_mut().find(|v| v.requires_grad())) {
        *first = recompute.before(first)?;
    }
    Ok(reassemble(outputs))
}

/// As [`checkpoint`], but the caller chooses when the values are recomputed, by [`Recompute::before`] on the outputs or
/// on a value computed from them. Without it they are recomputed when the gradient has arrived. `None` if there is
/// nothing to recompute.
///
/// # Errors
/// Whatever `f` returns.
pub fn checkpoint_apart<O: Outputs>(
    f: impl Fn(&[Var]) -> Result<O> + Send + Sync + 'static,
    inputs: &[&Var],
) -> Result<(O, Option<Recompute>)> {
    let (outputs, recompute) = apart(erased(f), inputs)?;
    Ok((reassemble(outputs), recompute))
}

/// A checkpoint's function, whatever it returns.
type Function = Box<dyn Fn(&[Var]) -> Result<Vec<Var>> + Send + Sync>;

fn erased<O: Outputs>(f: impl Fn(&[Var]) -> Result<O> + Send + Sync + 'static) -> Function {
    Box::new(move |vars| Ok(f(vars)?.into_vars()))
}

/// [`checkpoint_apart`], compiled once.
fn apart(function: Function, inputs: &[&Var]) -> Result<(Vec<Var>, Option<Recompute>)> {
    let context = Context::current();
    let detached: Vec<Var> = inputs.iter().map(|v| v.detach()).collect();
    if !context.grad() {
        // The nodes that this will be, if it runs inside another checkpoint.
        (0..NODES).for_each(|_| sequence::pass_over());
        return Ok((function(&inputs.iter().map(|&v| v.clone()).collect::<Vec<_>>())?, None));
    }
    // Before `f` runs, so that an input that it modifies is found.
    let saved = inputs.iter().enumerate().map(|(i, v)| SavedVariable::input(i, v)).collect::<Result<_>>()?;
    let before = sequence::count();
    let (outputs, used, numbers) = {
        let _context = Context::with(|c| {
            c.set_grad(false);
            c.set_checkpointing(true);
        });
        let (uses, numbers) = (Uses::collect(), Log::write());
        (function(&detached)?, uses.end(), numbers.end())
    };
    if !outputs.iter().any(|v| v.dtype().is_float()) {
        return Ok((outputs, None));
    }
    let own = inputs.iter().map(|v| v.edge().cloned());
    let edges: Vec<_> = own.chain(used.iter().map(|u| Some(u.edge.clone()))).collect();
    let recomputation = Arc::new(Recomputation {
        function,
        inputs: saved,
        used: used.into_iter().enumerate().map(|(i, u)| u.save(inputs.len() + i)).collect(),
        context,
        sequence: sequence::reserve(sequence::count() - before),
        numbers,
        recomputed: Mutex::new(None),
    });
    let (seq, id) = next_sequence();
    let node: Arc<Node> = Arc::new(Node {
        seq,
        id,
        name: "checkpoint",
        inputs: SmallList::of(edges.into_iter()),
        outputs: SmallList::of(outputs.iter().map(|v| Meta::of(v.tensor()))),
        grad_fn: Checkpoint(Mutex::new(Some(recomputation.clone()))),
        weight: false,
        kind: NodeKind::Subgraph,
        hooks: Default::default(),
        recorded: crate::anomaly::recorded_here(),
    });
    let link = |(output, var): (usize, Var)| {
        let edge = var.dtype().is_float().then(|| Edge::new(node.clone(), output));
        Var::from_parts(var.into_tensor(), edge)
    };
    let outputs = outputs.into_iter().enumerate().map(link).collect();
    Ok((outputs, Some(Recompute { node, recomputation })))
}

/// Nodes of a checkpoint: itself, fork, recompute, join.
const NODES: usize = 4;

/// The second half of a [`checkpoint_apart`].
#[derive(Clone)]
pub struct Recompute {
    node: Arc<Node>,
    recomputation: Arc<Recomputation>,
}

impl Recompute {
    /// `at` itself. In backward, the values are computed again as soon as the gradient of the result is there, before
    /// that of `at` is passed on.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn before(&self, at: &Var) -> Result<Var> {
        let (at, forked) = fork(at)?;
        let mark = phony(self.node.device(), false)?.into_tensor();
        let device = at.device();
        let again = |_: &SaveContext<'_>| Ok(RunAgain { recompute: self.clone(), device });
        join(&at, &record("recompute", &[&forked], mark, again)?)
    }

    /// Computes the values again at once, for a backward pass that is yet to come.
    ///
    /// # Errors
    /// If what the function uses was modified in place, or whatever the function returns.
    pub fn now(&self) -> Result<()> {
        let edges = self.recomputation.run(&self.node)?;
        *unpoisoned(self.recomputation.recomputed.lock()) = Some(edges);
        Ok(())
    }
}

/// The function that is checkpointed.
type Part = dyn Fn(&[Var]) -> Result<Vec<Var>> + Send + Sync;

/// Everything that is needed to run the function again.
struct Recomputation {
    function: Box<Part>,
    inputs: Vec<SavedVariable>,
    used: Vec<SavedUse>,
    /// The context of the first run: random numbers, train or eval mode.
    context: Context,
    /// The sequence numbers of the function's operations.
    sequence: Range<u64>,
    /// What the function has asked [`repeated`] for.
    numbers: Arc<[u64]>,
    /// Where the outputs' gradients go, once the function has run again.
    recomputed: Mutex<Option<Vec<Option<Edge>>>>,
}

/// The [`GradFn`] of a checkpoint's node. It has no recomputation any more once that is freed.
struct Checkpoint(Mutex<Option<Arc<Recomputation>>>);

impl GradFn for Checkpoint {
    fn expand(&self, node: &Arc<Node>, kept: bool) -> Option<Result<Vec<Option<Edge>>>> {
        let lock = || unpoisoned(self.0.lock());
        let recomputation = lock().clone()?;
        let outputs = recomputation.take(node);
        if outputs.is_ok() && !kept {
            let freed = lock().take();
            drop(freed);
        }
        Some(outputs)
    }
}

impl Recomputation {
    fn run(&self, node: &Arc<Node>) -> Result<Vec<Option<Edge>>> {
        for used in &self.used {
            used.check(node)?;
        }
        let inputs: Vec<Var> = self.inputs.iter().map(|s| s.unpack(node, true)).collect::<Result<_>>()?;
        let mut context = self.context;
        context.set_grad(true);
        context.set_checkpointing(false);
        context.set_recomputing(true);
        let _context = context.enter();
        let _sequence = sequence::use_reserved(&self.sequence);
        let _numbers = Reading::begin(&self.numbers);
        let begin = Instant::now();
        let outputs = (self.function)(&inputs)?;
        HEARER.with_borrow(|hearer| hearer.iter().for_each(|hear| hear([begin, Instant::now()])));
        let same = |(var, meta): (&Var, &Meta)| Meta::of(var.tensor()) == *meta;
        if outputs.len() != node.outputs.len() || !outputs.iter().zip(node.outputs.iter()).all(same) {
            let why = "checkpoint: the recomputation has other outputs than the forward pass had";
            return Err(Error::Custom(why.into()));
        }
        Ok(outputs.iter().map(|v| v.edge().cloned()).collect())
    }

    /// Where the outputs' gradients go. Runs the function unless [`Recompute::now`] has.
    fn take(&self, node: &Arc<Node>) -> Result<Vec<Option<Edge>>> {
        let recomputed = unpoisoned(self.recomputed.lock()).take();
        recomputed.map_or_else(|| self.run(node), Ok)
    }
}

thread_local! {
    static HEARER: RefCell<Option<Box<Hear>>> = const { RefCell::new(None) };
}

/// Observes recomputations: called with the times at which one began and ended. It must not start one itself.
type Hear = dyn Fn([Instant; 2]);

/// Calls `hear` after every recomputation of this thread with the times at which it began and ended, until the guard is
/// dropped.
pub fn hear_recomputations(hear: impl Fn([Instant; 2]) + 'static) -> HearingGuard {
    HearingGuard { before: HEARER.replace(Some(Box::new(hear))) }
}

/// See [`hear_recomputations`].
pub struct HearingGuard {
    before: Option<Box<Hear>>,
}

impl Drop for HearingGuard {
    fn drop(&mut self) {
        HEARER.set(self.before.take());
    }
}

struct RunAgain {
    recompute: Recompute,
    device: Device,
}

impl Backward for RunAgain {
    fn backward(&self, _: &Cx<'_>) -> Result<Grads> {
        self.recompute.now()?;
        grads1(phony(self.device, false)?)
    }
}

/// A tensor that the checkpointed function captures, and the first operation that used it.
struct Use {
    edge: Edge,
    /// By handle, if it is a leaf: what that holds may be given up before the function ends.
    saved: SavedVariable,
    op: &'static str,
    input: usize,
}

/// [`Use`], with the check that the value is the same when it is used again.
struct SavedUse {
    saved: SavedVariable,
    op: &'static str,
    input: usize,
}

impl Use {
    fn save(self, place: usize) -> SavedUse {
        SavedUse { saved: self.saved.at(place), op: self.op, input: self.input }
    }
}

impl SavedUse {
    fn check(&self, node: &Arc<Node>) -> Result<()> {
        let name = |error| match error {
            Error::Modified { saved, now, .. } => {
                Error::Modified { op: self.op, value: format!("input {}", self.input), saved, now }
            }
            other => other,
        };
        self.saved.unpack(node, false).map(drop).map_err(name)
    }
}

/// Collects what the checkpointed function that runs on this thread uses from outside. An operation in it that has an input
/// with a graph is such a use: gradients leave the checkpoint there.
struct Uses {
    found: Rc<RefCell<Vec<Use>>>,
    listening: UseListenerGuard,
}

impl Uses {
    fn collect() -> Uses {
        let found = Rc::<RefCell<Vec<Use>>>::default();
        let uses = found.clone();
        let listening = listen_to_uses(move |op, inputs| note(&mut uses.borrow_mut(), op, inputs));
        Uses { found, listening }
    }

    fn end(self) -> Vec<Use> {
        drop(self.listening);
        self.found.take()
    }
}

fn note(uses: &mut Vec<Use>, op: &'static str, inputs: &[&Var]) {
    for (input, var) in inputs.iter().enumerate() {
        let Some(edge) = var.edge() else { continue };
        let same = |u: &Use| Arc::ptr_eq(&u.edge.node, &edge.node) && u.edge.output() == edge.output();
        if !uses.iter().any(same) {
            uses.push(Use { edge: edge.clone(), saved: SavedVariable::as_it_is(input, var), op, input });
        }
    }
}

thread_local! {
    /// The numbers that [`repeated`] has given to the checkpointed function that runs on this thread.
    static WRITTEN: RefCell<Option<Vec<u64>>> = const { RefCell::new(None) };
    /// The numbers of the first run of the function that is run again on this thread, and how many were given again.
    static READ: RefCell<Option<(Arc<[u64]>, usize)>> = const { RefCell::new(None) };
}

/// The number that `make` gives; in a recomputation the one that it gave in the first run. For layers whose forward pass
/// depends on something that may change before the backward pass.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use phalanx_autograd::{Var, checkpoint, repeated, tensor::{Device, Tensor}};
/// static CALLS: AtomicU64 = AtomicU64::new(0);
/// let x = Var::leaf(Tensor::scalar(3f64, Device::CPU)?)?;
/// let y = checkpoint(|v| v[0].mul_scalar(repeated(|| CALLS.fetch_add(1, Ordering::Relaxed)) as f64), &[&x])?;
/// CALLS.store(50, Ordering::Relaxed);
/// y.backward()?;
/// assert_eq!(x.grad().unwrap().item::<f64>()?, 0.0); // as in the forward pass
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
pub fn repeated(make: impl FnOnce() -> u64) -> u64 {
    let number = next().unwrap_or_else(make);
    WRITTEN.with_borrow_mut(|written| written.iter_mut().for_each(|log| log.push(number)));
    number
}

fn next() -> Option<u64> {
    READ.with_borrow_mut(|read| {
        let (numbers, given) = read.as_mut()?;
        *given += 1;
        numbers.get(*given - 1).copied()
    })
}

/// Keeps the numbers that [`repeated`] gives on this thread until it ends.
struct Log {
    outer: Option<Vec<u64>>,
}

impl Log {
    fn write() -> Log {
        Log { outer: WRITTEN.replace(Some(Vec::new())) }
    }

    fn end(mut self) -> Arc<[u64]> {
        let numbers = WRITTEN.take().unwrap_or_default();
        if let Some(outer) = &mut self.outer {
            outer.extend_from_slice(&numbers);
        }
        numbers.into()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        WRITTEN.set(self.outer.take());
    }
}

/// While it lives, [`repeated`] gives the numbers of an earlier run again.
struct Reading {
    outer: Option<(Arc<[u64]>, usize)>,
}

impl Reading {
    fn begin(numbers: &Arc<[u64]>) -> Reading {
        Reading { outer: READ.replace(Some((numbers.clone(), 0))) }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        READ.set(self.outer.take());
    }
}
