//! [`Runner`]: the part of an engine that runs operations. [`Serial`] runs them on the caller, one after another, for
//! debugging and as the reference that the others must equal. [`EngineCore`] is what all of them do with an operation.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use smallvec::smallvec;

use super::error::{Failure, Failures};
use super::node::{BulkEnd, FreeList, Node, NodeKind, Outcome, recycled};
use super::op::Lane;
use super::profile::Recorder;
use super::queue::PriorityLevels;
use super::sync::{AtomicU64, Condvar, Mutex, Ordering, lock, sleep};
use super::variable::{Ready, leave, leave_each};
use super::wait::Progress;

/// The state of an engine that does not depend on how it runs operations.
pub(crate) struct EngineCore {
    /// Unique in the process.
    pub(crate) id: u64,
    pub(crate) progress: Progress,
    pub(crate) failures: Failures,
    pub(crate) free_nodes: FreeList,
    pub(crate) recorder: Recorder,
    /// The bulks that threads have open.
    pub(crate) open_bulks: AtomicU64,
    /// Whether the priorities of operations count.
    pub(crate) has_priorities: bool,
    /// Whether a wait for one variable heals all that its failure has poisoned.
    pub(crate) clears_failures: AtomicBool,
}

thread_local! {
    /// The engines whose operations this thread is running, the innermost last.
    static INSIDE: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The thread that ends an operation.
#[derive(Clone, Copy)]
pub(crate) enum Ender {
    /// The worker of this number.
    Worker(usize),
    /// Any other thread.
    Other,
}

impl EngineCore {
    pub(crate) fn new(id: u64, workers: usize) -> EngineCore {
        EngineCore {
            id,
            progress: Progress::new(workers),
            failures: Failures::new(),
            free_nodes: FreeList::new(),
            recorder: Recorder::new(),
            open_bulks: AtomicU64::new(0),
            has_priorities: true,
            clears_failures: AtomicBool::new(false),
        }
    }

    /// Whether an operation of this engine is the caller.
    pub(crate) fn inside(&self) -> bool {
        INSIDE.with_borrow(|engines| engines.contains(&self.id))
    }

    /// Runs an operation; adds to `ready` the operations that may run now. Returns whether it has ended: one that completes by
    /// callback ends later, by [`Runner::ended`].
    pub(crate) fn run(&self, node: &Arc<Node>, ender: Ender, ready: &mut Ready) -> bool {
        INSIDE.with_borrow_mut(|engines| engines.push(self.id));
        self.recorder.begins(node);
        let outcome = node.run();
        INSIDE.with_borrow_mut(|engines| engines.pop());
        if matches!(outcome, Outcome::Started) {
            return false;
        }
        self.end(node, outcome, ender, ready);
        true
    }

    /// Releases the variables of an operation that has ended; adds to `ready` the operations that may run now.
    pub(crate) fn end(&self, node: &Node, outcome: Outcome, ender: Ender, ready: &mut Ready) {
        self.recorder.ends(node, &outcome);
        let (run, failure) = match outcome {
            Outcome::Done | Outcome::Started => (true, None),
            Outcome::Bulk(end) => return self.end_bulk(node, end, ender, ready),
            Outcome::Skipped(failure) => (false, Some(failure)),
            Outcome::Failed(reason) => {
                let sequence = (node.sequence.load(Ordering::Relaxed), 0);
                let failure = Failure::new(sequence, &node.name, reason);
                self.failures.add(&failure);
                (true, Some(failure))
            }
        };
        leave(node, run, failure.as_ref(), ready);
        drop(failure); // a wait for all counts the handles
        self.has_left(ender, ready);
    }

    fn end_bulk(&self, node: &Node, end: BulkEnd, ender: Ender, ready: &mut Ready) {
        end.failures.iter().for_each(|failure| self.failures.add(failure));
        let mutated = |variable| {
            let known = end.variables.iter().find(|(known, ..)| *known == variable);
            known.map_or((0, None), |(_, times, failure)| (*times, failure.clone()))
        };
        leave_each(node, mutated, ready);
        drop(end);
        self.has_left(ender, ready);
    }

    /// Wakes waiting threads and counts an operation that has left its queues.
    fn has_left(&self, ender: Ender, ready: &mut Ready) {
        end_waits(ready);
        match ender {
            Ender::Worker(worker) => self.progress.done(worker),
            Ender::Other => self.progress.done_elsewhere(),
        }
    }
}

/// Wakes the threads whose waits have been granted, and takes those waits out of `ready`.
pub(crate) fn end_waits(ready: &mut Ready) {
    while let Some(at) = ready.iter().position(|node: &Arc<Node>| node.kind == NodeKind::Wait) {
        let wait = ready.remove(at);
        wait.run();
        leave(&wait, true, None, ready);
    }
}

/// How an engine runs operations.
pub(crate) trait Runner: Send + Sync {
    /// The engine's counters and failures.
    fn core(&self) -> &EngineCore;
    /// The number of a lane, 0 for the first; or the names of the lanes there are.
    fn lane(&self, lane: Lane) -> Result<u32, String>;
    /// Runs an operation that was granted all its variables, now or later.
    fn start(&self, node: Arc<Node>);
    /// An operation that completes by callback has ended. Called on any thread, also from a GPU driver's, which must not
    /// run operations.
    fn ended(&self, node: Arc<Node>, outcome: Outcome);
    /// The engine is dropped: runs all that was pushed.
    fn shut_down(&self);
}

/// Runs an operation before `push` returns; one that an operation pushes runs after that operation.
pub(crate) struct Serial {
    core: EngineCore,
    ready: Mutex<PriorityLevels<Arc<Node>>>,
    /// Held by the thread that runs operations.
    driver: Mutex<()>,
    /// How the operation ended that completes by callback and that the driver waits for.
    outcome: Mutex<Option<Outcome>>,
    ended: Condvar,
}

impl Serial {
    pub(crate) fn new(id: u64) -> Serial {
        Serial {
            core: EngineCore::new(id, 1),
            ready: Mutex::new(PriorityLevels::new()),
            driver: Mutex::new(()),
            outcome: Mutex::new(None),
            ended: Condvar::new(),
        }
    }

    /// Adds operations that may run, and takes the first one.
    fn exchange(&self, ready: &mut Ready) -> Option<Arc<Node>> {
        let mut levels = lock(&self.ready);
        ready.drain(..).for_each(|node| levels.push(node.priority, node));
        levels.pop()
    }

    /// Blocks until the completion of the operation that was started has come.
    fn wait_for_completion(&self) -> Outcome {
        let mut outcome = lock(&self.outcome);
        loop {
            match outcome.take() {
                Some(outcome) => return outcome,
                None => outcome = sleep(&self.ended, outcome),
            }
        }
    }
}

impl Runner for Serial {
    fn core(&self) -> &EngineCore {
        &self.core
    }

    fn lane(&self, _: Lane) -> Result<u32, String> {
        Ok(0)
    }

    fn start(&self, node: Arc<Node>) {
        if self.core.inside() {
            // The thread that runs the pushing operation runs this one afterwards.
            return lock(&self.ready).push(node.priority, node);
        }
        let _driver = lock(&self.driver);
        let mut ready: Ready = smallvec![node];
        while let Some(node) = self.exchange(&mut ready) {
            if !self.core.run(&node, Ender::Worker(0), &mut ready) {
                self.core.end(&node, self.wait_for_completion(), Ender::Worker(0), &mut ready);
            }
            self.core.free_nodes.keep(recycled(node));
        }
        self.core.progress.idle();
    }

    fn ended(&self, _: Arc<Node>, outcome: Outcome) {
        *lock(&self.outcome) = Some(outcome);
        self.ended.notify_all();
    }

    /// All that was pushed has run.
    fn shut_down(&self) {}
}
