//! [`Shared`]: where the ranks of a process wait for its [`Driver`](super::Driver), and learn how the run ended.

use std::sync::{Condvar, Mutex, MutexGuard};

use phalanx_tensor::unpoisoned;

use crate::comm::pending::Ticket;
use crate::comm::{Error, Result};
use crate::flight::FlightRecorder;

/// The state that the driver shares with the threads that wait for it.
#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<Outcome>,
    wake: Condvar,
    pub(super) recorder: FlightRecorder,
}

/// How the run ended, if it has.
#[derive(Debug, Default)]
struct Outcome {
    failure: Option<Error>,
    closed: bool,
}

impl Shared {
    pub(super) fn new(recorder: FlightRecorder) -> Shared {
        Shared { state: Mutex::default(), wake: Condvar::new(), recorder }
    }

    fn lock(&self) -> MutexGuard<'_, Outcome> {
        unpoisoned(self.state.lock())
    }

    /// The error that ended the run.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.lock().failure.clone()
    }

    /// Keeps the first error, which ended the run.
    pub(super) fn fail(&self, error: Error) {
        self.lock().failure.get_or_insert(error);
    }

    /// Blocks until the driver has finished the ticket.
    pub(crate) fn wait(&self, ticket: &Ticket) -> Result<()> {
        let mut state = self.lock();
        loop {
            match ticket.outcome() {
                Some(outcome) => return outcome,
                None if state.closed => return Err(Error::Launch("the process has left the run".into())),
                None => state = unpoisoned(self.wake.wait(state)),
            }
        }
    }

    /// Wakes the waiting threads: a ticket is done.
    pub(super) fn notify(&self) {
        drop(self.lock());
        self.wake.notify_all();
    }

    /// Wakes the waiting threads: the driver has ended.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.wake.notify_all();
    }
}
