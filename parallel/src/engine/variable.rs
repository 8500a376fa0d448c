//! (engine/variable.rs)
//! [`Variable`]: what operations are ordered by.
//!
//! (engine/fifo.rs)
//! [`Fifo`]: who holds a variable and who waits for it.
//!
//! ```text
//!           holders        waiting, in the order of pushes
//! granted:  R R            W  R R R  W      the write waits for both reads to leave,
//!           W              R R R  W         the three reads for the write: then they come together
//! ```
//!
//! (engine/track.rs)
//! Tracking: which operations may run. It knows neither threads nor lanes.
//!
//! ```text
//! push ── enter ──(holds all it uses)──> ready ── run ── leave ──> those that now hold all they use
//!           └──(waits in some queues)──────────^
//! ```
//! An operation enters the queues of all its variables at once, under all their locks. Were it otherwise, two threads
//! that push operations on the same two variables could enter one queue in one order and the other in the other, and
//! each operation would wait for the other for ever.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::error::{Error, Failure, Result};
use super::node::{Kind, Node};
use super::sync::{AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering, lock};

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

/// What an operation does with a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    /// Changes it, alone.
    Write,
    /// Reads it, together with others.
    Read,
}

/// The queue of one variable: first come, first served, reads between two writes together.
pub(crate) struct Fifo<T> {
    /// Reads that hold the variable, or [`WRITER`].
    holders: u32,
    waiting: VecDeque<(Access, T)>,
}

const WRITER: u32 = u32::MAX;

impl<T> Fifo<T> {
    pub(crate) fn new() -> Fifo<T> {
        Fifo { holders: 0, waiting: VecDeque::new() }
    }

    /// Grants an access at once, if nobody is before it.
    pub(crate) fn admit(&mut self, access: Access) -> bool {
        self.waiting.is_empty() && self.grant(access)
    }

    /// Lets `op` wait for its turn.
    pub(crate) fn wait(&mut self, access: Access, op: T) {
        self.waiting.push_back((access, op));
    }

    /// Ends an access that was granted, and hands over those whose turn has come.
    pub(crate) fn leave(&mut self, access: Access, mut granted: impl FnMut(T)) {
        match access {
            Access::Write => self.holders = 0,
            Access::Read => self.holders -= 1,
        }
        while let Some(&(next, _)) = self.waiting.front() {
            if !self.grant(next) {
                break;
            }
            if let Some((_, op)) = self.waiting.pop_front() {
                granted(op);
            }
        }
    }

    fn grant(&mut self, access: Access) -> bool {
        let granted = match access {
            Access::Write => self.holders == 0,
            Access::Read => self.holders != WRITER,
        };
        if granted {
            self.holders = if access == Access::Write { WRITER } else { self.holders + 1 };
        }
        granted
    }
}

/// Operations that hold all they use.
pub(crate) type Ready = SmallVec<[Arc<Node>; 4]>;

/// Enters the queues of all variables that `node` uses, and takes its number from `pushed`. Returns the node if it
/// waits for none of them.
pub(crate) fn enter(node: Arc<Node>, pushed: &AtomicU64) -> Result<Option<Arc<Node>>> {
    let mut queues: SmallVec<[MutexGuard<'_, Queue>; 2]> = SmallVec::new();
    node.uses.iter().for_each(|(variable, _)| queues.push(lock(&variable.0.queue)));
    if let Some(at) = queues.iter().position(|queue| queue.deleted) {
        return Err(Error::Deleted { op: node.name.to_string(), variable: node.uses[at].0.0.id });
    }
    if node.kind != Kind::Wait {
        // Numbered under the locks, numbers grow along every queue.
        node.sequence.store(pushed.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    }
    let mut waits = 0;
    for (queue, &(_, access)) in queues.iter_mut().zip(&node.uses) {
        queue.deleted = node.kind == Kind::Delete;
        if queue.fifo.admit(access) {
            Queue::hand_to(&mut queue.poison, &node);
        } else {
            queue.fifo.wait(access, node.clone());
            waits += 1;
        }
    }
    // Nobody else has seen the node while the locks are held.
    node.waits.store(waits, Ordering::Relaxed);
    drop(queues);
    Ok((waits == 0).then_some(node))
}

/// Leaves the queues, and adds to `ready` those whose turn has come. What `node` mutated is poisoned by `failure`, and
/// has a new version if the node has `run`.
pub(crate) fn leave(node: &Node, run: bool, failure: Option<&Arc<Failure>>, ready: &mut Ready) {
    for (variable, access) in &node.uses {
        let mut queue = lock(&variable.0.queue);
        if *access == Access::Write && node.kind != Kind::Wait {
            queue.version += u64::from(run);
            if failure.is_some() {
                queue.poison = failure.cloned();
            }
        }
        queue.leave(*access, |next| ready.push(next));
    }
}

#[cfg(test)]
mod tests {
    use Access::{Read, Write};

    use super::*;

    fn leave(fifo: &mut Fifo<char>, access: Access) -> String {
        let mut granted = String::new();
        fifo.leave(access, |op| granted.push(op));
        granted
    }

    #[test]
    fn reads_between_two_writes_come_together_and_nobody_overtakes() {
        let mut fifo = Fifo::new();
        assert!(fifo.admit(Read) && fifo.admit(Read));
        for (access, op) in [(Write, 'a'), (Read, 'b'), (Read, 'c'), (Write, 'd'), (Write, 'e'), (Read, 'f')]
        {
            assert!(!fifo.admit(access));
            fifo.wait(access, op);
        }
        assert_eq!(leave(&mut fifo, Read), "");
        assert_eq!(leave(&mut fifo, Read), "a");
        assert_eq!(leave(&mut fifo, Write), "bc");
        assert!(!fifo.admit(Read), "a write waits before it");
        assert_eq!(leave(&mut fifo, Read), "");
        assert_eq!(leave(&mut fifo, Read), "d");
        assert_eq!(leave(&mut fifo, Write), "e");
        assert_eq!(leave(&mut fifo, Write), "f");
        assert!(fifo.admit(Read) && !fifo.admit(Write));
    }
}
