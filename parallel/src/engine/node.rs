//! [`Node`]: an operation between its push and its end. [`FreeList`]: nodes that have run, kept for the next pushes.
//!
//! ```text
//! push ◄── free ◄──(the whole list at once)── returned ◄──(a batch at a time)── workers
//! ```
//! The pushing thread allocates what workers would free. Reuse avoids the allocator's locks, which would cost more than the
//! rest of a push.

use std::any::Any;
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use phalanx_tensor::Context;
use smallvec::SmallVec;

use super::error::{Cause, Failure, Reason};
use super::op::{Lane, Op};
use super::sync::{AtomicU32, AtomicU64, CachePadded, Mutex, get_mut, lock};
use super::variable::{Access, Variable};
use crate::catch_panic::panic_text;

/// An operation and its variables. It is reused when it has run ([`FreeList`]).
pub(crate) struct Node {
    /// How many variables have not granted it access yet.
    pub(crate) waits: AtomicU32,
    /// The runner's number of the lane.
    pub(crate) lane: u32,
    /// The lane that the push named.
    pub(crate) named_lane: Option<Lane>,
    pub(crate) priority: i32,
    pub(crate) kind: NodeKind,
    /// The number of the push.
    pub(crate) sequence: AtomicU64,
    pub(crate) name: Cow<'static, str>,
    /// Each variable once, in the order of their numbers.
    pub(crate) uses: Uses,
    job: Mutex<Job>,
}

pub(crate) type Uses = SmallVec<[(Variable, Access); 2]>;

/// An operation's closure, the context it was pushed in, and the failure that poisons one of its variables.
struct Job {
    /// `None` before the node's first use. The box is reused by the next closure of the same type.
    work: Option<Box<dyn OnceWork>>,
    context: Context,
    taint: Option<Arc<Failure>>,
    /// Of a bulk: the numbers of its poisoned variables, each with its failure.
    taints: Vec<(u64, Arc<Failure>)>,
}

/// An operation but for its variables and its closure.
pub(crate) struct NodeSpec {
    pub(crate) name: Cow<'static, str>,
    pub(crate) lane: u32,
    pub(crate) named_lane: Option<Lane>,
    pub(crate) priority: i32,
    pub(crate) kind: NodeKind,
}

/// What an operation's closure is given.
pub(crate) struct Given<'a> {
    /// The operation itself.
    pub(crate) node: &'a Arc<Node>,
    /// The failure that poisons its variables.
    pub(crate) taint: Option<Arc<Failure>>,
    /// Of a bulk: the numbers of its poisoned variables, each with its failure.
    pub(crate) taints: Vec<(u64, Arc<Failure>)>,
    /// Of a bulk: what it has done.
    pub(crate) bulk_end: &'a mut BulkEnd,
}

/// A closure that runs once; afterwards its empty place.
trait OnceWork: Any + Send {
    fn run(&mut self, given: Given<'_>) -> Result<(), Cause>;
    fn clear(&mut self);
}

impl<F: FnOnce(Given<'_>) -> Result<(), Cause> + Send + 'static> OnceWork for Option<F> {
    fn run(&mut self, given: Given<'_>) -> Result<(), Cause> {
        self.take().map_or(Ok(()), |work| work(given))
    }

    fn clear(&mut self) {
        *self = None;
    }
}

/// How the engine treats an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeKind {
    /// Skipped if a variable is poisoned.
    Plain,
    /// As `Plain`, but it ends when its [`Completion`](super::Completion) has come.
    Async,
    /// Several operations, each of which is skipped or not.
    Bulk,
    /// Frees a variable, poisoned or not. It is the variable's last operation.
    Delete,
    /// Wakes a thread that waits, from the thread that grants it access, and takes the variable's poison.
    Wait,
}

/// How an operation ended.
pub(crate) enum Outcome {
    Done,
    /// Its closure has returned, and its completion ends it. The worker that ran it has nothing more to do.
    Started,
    /// The operations of a bulk have run or were skipped.
    Bulk(BulkEnd),
    /// It did not run, for this reason.
    Skipped(Arc<Failure>),
    Failed(Reason),
}

/// What a bulk has done to the variables that it mutates.
#[derive(Default)]
pub(crate) struct BulkEnd {
    /// The variable's number, how often it was mutated, and the failure that poisons it.
    pub(crate) variables: Vec<(u64, u64, Option<Arc<Failure>>)>,
    /// The failures of the bulk's operations.
    pub(crate) failures: Vec<Arc<Failure>>,
}

impl Node {
    pub(crate) fn empty() -> Node {
        Node {
            waits: AtomicU32::new(0),
            lane: 0,
            named_lane: None,
            priority: 0,
            kind: NodeKind::Plain,
            sequence: AtomicU64::new(0),
            name: Cow::Borrowed(""),
            uses: Uses::new(),
            job: Mutex::new(Job { work: None, context: Context::current(), taint: None, taints: Vec::new() }),
        }
    }

    /// Makes an empty node an operation of the caller's context.
    pub(crate) fn fill<F>(&mut self, op: Op<'_>, lane: u32, kind: NodeKind, work: F)
    where
        F: FnOnce(Given<'_>) -> Result<(), Cause> + Send + 'static,
    {
        fill(&mut self.uses, op.reads, op.mutates);
        let (named_lane, priority) = (op.lane, op.priority);
        self.set(NodeSpec { name: op.name, lane, named_lane, priority, kind }, work);
    }

    /// Makes an empty node, which has its variables, an operation of the caller's context.
    pub(crate) fn set<F>(&mut self, spec: NodeSpec, work: F)
    where
        F: FnOnce(Given<'_>) -> Result<(), Cause> + Send + 'static,
    {
        let NodeSpec { name, lane, named_lane, priority, kind } = spec;
        (self.name, self.lane, self.named_lane, self.priority, self.kind) =
            (name, lane, named_lane, priority, kind);
        let job = get_mut(&mut self.job);
        job.context = Context::current();
        let place = job.work.as_deref_mut().and_then(|work| (work as &mut dyn Any).downcast_mut());
        match place {
            Some(place) => *place = Some(work),
            None => job.work = Some(Box::new(Some(work))),
        }
    }

    /// Drops its handles of variables.
    pub(crate) fn clear(&mut self) {
        self.uses.clear();
        self.name = Cow::Borrowed("");
    }

    /// Records the failure that poisons its variable of this number.
    pub(crate) fn taint(&self, variable: u64, failure: &Arc<Failure>) {
        let mut job = lock(&self.job);
        match self.kind {
            NodeKind::Bulk => job.taints.push((variable, failure.clone())),
            _ => Failure::first(&mut job.taint, failure),
        }
    }

    /// Runs the closure, or skips it if a variable is poisoned.
    pub(crate) fn run(self: &Arc<Node>) -> Outcome {
        let Job { work, context, taint, taints } = &mut *lock(&self.job);
        let (failure, taints, mut bulk_end) = (taint.take(), std::mem::take(taints), BulkEnd::default());
        let skipped = failure.clone().filter(|_| matches!(self.kind, NodeKind::Plain | NodeKind::Async));
        // Values that the closure holds may panic when they are dropped, so clearing is inside as well.
        let run = || match work {
            Some(work) if skipped.is_none() => {
                let _guard = context.enter();
                work.run(Given { node: self, taint: failure, taints, bulk_end: &mut bulk_end })
            }
            work => {
                work.iter_mut().for_each(|work| work.clear());
                Ok(())
            }
        };
        match catch_unwind(AssertUnwindSafe(run)) {
            Err(panic) => Outcome::Failed(Reason::Panic(panic_text(panic.as_ref()))),
            Ok(Err(cause)) => Outcome::Failed(Reason::Error(cause)),
            Ok(Ok(())) if self.kind == NodeKind::Bulk => Outcome::Bulk(bulk_end),
            Ok(Ok(())) if self.kind == NodeKind::Async && skipped.is_none() => Outcome::Started,
            Ok(Ok(())) => skipped.map_or(Outcome::Done, Outcome::Skipped),
        }
    }

    /// Whether it takes the poison of the variables it is granted.
    pub(crate) fn clears_poison(&self) -> bool {
        self.kind == NodeKind::Wait
    }
}

/// Puts each variable once into `uses`, written if it is in both lists, in the order in which all operations lock them.
pub(crate) fn fill(uses: &mut Uses, reads: &[&Variable], mutates: &[&Variable]) {
    mutates.iter().for_each(|&v| uses.push((v.clone(), Access::Write)));
    reads.iter().for_each(|&v| uses.push((v.clone(), Access::Read)));
    if uses.len() > 1 {
        uses.sort_unstable_by_key(|(variable, access)| (variable.0.id, *access)); // writes before reads
        uses.dedup_by_key(|(variable, _)| variable.0.id);
    }
}

/// How many nodes an engine keeps at most: some 15 MiB.
const KEPT: usize = 1 << 16;

/// Empty nodes of an engine.
pub(crate) struct FreeList {
    /// Those that pushes take.
    free: CachePadded<Mutex<Vec<Arc<Node>>>>,
    /// Those that workers have brought back.
    returned: CachePadded<Mutex<Vec<Arc<Node>>>>,
}

impl FreeList {
    pub(crate) fn new() -> FreeList {
        FreeList { free: CachePadded(Mutex::new(Vec::new())), returned: CachePadded(Mutex::new(Vec::new())) }
    }

    /// A node, new or reused, after `fill`.
    pub(crate) fn take(&self, fill: impl FnOnce(&mut Node)) -> Arc<Node> {
        let mut free = lock(&self.free.0);
        if free.is_empty() {
            std::mem::swap(&mut *free, &mut *lock(&self.returned.0));
        }
        let kept = free.pop();
        drop(free);
        let mut node = kept.unwrap_or_else(|| Arc::new(Node::empty()));
        fill(Arc::get_mut(&mut node).unwrap_or_else(|| unreachable!("what is kept has one handle")));
        node
    }

    /// Keeps nodes that [`recycled`] returned.
    pub(crate) fn keep(&self, nodes: impl IntoIterator<Item = Arc<Node>>) {
        let mut returned = lock(&self.returned.0);
        let room = KEPT.saturating_sub(returned.len());
        returned.extend(nodes.into_iter().take(room));
    }
}

/// Empties a node that has run. Returns it if this was its last handle.
pub(crate) fn recycled(mut node: Arc<Node>) -> Option<Arc<Node>> {
    Arc::get_mut(&mut node)?.clear();
    Some(node)
}
