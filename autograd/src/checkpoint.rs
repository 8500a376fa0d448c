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
//! the sequence numbers that they would have had ([`crate::sequence`]). So gradients are the same bits, in the same
//! order, with the same hooks, as without a checkpoint, also those of parameters that are used elsewhere too; the
//! gradient of any value can be asked for, split backward passes work, and so do second derivatives.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use phalanx_tensor::{Context, Device};

use crate::dependency::{fork, join};
use crate::node::{Body, Edge, Meta, Node};
use crate::saved::Saved;
use crate::sequence::{self, next_sequence};
use crate::short::Short;
use crate::{Backward, Cx, Error, Grads, Outputs, Result, Saver, Var, grads1, phony, record, repeated};

/// Runs `f` without keeping what it computes; backward computes it again. Gradients are the same bits as those of
/// `f(inputs)`, dropout included.
///
/// `f` must be a function: of the same inputs it computes the same, twice. What it asks of the outside, and what may have
/// changed by the time of the backward pass, it asks by way of [`repeated`](crate::repeated()). Values and parameters that it captures get
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
    let (outputs, recompute) = checkpoint_apart(f, inputs)?;
    let Some(recompute) = recompute else { return Ok(outputs) };
    let mut outputs = outputs.into_vars();
    if let Some(first) = outputs.iter_mut().find(|v| v.requires_grad()) {
        *first = recompute.before(first)?;
    }
    Ok(same(outputs))
}

/// [`checkpoint`] without its second half: when to recompute is the caller's to say, with [`Recompute::before`] on
/// the outputs or a value made of them. Otherwise it happens when the gradient has arrived. `None` if there is
/// nothing to recompute.
///
/// # Errors
/// Whatever `f` returns.
pub fn checkpoint_apart<O: Outputs>(
    f: impl Fn(&[Var]) -> Result<O> + Send + Sync + 'static,
    inputs: &[&Var],
) -> Result<(O, Option<Recompute>)> {
    let context = Context::current();
    let detached: Vec<Var> = inputs.iter().map(|v| v.detach()).collect();
    if !context.grad {
        // The nodes that this will be, if it runs inside another checkpoint.
        (0..NODES).for_each(|_| sequence::pass_over());
        return Ok((f(&inputs.iter().map(|&v| v.clone()).collect::<Vec<_>>())?, None));
    }
    // Before `f` runs, so that an input that it modifies is found.
    let saved = inputs.iter().enumerate().map(|(i, v)| Saved::input(i, v)).collect::<Result<_>>()?;
    let before = sequence::count();
    let (outputs, used, numbers) = {
        let _context = Context::with(|c| (c.grad, c.checkpointing) = (false, true));
        let (uses, numbers) = (Uses::collect(), repeated::Log::write());
        (f(&detached)?.into_vars(), uses.end(), numbers.end())
    };
    if !outputs.iter().any(|v| v.dtype().is_float()) {
        return Ok((same(outputs), None));
    }
    let own = inputs.iter().map(|v| v.edge().cloned());
    let edges: Vec<_> = own.chain(used.iter().map(|u| Some(u.edge.clone()))).collect();
    let recomputation = Arc::new(Recomputation {
        function: Box::new(move |vars| Ok(f(vars)?.into_vars())),
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
        inputs: Short::of(edges.into_iter()),
        outputs: Short::of(outputs.iter().map(|v| Meta::of(v.tensor()))),
        body: Checkpoint(Mutex::new(Some(recomputation.clone()))),
        weight: false,
        is_leaf: false,
        hooks: Default::default(),
        recorded: crate::anomaly::recorded_here(),
    });
    let link = |(output, var): (usize, Var)| {
        let edge = var.dtype().is_float().then(|| Edge::new(node.clone(), output));
        Var::from_parts(var.into_tensor(), edge)
    };
    let outputs = outputs.into_iter().enumerate().map(link).collect();
    Ok((same(outputs), Some(Recompute { node, recomputation })))
}

/// Nodes of a checkpoint: itself, fork, recompute, join.
const NODES: usize = 4;

/// What `into_vars` took apart.
pub(crate) fn same<O: Outputs>(vars: Vec<Var>) -> O {
    O::from_vars(vars).unwrap_or_else(|| unreachable!("as many values as `into_vars` gave"))
}

/// Whether this is the forward pass of a checkpoint, whose values are not kept.
pub fn is_checkpointing() -> bool {
    Context::current().checkpointing
}

/// Whether this repeats an earlier forward pass: what that has done to the outside (statistics, counters) is not to
/// be done again.
pub fn is_recomputing() -> bool {
    Context::current().recomputing
}

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
        let again = |_: &Saver<'_>| Ok(RunAgain { recompute: self.clone(), device });
        join(&at, &record("recompute", &[&forked], mark, again)?)
    }

    /// Computes the values again at once, for a backward pass that is yet to come.
    ///
    /// # Errors
    /// If what the function uses was modified in place, or whatever the function returns.
    pub fn now(&self) -> Result<()> {
        let edges = self.recomputation.run(&self.node)?;
        *self.recomputation.recomputed.lock().unwrap_or_else(PoisonError::into_inner) = Some(edges);
        Ok(())
    }
}

/// What is checkpointed.
type Part = dyn Fn(&[Var]) -> Result<Vec<Var>> + Send + Sync;

/// Everything that is needed to run the function again.
pub(crate) struct Recomputation {
    function: Box<Part>,
    inputs: Vec<Saved>,
    used: Vec<SavedUse>,
    /// That of the first run: random draws, train or eval.
    context: Context,
    /// The sequence numbers of the function's operations.
    sequence: Range<u64>,
    /// What the function has asked [`repeated`](crate::repeated()) for.
    numbers: Arc<[u64]>,
    /// Where the outputs' gradients go, once the function has run again.
    recomputed: Mutex<Option<Vec<Option<Edge>>>>,
}

/// The body of a checkpoint's node.
struct Checkpoint(Mutex<Option<Arc<Recomputation>>>);

impl Body for Checkpoint {
    fn checkpoint(&self) -> Option<&Mutex<Option<Arc<Recomputation>>>> {
        Some(&self.0)
    }
}

impl Recomputation {
    fn run(&self, node: &Arc<Node>) -> Result<Vec<Option<Edge>>> {
        for used in &self.used {
            used.check(node)?;
        }
        let inputs: Vec<Var> = self.inputs.iter().map(|s| s.unpack(node, true)).collect::<Result<_>>()?;
        let _context =
            Context { grad: true, checkpointing: false, recomputing: true, ..self.context }.enter();
        let _sequence = sequence::use_reserved(&self.sequence);
        let _numbers = repeated::read(&self.numbers);
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

    /// Where the outputs' gradients go. Recomputes if nobody has.
    pub(crate) fn take(&self, node: &Arc<Node>) -> Result<Vec<Option<Edge>>> {
        let recomputed = self.recomputed.lock().unwrap_or_else(PoisonError::into_inner).take();
        recomputed.map_or_else(|| self.run(node), Ok)
    }
}

thread_local! {
    static HEARER: RefCell<Option<Box<Hear>>> = const { RefCell::new(None) };
}

/// Hears when a recomputation began and ended; it must not begin one.
type Hear = dyn Fn([Instant; 2]);

/// Lets `hear` know of every recomputation of this thread, when it began and ended, until the guard is dropped.
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

thread_local! {
    /// What the checkpointed function that runs on this thread uses from outside.
    static USES: RefCell<Option<Vec<Use>>> = const { RefCell::new(None) };
}

/// A value from outside, and who used it first.
struct Use {
    edge: Edge,
    /// By handle, if it is a leaf: what that holds may be given up before the function ends.
    saved: Saved,
    op: &'static str,
    input: usize,
}

/// [`Use`], with the check that the value is the same when it is used again.
struct SavedUse {
    saved: Saved,
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

/// Collects uses on this thread until it ends.
struct Uses {
    outer: Option<Vec<Use>>,
}

impl Uses {
    fn collect() -> Uses {
        Uses { outer: USES.replace(Some(Vec::new())) }
    }

    fn end(self) -> Vec<Use> {
        USES.take().unwrap_or_default()
    }
}

impl Drop for Uses {
    fn drop(&mut self) {
        USES.set(self.outer.take());
    }
}

/// Called for an operation that is not recorded although an input requires a gradient: inside a checkpoint, the input
/// comes from outside and is a place where gradients leave it.
#[cold]
pub(crate) fn note_use(op: &'static str, inputs: &[&Var]) {
    USES.with_borrow_mut(|uses| {
        let Some(uses) = uses else { return };
        for (input, var) in inputs.iter().enumerate() {
            let Some(edge) = var.edge() else { continue };
            let same = |u: &Use| Arc::ptr_eq(&u.edge.node, &edge.node) && u.edge.output() == edge.output();
            if !uses.iter().any(same) {
                uses.push(Use { edge: edge.clone(), saved: Saved::as_it_is(input, var), op, input });
            }
        }
    });
}
