//! [`Node`]: an operation that was pushed, until it has run.

use std::any::Any;
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use phalanx_tensor::Context;
use smallvec::SmallVec;

use super::error::Cause;
use super::failure::{Failure, Reason};
use super::fifo::Access;
use super::op::Op;
use super::sync::{AtomicU32, AtomicU64};
use super::variable::Variable;

/// An operation and what it waits for, in one allocation with its closure.
pub(crate) struct Node<T: ?Sized = dyn Task> {
    /// Variables that it has not been granted yet.
    pub(crate) waits: AtomicU32,
    /// The runner's number of the lane.
    pub(crate) lane: u32,
    pub(crate) priority: i32,
    pub(crate) kind: Kind,
    /// The number of the push.
    pub(crate) sequence: AtomicU64,
    pub(crate) name: Cow<'static, str>,
    /// Each variable once, in the order of their numbers.
    pub(crate) uses: SmallVec<[(Variable, Access); 2]>,
    pub(crate) task: T,
}

/// What sets some operations apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Skipped if a variable is poisoned.
    Plain,
    /// Frees a variable, poisoned or not; nobody uses it afterwards.
    Delete,
    /// Tells somebody who waits, on whatever thread it is granted, and takes the variable's poison.
    Wait,
}

/// What an operation does; called once.
pub(crate) trait Task: Send + Sync {
    /// Notes that a variable is poisoned.
    fn taint(&self, failure: &Arc<Failure>);
    /// Runs it, or skips it if it was tainted and is not to run `always`.
    fn run(&self, always: bool) -> Ended;
}

/// How an operation ended.
pub(crate) enum Ended {
    Done,
    /// It did not run, for this reason.
    Skipped(Arc<Failure>),
    Failed(Reason),
}

impl<T> Node<T> {
    pub(crate) fn new(op: Op<'_>, lane: u32, kind: Kind, task: T) -> Node<T> {
        let uses = uses(op.reads, op.mutates);
        let (waits, sequence) = (AtomicU32::new(0), AtomicU64::new(0));
        Node { waits, lane, priority: op.priority, kind, sequence, name: op.name, uses, task }
    }
}

impl Node {
    /// Whether it takes the poison of the variables it is granted.
    pub(crate) fn heals(&self) -> bool {
        self.kind == Kind::Wait
    }
}

/// Each variable once, written if it is in both lists, in the one order in which all lock them.
fn uses(reads: &[&Variable], mutates: &[&Variable]) -> SmallVec<[(Variable, Access); 2]> {
    let mut uses: SmallVec<[(Variable, Access); 2]> = SmallVec::new();
    mutates.iter().for_each(|&v| uses.push((v.clone(), Access::Write)));
    reads.iter().for_each(|&v| uses.push((v.clone(), Access::Read)));
    if uses.len() > 1 {
        uses.sort_unstable_by_key(|(variable, access)| (variable.0.id, *access)); // writes before reads
        uses.dedup_by_key(|(variable, _)| variable.0.id);
    }
    uses
}

/// A closure that has not run, the context it was pushed in, and the failure of what it uses.
pub(crate) struct Job<F> {
    work: Option<F>,
    context: Context,
    taint: Option<Arc<Failure>>,
}

impl<F: FnOnce() -> Result<(), Cause>> Job<F> {
    pub(crate) fn new(work: F) -> Mutex<Job<F>> {
        Mutex::new(Job { work: Some(work), context: Context::current(), taint: None })
    }
}

impl<F: FnOnce() -> Result<(), Cause> + Send> Task for Mutex<Job<F>> {
    fn taint(&self, failure: &Arc<Failure>) {
        Failure::first(&mut self.lock().unwrap_or_else(PoisonError::into_inner).taint, failure);
    }

    fn run(&self, always: bool) -> Ended {
        let mut job = self.lock().unwrap_or_else(PoisonError::into_inner);
        let (work, taint, context) = (job.work.take(), job.taint.take(), job.context);
        drop(job);
        let skip = taint.is_some() && !always;
        // What the closure holds may panic too when it is dropped.
        let run = || match work {
            Some(work) if !skip => {
                let _guard = context.enter();
                work()
            }
            _ => Ok(()),
        };
        match (catch_unwind(AssertUnwindSafe(run)), taint) {
            (Err(panic), _) => Ended::Failed(Reason::Panic(message(panic.as_ref()))),
            (Ok(Err(cause)), _) => Ended::Failed(Reason::Error(cause)),
            (Ok(Ok(())), Some(failure)) if skip => Ended::Skipped(failure),
            (Ok(Ok(())), _) => Ended::Done,
        }
    }
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("something that is no text").to_string()
}
