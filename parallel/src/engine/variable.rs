//! [`Variable`]: what operations are ordered by.

use std::fmt;
use std::sync::Arc;

use super::failure::Failure;
use super::fifo::{Access, Fifo};
use super::node::Node;
use super::sync::{AtomicU32, Mutex, Ordering, lock};

/// Something that operations read and mutate: a tensor, a bucket, a generator, a file. The engine knows nothing of it
/// but this name. Clones are handles of one variable.
#[derive(Clone)]
pub struct Variable(pub(crate) Arc<State>);

/// What a variable is to the engine.
pub(crate) struct State {
    /// Unique in the process; variables are locked in this order.
    pub(crate) id: u64,
    /// The engine it belongs to.
    pub(crate) engine: u64,
    pub(crate) queue: Mutex<Queue>,
}

/// Its queue and its condition.
pub(crate) struct Queue {
    pub(crate) fifo: Fifo<Arc<Node>>,
    /// Writes that have run.
    pub(crate) version: u64,
    pub(crate) poison: Option<Arc<Failure>>,
    pub(crate) deleted: bool,
}

impl Variable {
    pub(crate) fn new(id: u64, engine: u64) -> Variable {
        let queue = Queue { fifo: Fifo::new(), version: 0, poison: None, deleted: false };
        Variable(Arc::new(State { id, engine, queue: Mutex::new(queue) }))
    }

    /// How many operations have mutated it. One that failed counts, since it may have changed something; one that was
    /// skipped does not.
    pub fn version(&self) -> u64 {
        lock(&self.0.queue).version
    }
}

impl Queue {
    /// Tells an operation whose turn has come what it must know about the variable.
    pub(crate) fn hand_to(poison: &mut Option<Arc<Failure>>, node: &Node) {
        poison.take_if(|failure| failure.lifted());
        if let Some(failure) = poison {
            node.taint(failure);
            if node.heals() {
                *poison = None;
            }
        }
    }

    /// Ends an access and calls `ready` with those operations that now hold all they need.
    pub(crate) fn leave(&mut self, access: Access, mut ready: impl FnMut(Arc<Node>)) {
        let Queue { fifo, poison, .. } = self;
        fifo.leave(access, |node| {
            Queue::hand_to(poison, &node);
            if granted(&node.waits) {
                ready(node);
            }
        });
    }
}

/// Counts a grant; whether it was the last that the operation waited for.
fn granted(waits: &AtomicU32) -> bool {
    waits.fetch_sub(1, Ordering::AcqRel) == 1
}

impl fmt::Debug for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Variable({})", self.0.id)
    }
}
