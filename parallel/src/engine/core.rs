//! [`Core`]: what every engine does with an operation, whoever runs it.

use std::cell::RefCell;
use std::sync::Arc;

use super::failure::{Failure, Failures};
use super::node::{Ended, Kind, Node};
use super::progress::Progress;
use super::spare::Spare;
use super::sync::Ordering;
use super::track::{Ready, leave};

/// The state of an engine that does not depend on how it runs operations.
pub(crate) struct Core {
    /// Unique in the process.
    pub(crate) id: u64,
    pub(crate) progress: Progress,
    pub(crate) failures: Failures,
    pub(crate) spare: Spare,
}

thread_local! {
    /// The engines whose operations this thread is running, the innermost last.
    static INSIDE: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

impl Core {
    pub(crate) fn new(id: u64, workers: usize) -> Core {
        Core { id, progress: Progress::new(workers), failures: Failures::new(), spare: Spare::new() }
    }

    /// Whether the caller is an operation of this engine.
    pub(crate) fn inside(&self) -> bool {
        INSIDE.with_borrow(|engines| engines.contains(&self.id))
    }

    /// Runs an operation for `worker`; adds to `ready` those that may run now.
    pub(crate) fn run(&self, node: &Node, worker: usize, ready: &mut Ready) {
        INSIDE.with_borrow_mut(|engines| engines.push(self.id));
        let ended = node.run();
        INSIDE.with_borrow_mut(|engines| engines.pop());
        let (run, failure) = match ended {
            Ended::Done => (true, None),
            Ended::Skipped(failure) => (false, Some(failure)),
            Ended::Failed(reason) => {
                let failure = Failure::new(node.sequence.load(Ordering::Relaxed), &node.name, reason);
                self.failures.add(&failure);
                (true, Some(failure))
            }
        };
        leave(node, run, failure.as_ref(), ready);
        tell(ready);
        drop(failure); // a wait for all counts who holds it
        self.progress.done(worker);
    }
}

/// Ends those waits whose turn has come.
pub(crate) fn tell(ready: &mut Ready) {
    while let Some(at) = ready.iter().position(|node: &Arc<Node>| node.kind == Kind::Wait) {
        let wait = ready.remove(at);
        wait.run();
        leave(&wait, true, None, ready);
    }
}
