//! [`Node`]: an operation that was pushed, until it has run.

use std::any::Any;
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use phalanx_tensor::Context;
use smallvec::SmallVec;

use super::error::Cause;
use super::failure::{Failure, Reason};
use super::fifo::Access;
use super::op::Op;
use super::sync::{AtomicU32, AtomicU64, Mutex, get_mut, lock};
use super::variable::Variable;

/// An operation and what it waits for. It is used again when it has run ([`super::spare`]).
pub(crate) struct Node {
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
    pub(crate) uses: Uses,
    job: Mutex<Job>,
}

type Uses = SmallVec<[(Variable, Access); 2]>;

/// What an operation does, the context it was pushed in, and the failure of what it uses.
struct Job {
    /// `None` before the node's first use. Its allocation serves the next operation that does the same.
    work: Option<Box<dyn Work>>,
    context: Context,
    taint: Option<Arc<Failure>>,
}

/// A closure that runs once, and its place afterwards. It is told of the failure of what the operation uses.
trait Work: Any + Send {
    fn run(&mut self, taint: Option<Arc<Failure>>) -> Result<(), Cause>;
    fn clear(&mut self);
}

impl<F: FnOnce(Option<Arc<Failure>>) -> Result<(), Cause> + Send + 'static> Work for Option<F> {
    fn run(&mut self, taint: Option<Arc<Failure>>) -> Result<(), Cause> {
        self.take().map_or(Ok(()), |work| work(taint))
    }

    fn clear(&mut self) {
        *self = None;
    }
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

/// How an operation ended.
pub(crate) enum Ended {
    Done,
    /// It did not run, for this reason.
    Skipped(Arc<Failure>),
    Failed(Reason),
}

impl Node {
    pub(crate) fn empty() -> Node {
        Node {
            waits: AtomicU32::new(0),
            lane: 0,
            priority: 0,
            kind: Kind::Plain,
            sequence: AtomicU64::new(0),
            name: Cow::Borrowed(""),
            uses: Uses::new(),
            job: Mutex::new(Job { work: None, context: Context::current(), taint: None }),
        }
    }

    /// Makes an empty node an operation of the caller's context.
    pub(crate) fn fill<F>(&mut self, op: Op<'_>, lane: u32, kind: Kind, work: F)
    where
        F: FnOnce(Option<Arc<Failure>>) -> Result<(), Cause> + Send + 'static,
    {
        (self.lane, self.priority, self.kind, self.name) = (lane, op.priority, kind, op.name);
        fill(&mut self.uses, op.reads, op.mutates);
        let job = get_mut(&mut self.job);
        job.context = Context::current();
        let place = job.work.as_deref_mut().and_then(|work| (work as &mut dyn Any).downcast_mut());
        match place {
            Some(place) => *place = Some(work),
            None => job.work = Some(Box::new(Some(work))),
        }
    }

    /// Lets go of what it used.
    pub(crate) fn clear(&mut self) {
        self.uses.clear();
        self.name = Cow::Borrowed("");
    }

    /// Notes that a variable is poisoned.
    pub(crate) fn taint(&self, failure: &Arc<Failure>) {
        Failure::first(&mut lock(&self.job).taint, failure);
    }

    /// Does what it is for, or skips it if a variable is poisoned.
    pub(crate) fn run(&self) -> Ended {
        let Job { work, context, taint } = &mut *lock(&self.job);
        let failure = taint.take();
        let skipped = failure.clone().filter(|_| self.kind == Kind::Plain);
        // What the closure holds may panic too when it is dropped.
        let run = || match work {
            Some(work) if skipped.is_none() => {
                let _guard = context.enter();
                work.run(failure)
            }
            work => {
                work.iter_mut().for_each(|work| work.clear());
                Ok(())
            }
        };
        match catch_unwind(AssertUnwindSafe(run)) {
            Err(panic) => Ended::Failed(Reason::Panic(message(panic.as_ref()))),
            Ok(Err(cause)) => Ended::Failed(Reason::Error(cause)),
            Ok(Ok(())) => skipped.map_or(Ended::Done, Ended::Skipped),
        }
    }

    /// Whether it takes the poison of the variables it is granted.
    pub(crate) fn heals(&self) -> bool {
        self.kind == Kind::Wait
    }
}

/// Puts each variable once into `uses`, written if it is in both lists, in the one order in which all lock them.
fn fill(uses: &mut Uses, reads: &[&Variable], mutates: &[&Variable]) {
    mutates.iter().for_each(|&v| uses.push((v.clone(), Access::Write)));
    reads.iter().for_each(|&v| uses.push((v.clone(), Access::Read)));
    if uses.len() > 1 {
        uses.sort_unstable_by_key(|(variable, access)| (variable.0.id, *access)); // writes before reads
        uses.dedup_by_key(|(variable, _)| variable.0.id);
    }
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("something that is no text").to_string()
}
