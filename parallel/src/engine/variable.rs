//! [`Variable`]: the thing by which operations are ordered. Its queue ([`Fifo`]) grants access; [`enter`] and [`leave`] move
//! an operation through the queues of all its variables. Threads and lanes are not known here.
//!
//! ```text
//! queue of a variable
//!            holders        waiting, in the order of the pushes
//! granted:   R R            W  R R R  W      the write is granted when both reads have left,
//!            W              R R R  W         the three reads when the write has left: all at once
//!
//! push ── enter ──(all queues grant)──► ready ── run ── leave ──► operations that are now granted everything
//!           └──(some queue makes it wait)─────────^
//! ```
//!
//! An operation enters the queues of all its variables at once, under all their locks, in the order of the variables'
//! numbers. Otherwise two threads that push operations on the same two variables could enter the two queues in opposite
//! orders, and the two operations would wait for each other for ever.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::error::{Error, Failure, Result};
use super::node::{Node, NodeKind};
use super::sync::{AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering, lock};

/// Something that operations read and mutate: a tensor, a bucket, a generator, a file. The engine knows nothing else
/// of it. Clones are handles of one variable.
#[derive(Clone)]
pub struct Variable(pub(crate) Arc<VariableState>);

/// A variable's identity and queue.
pub(crate) struct VariableState {
    /// Unique in the process; variables are locked in this order.
    pub(crate) id: u64,
    /// The engine it belongs to.
    pub(crate) engine: u64,
    pub(crate) queue: Mutex<VariableQueue>,
}

/// A variable's queue, version and poison.
pub(crate) struct VariableQueue {
    pub(crate) fifo: Fifo<Arc<Node>>,
    /// Writes that have run.
    pub(crate) version: u64,
    pub(crate) poison: Option<Arc<Failure>>,
    pub(crate) deleted: bool,
}

impl Variable {
    pub(crate) fn new(id: u64, engine: u64) -> Variable {
        let queue = VariableQueue { fifo: Fifo::new(), version: 0, poison: None, deleted: false };
        Variable(Arc::new(VariableState { id, engine, queue: Mutex::new(queue) }))
    }

    /// How many operations have mutated it. One that failed counts, since it may have changed something; one that was
    /// skipped does not.
    pub fn version(&self) -> u64 {
        lock(&self.0.queue).version
    }
}

impl VariableQueue {
    /// Passes the poison of the variable of this number on to an operation that was granted access. A wait takes the poison away.
    pub(crate) fn pass_poison(variable: u64, poison: &mut Option<Arc<Failure>>, node: &Node) {
        poison.take_if(|failure| failure.lifted());
        if let Some(failure) = poison {
            node.taint(variable, failure);
            if node.clears_poison() {
                *poison = None;
            }
        }
    }

    /// Ends an access of the variable of this number, and calls `ready` with each operation that has now been granted all its
    /// variables.
    pub(crate) fn leave(&mut self, variable: u64, access: Access, mut ready: impl FnMut(Arc<Node>)) {
        let VariableQueue { fifo, poison, .. } = self;
        fifo.leave(access, |node| {
            VariableQueue::pass_poison(variable, poison, &node);
            if granted(&node.waits) {
                ready(node);
            }
        });
    }
}

/// Counts a grant; true if it was the last one that the operation waited for.
fn granted(waits: &AtomicU32) -> bool {
    waits.fetch_sub(1, Ordering::AcqRel) == 1
}

impl fmt::Debug for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Variable({})", self.0.id)
    }
}

/// How an operation uses a variable.
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

    /// Grants an access at once if no other operation waits before it.
    pub(crate) fn admit(&mut self, access: Access) -> bool {
        self.waiting.is_empty() && self.grant(access)
    }

    /// Puts `op` at the end of the queue.
    pub(crate) fn wait(&mut self, access: Access, op: T) {
        self.waiting.push_back((access, op));
    }

    /// Ends an access that was granted, and calls `granted` with each operation whose turn has come.
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

/// Operations that were granted all their variables.
pub(crate) type Ready = SmallVec<[Arc<Node>; 4]>;

/// Enters the queues of all variables that `node` uses, and takes its number from `pushed`. Returns the node if it
/// waits for none of them.
pub(crate) fn enter(node: Arc<Node>, pushed: &AtomicU64) -> Result<Option<Arc<Node>>> {
    let mut queues: SmallVec<[MutexGuard<'_, VariableQueue>; 2]> = SmallVec::new();
    node.uses.iter().for_each(|(variable, _)| queues.push(lock(&variable.0.queue)));
    if let Some(at) = queues.iter().position(|queue| queue.deleted) {
        return Err(Error::Deleted { op: node.name.to_string(), variable: node.uses[at].0.0.id });
    }
    if node.kind != NodeKind::Wait {
        // The number is taken under the locks, so numbers ascend along every queue.
        node.sequence.store(pushed.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    }
    let mut waits = 0;
    for (queue, &(ref variable, access)) in queues.iter_mut().zip(&node.uses) {
        queue.deleted = node.kind == NodeKind::Delete;
        if queue.fifo.admit(access) {
            VariableQueue::pass_poison(variable.0.id, &mut queue.poison, &node);
        } else {
            queue.fifo.wait(access, node.clone());
            waits += 1;
        }
    }
    // No other thread sees the node before the locks are released.
    node.waits.store(waits, Ordering::Relaxed);
    drop(queues);
    Ok((waits == 0).then_some(node))
}

/// Leaves the queues, and adds to `ready` the operations whose turn has come. The variables that `node` mutated are
/// poisoned by `failure`, and have a new version if the node has `run`.
pub(crate) fn leave(node: &Node, run: bool, failure: Option<&Arc<Failure>>, ready: &mut Ready) {
    leave_each(node, |_| (u64::from(run), failure.cloned()), ready);
}

/// As [`leave`], where `mutated` says of each variable that `node` mutates how often it did so, and what poisons it.
pub(crate) fn leave_each(
    node: &Node,
    mutated: impl Fn(u64) -> (u64, Option<Arc<Failure>>),
    ready: &mut Ready,
) {
    for (variable, access) in &node.uses {
        let mut queue = lock(&variable.0.queue);
        if *access == Access::Write && node.kind != NodeKind::Wait {
            let (times, failure) = mutated(variable.0.id);
            queue.version += times;
            if failure.is_some() {
                queue.poison = failure;
            }
        }
        queue.leave(variable.0.id, *access, |next| ready.push(next));
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
    fn reads_between_two_writes_come_together_and_none_overtakes() {
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
