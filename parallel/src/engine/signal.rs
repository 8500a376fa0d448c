//! [`Signal`]: how a wait for one variable hears that its turn has come.

use std::sync::Arc;

use super::error::Result;
use super::failure::Failure;
use super::node::{Ended, Task};
use super::sync::{AtomicU32, Condvar, Mutex, Ordering, lock, sleep, watch};

/// A task that tells one thread. It is granted a variable like any other, so all that was pushed before has run.
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
}

impl Task for Arc<Signal> {
    fn taint(&self, failure: &Arc<Failure>) {
        Failure::first(&mut lock(&self.failure), failure);
    }

    fn run(&self, _: bool) -> Ended {
        let guard = lock(&self.failure);
        self.told.store(1, Ordering::Release);
        drop(guard);
        self.wake.notify_all();
        Ended::Done
    }
}
