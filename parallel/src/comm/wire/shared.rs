//! [`Shared`]: where a process's ranks wait for its driver.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::comm::pending::Ticket;
use crate::comm::{Error, Result};

/// What the driver and those who wait for it share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    state: Mutex<Outcome>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Outcome {
    failure: Option<Error>,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Outcome> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What ended the run.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.lock().failure.clone()
    }

    /// Keeps what ended the run: the first that went wrong.
    pub(super) fn fail(&self, error: Error) {
        self.lock().failure.get_or_insert(error);
    }

    /// Blocks until the ticket is done, which the driver sees to.
    pub(crate) fn wait(&self, ticket: &Ticket) -> Result<()> {
        let mut state = self.lock();
        loop {
            match ticket.outcome() {
                Some(outcome) => return outcome,
                None if state.closed => return Err(Error::Launch("the process has left the run".into())),
                None => state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// A ticket is done.
    pub(super) fn notify(&self) {
        drop(self.lock());
        self.wake.notify_all();
    }

    /// Nothing will come any more.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.wake.notify_all();
    }
}
