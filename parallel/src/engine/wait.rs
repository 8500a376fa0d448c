//! (engine/progress.rs)
//! [`Progress`]: how much was pushed and how much has run, and who waits for all of it.
//!
//! Each worker counts what it has run on a cache line of its own, and looks for somebody who waits only when it runs out
//! of work. So the common case writes nothing that others read.
//!
//! (engine/signal.rs)
//! [`Signal`]: how a wait for one variable hears that its turn has come.

use std::sync::Arc;

use super::error::{Cause, Failure, Result};
use super::sync::{AtomicU32, AtomicU64, Condvar, Mutex, Ordering, Padded, fence, lock, sleep, watch};

/// An engine's counters.
pub(crate) struct Progress {
    /// Operations pushed.
    pub(crate) pushed: Padded<AtomicU64>,
    /// Operations that have run, by worker.
    done: Vec<Padded<AtomicU64>>,
    /// Threads that wait for all.
    waiters: Padded<AtomicU64>,
    /// How often a worker found that all had run while somebody waited.
    signals: AtomicU64,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Progress {
    pub(crate) fn new(workers: usize) -> Progress {
        Progress {
            pushed: Padded(AtomicU64::new(0)),
            done: (0..workers).map(|_| Padded(AtomicU64::new(0))).collect(),
            waiters: Padded(AtomicU64::new(0)),
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

    /// Called by a worker that runs out of work.
    pub(crate) fn idle(&self) {
        // Either this sees who waits, or who waits sees the worker's last count: each writes before and reads after.
        fence(Ordering::SeqCst);
        if self.waiters.0.load(Ordering::Relaxed) > 0 && self.quiet() {
            let guard = lock(&self.lock);
            self.signals.fetch_add(1, Ordering::Release);
            drop(guard);
            self.wake.notify_all();
        }
    }

    /// Whether all that was pushed has run: true of the moment between the two reads, as both counts only grow.
    pub(crate) fn quiet(&self) -> bool {
        let done: u64 = self.done.iter().map(|done| done.0.load(Ordering::Acquire)).sum();
        done == self.pushed.0.load(Ordering::Relaxed)
    }

    /// Blocks until all that was pushed has run.
    pub(crate) fn wait(&self) {
        self.waiters.0.fetch_add(1, Ordering::Relaxed);
        loop {
            let seen = self.signals.load(Ordering::Acquire);
            fence(Ordering::SeqCst);
            if self.quiet() {
                break;
            }
            let signalled = || self.signals.load(Ordering::Acquire) != seen;
            watch(signalled);
            let mut guard = lock(&self.lock);
            while !signalled() {
                guard = sleep(&self.wake, guard);
            }
        }
        self.waiters.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Tells one thread. Its operation is granted a variable like any other, so all that was pushed before has run.
pub(crate) struct Signal {
    told: AtomicU32,
    failure: Mutex<Option<Arc<Failure>>>,
    wake: Condvar,
}

impl Signal {
    pub(crate) fn new() -> Signal {
        Signal { told: AtomicU32::new(0), failure: Mutex::new(None), wake: Condvar::new() }
    }

    /// Blocks until told; the variable's failure.
    pub(crate) fn wait(&self) -> Result<()> {
        let told = || self.told.load(Ordering::Acquire) > 0;
        watch(told);
        let mut failure = lock(&self.failure);
        while !told() {
            failure = sleep(&self.wake, failure);
        }
        failure.take().map_or(Ok(()), |failure| Err(failure.report()))
    }

    /// What the operation does: tells, with the poison of the variable.
    pub(crate) fn teller(self: Arc<Signal>) -> impl FnOnce(Option<Arc<Failure>>) -> Result<(), Cause> + Send {
        move |poison| {
            let mut failure = lock(&self.failure);
            *failure = poison;
            self.told.store(1, Ordering::Release);
            drop(failure);
            self.wake.notify_all();
            Ok(())
        }
    }
}
