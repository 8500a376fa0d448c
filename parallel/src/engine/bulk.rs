//! [`Bulk`]: consecutive small operations of a thread become one, which enters the queues and is handed to a worker once.
//!
//! The operations of a bulk run one after another, each under its own name: one that fails poisons what it mutates, and those of
//! the bulk that use a poisoned variable are skipped, as if each had been pushed by itself.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

use phalanx_tensor::Context;

use super::Engine;
use super::error::{Cause, Error, Failure, Reason, Result};
use super::node::{Given, NodeKind, Uses, fill};
use super::op::{Lane, Op};
use super::sync::{Ordering, lock};
use super::variable::{Access, Variable};
use crate::catch_panic::panic_text;

/// While it lives, [`Engine::push`] collects the operations that this thread pushes, and gives them to the engine as one once there are as
/// many as the bulk's size. All have one lane and priority. The engine gets fewer when the bulk is dropped, and before this thread waits for
/// the engine, deletes a variable, or pushes an operation of another kind.
pub struct Bulk<'a> {
    engine: &'a Engine,
    /// A bulk is its thread's.
    not_send: PhantomData<*const ()>,
}

/// A thread's bulk of one engine.
struct OpenBulk {
    engine: u64,
    size: usize,
    lane: Option<Lane>,
    priority: i32,
    steps: Vec<Step>,
}

/// An operation of a bulk.
struct Step {
    name: Cow<'static, str>,
    uses: Uses,
    context: Context,
    work: Work,
}

type Work = Box<dyn FnOnce() -> Result<(), Cause> + Send>;

thread_local! {
    /// The innermost bulk is the last.
    static OPEN: RefCell<Vec<OpenBulk>> = const { RefCell::new(Vec::new()) };
}

impl Engine {
    /// Lets this thread push operations in bulks of at most `size` (MXNet's `bulk`) until the result is dropped. It pays for
    /// operations that take less time than their push.
    ///
    /// ```
    /// use phalanx_parallel::engine::{Engine, Op};
    /// let engine = Engine::serial();
    /// let sum = engine.resource(0);
    /// let bulk = engine.bulk(15);
    /// for n in 1..=100 {
    ///     let (value, variable) = (sum.clone(), sum.variable().clone());
    ///     engine.push(Op::new("add").mutates(&[&variable]), move || {
    ///         *value.write()? += n;
    ///         Ok(())
    ///     })?;
    /// }
    /// drop(bulk);
    /// engine.wait_for_all()?;
    /// assert_eq!((*sum.read()?, sum.variable().version()), (5050, 100));
    /// # Ok::<(), phalanx_parallel::engine::Error>(())
    /// ```
    pub fn bulk(&self, size: usize) -> Bulk<'_> {
        self.flush();
        let core = self.runner.core();
        core.open_bulks.fetch_add(1, Ordering::Relaxed);
        let open =
            OpenBulk { engine: core.id, size: size.max(1), lane: None, priority: 0, steps: Vec::new() };
        OPEN.with_borrow_mut(|all| all.push(open));
        Bulk { engine: self, not_send: PhantomData }
    }

    /// Whether this thread's pushes are collected.
    pub(super) fn has_bulk(&self) -> bool {
        let core = self.runner.core();
        core.open_bulks.load(Ordering::Relaxed) > 0
            && OPEN.with_borrow(|all| all.iter().any(|open| open.engine == core.id))
    }

    /// Adds an operation to this thread's bulk.
    pub(super) fn add_to_bulk<F>(&self, op: Op<'_>, work: F) -> Result<()>
    where
        F: FnOnce() -> Result<(), Cause> + Send + 'static,
    {
        self.check(&op)?;
        let is_deleted = |v: &&&Variable| lock(&v.0.queue).deleted;
        if let Some(deleted) = op.reads.iter().chain(op.mutates).find(is_deleted) {
            return Err(Error::Deleted { op: op.name.to_string(), variable: deleted.0.id });
        }
        let (lane, priority) = (op.lane, op.priority);
        if !self.of_bulk(|open| open.steps.is_empty() || (open.lane, open.priority) == (lane, priority)) {
            self.flush();
        }
        let mut uses = Uses::new();
        fill(&mut uses, op.reads, op.mutates);
        let step = Step { name: op.name, uses, context: Context::current(), work: Box::new(work) };
        let is_full = self.of_bulk(|open| {
            (open.lane, open.priority) = (lane, priority);
            open.steps.push(step);
            open.steps.len() >= open.size
        });
        if is_full {
            self.flush();
        }
        Ok(())
    }

    fn of_bulk(&self, ask: impl FnOnce(&mut OpenBulk) -> bool) -> bool {
        let id = self.runner.core().id;
        OPEN.with_borrow_mut(|all| all.iter_mut().rev().find(|open| open.engine == id).is_some_and(ask))
    }

    /// Hands over what this thread's bulk has collected.
    pub(super) fn flush(&self) {
        if self.runner.core().open_bulks.load(Ordering::Relaxed) == 0 {
            return;
        }
        let (mut steps, mut at) = (Vec::new(), (None, 0));
        self.of_bulk(|open| {
            (steps, at) = (std::mem::take(&mut open.steps), (open.lane, open.priority));
            true
        });
        let pick = |wanted: Access| -> Vec<Variable> {
            let uses = steps.iter().flat_map(|step: &Step| &step.uses);
            uses.filter(|(_, access)| *access == wanted).map(|(variable, _)| variable.clone()).collect()
        };
        let (reads, mutates) = (pick(Access::Read), pick(Access::Write));
        let (reads, mutates): (Vec<_>, Vec<_>) = (reads.iter().collect(), mutates.iter().collect());
        let name = match steps.len() {
            0 => return,
            count => format!("bulk of {count}"),
        };
        let op = Op { lane: at.0, ..Op::new(name).reads(&reads).mutates(&mutates).priority(at.1) };
        let work = move |given: Given<'_>| {
            run(steps, given);
            Ok(())
        };
        if let Err(error) = self.enter(op, NodeKind::Bulk, work) {
            // Another thread has deleted a variable meanwhile: there is no caller to tell but the wait for all.
            let core = self.runner.core();
            let number = core.progress.pushed.0.load(Ordering::Relaxed);
            core.failures.add(&Failure::of((number, 0), error));
        }
    }
}

impl Drop for Bulk<'_> {
    fn drop(&mut self) {
        self.engine.flush();
        let core = self.engine.runner.core();
        OPEN.with_borrow_mut(|all| {
            if let Some(at) = all.iter().rposition(|open| open.engine == core.id) {
                all.remove(at);
            }
        });
        core.open_bulks.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Bulk<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bulk of {:?}", self.engine)
    }
}

/// Runs the operations of a bulk, in their order.
fn run(steps: Vec<Step>, given: Given<'_>) {
    let (number, end) = (given.node.sequence.load(Ordering::Relaxed), given.bulk_end);
    let uses = given.node.uses.iter().filter(|(_, access)| *access == Access::Write);
    end.variables = uses.map(|(variable, _)| (variable.0.id, 0, None)).collect();
    // The poison with which the bulk was granted its variables, and then what its operations leave.
    let mut poison = given.taints;
    for (place, step) in (0..).zip(steps) {
        let mut cause = None;
        for (variable, _) in &step.uses {
            poison
                .iter()
                .filter(|(id, _)| *id == variable.0.id)
                .for_each(|(_, f)| Failure::first(&mut cause, f));
        }
        let Step { name, uses, context, work } = step;
        let is_skipped = cause.is_some();
        if let Some(reason) = failure(work, &context, is_skipped) {
            let failure = Failure::new((number, place), &name, reason);
            end.failures.push(failure.clone());
            cause = Some(failure);
        }
        for (variable, _) in uses.iter().filter(|(_, access)| *access == Access::Write) {
            let id = variable.0.id;
            if let Some(known) = end.variables.iter_mut().find(|(known, ..)| *known == id) {
                known.1 += u64::from(!is_skipped);
                known.2 = cause.clone().or(known.2.take());
            }
            if let Some(cause) = &cause {
                poison.retain(|(known, _)| *known != id);
                poison.push((id, cause.clone()));
            }
        }
    }
}

/// Runs an operation's closure, or drops it; returns why that failed.
fn failure(work: Work, context: &Context, is_skipped: bool) -> Option<Reason> {
    let run = || {
        let _guard = context.enter();
        if is_skipped {
            drop(work);
            return Ok(());
        }
        work()
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(outcome) => outcome.err().map(Reason::Error),
        Err(panic) => Some(Reason::Panic(panic_text(panic.as_ref()))),
    }
}
