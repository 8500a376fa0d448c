//! Tracking: which operations may run. It knows neither threads nor lanes.
//!
//! ```text
//! push ── enter ──(holds all it uses)──> ready ── run ── leave ──> those that now hold all they use
//!           └──(waits in some queues)──────────^
//! ```
//! An operation enters the queues of all its variables at once, under all their locks. Were it otherwise, two threads
//! that push operations on the same two variables could enter one queue in one order and the other in the other, and
//! each operation would wait for the other for ever.

use std::sync::Arc;

use smallvec::SmallVec;

use super::error::{Error, Result};
use super::failure::Failure;
use super::fifo::Access;
use super::node::{Kind, Node};
use super::sync::{AtomicU64, MutexGuard, Ordering, lock};
use super::variable::Queue;

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
