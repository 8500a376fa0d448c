//! How threads wait for an engine: [`Progress`] for all operations, [`Signal`] for one variable.
//!
//! Each worker counts what it has run on a cache line of its own, and looks for waiting threads only when it runs out of
//! work. So while there is work, a worker writes nothing that other threads read.

use std::sync::Arc;

use super::error::{Cause, Failure};
use super::node::Given;
use super::sync::{
    AtomicU32, AtomicU64, CachePadded, Condvar, Mutex, Ordering, fence, lock, sleep, spin_until,
};

/// An engine's counters.
pub(crate) struct Progress {
    /// Operations pushed.
    pub(crate) pushed: CachePadded<AtomicU64>,
    /// Operations that have run, by worker; the last count is that of all other threads.
    done: Vec<CachePadded<AtomicU64>>,
    /// Threads that wait for all.
    waiters: CachePadded<AtomicU64>,
    /// How often a worker found that all operations had run while a thread waited.
    signals: AtomicU64,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Progress {
    pub(crate) fn new(workers: usize) -> Progress {
        Progress {
            pushed: CachePadded(AtomicU64::new(0)),
            done: (0..=workers).map(|_| CachePadded(AtomicU64::new(0))).collect(),
            waiters: CachePadded(AtomicU64::new(0)),
            signals: AtomicU64::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Counts an operation that `worker`, the only one to call this with its number, has run and left.
    pub(crate) fn done(&self, worker: usize) {
        let done = &self.done[worker].0;
        done.store(done.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// Counts an operation that a thread other than the workers has ended.
    pub(crate) fn done_elsewhere(&self) {
        self.done[self.done.len() - 1].0.fetch_add(1, Ordering::Release);
    }

    /// Called by a worker that runs out of work, and by another thread that has ended an operation.
    pub(crate) fn idle(&self) {
        // This thread wrote its count before the fence and reads `waiters` after it; a waiting thread does the reverse.
        // So this thread sees the waiting one, or the waiting one sees this thread's last count.
        fence(Ordering::SeqCst);
        if self.waiters.0.load(Ordering::Relaxed) > 0 && self.all_done() {
            let guard = lock(&self.lock);
            self.signals.fetch_add(1, Ordering::Release);
            drop(guard);
            self.wake.notify_all();
        }
    }

    /// Whether all that was pushed has run. Both counts only grow, so if they are equal they were so between the reads.
    pub(crate) fn all_done(&self) -> bool {
        let done: u64 = self.done.iter().map(|done| done.0.load(Ordering::Acquire)).sum();
        done == self.pushed.0.load(Ordering::Relaxed)
    }

    /// Blocks until all that was pushed has run.
    pub(crate) fn wait(&self) {
        self.waiters.0.fetch_add(1, Ordering::Relaxed);
        loop {
            let seen = self.signals.load(Ordering::Acquire);
            fence(Ordering::SeqCst);
            if self.all_done() {
                break;
            }
            let signalled = || self.signals.load(Ordering::Acquire) != seen;
            spin_until(signalled);
            let mut guard = lock(&self.lock);
            while !signalled() {
                guard = sleep(&self.wake, guard);
            }
        }
        self.waiters.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Wakes one thread that waits for a variable. The wait is an operation in the variable's queue, so it is granted when
/// everything pushed before it has run.
pub(crate) struct Signal {
    notified: AtomicU32,
    failure: Mutex<Option<Arc<Failure>>>,
    wake: Condvar,
}

impl Signal {
    pub(crate) fn new() -> Signal {
        Signal { notified: AtomicU32::new(0), failure: Mutex::new(None), wake: Condvar::new() }
    }

    /// Blocks until notified, and returns the variable's failure.
    pub(crate) fn wait(&self) -> Option<Arc<Failure>> {
        let notified = || self.notified.load(Ordering::Acquire) > 0;
        spin_until(notified);
        let mut failure = lock(&self.failure);
        while !notified() {
            failure = sleep(&self.wake, failure);
        }
        failure.take()
    }

    /// The wait's operation: hands the variable's poison over and wakes the thread.
    pub(crate) fn notifier(self: Arc<Signal>) -> impl FnOnce(Given<'_>) -> Result<(), Cause> + Send {
        move |given| {
            let mut failure = lock(&self.failure);
            *failure = given.taint;
            self.notified.store(1, Ordering::Release);
            drop(failure);
            self.wake.notify_all();
            Ok(())
        }
    }
}
