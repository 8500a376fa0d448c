//! [`Signal`]: how a wait for one variable hears that its turn has come.

use std::sync::Arc;

use super::error::{Cause, Result};
use super::failure::Failure;
use super::sync::{AtomicU32, Condvar, Mutex, Ordering, lock, sleep, watch};

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
