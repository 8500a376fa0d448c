//! [`Failure`]: what went wrong first, and whom it has reached.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::{Error, Result};
use super::sync::{Mutex, lock};

/// The root cause that poisons variables: an operation's error or panic.
pub(crate) struct Failure {
    /// The number of the push, which says what failed first.
    sequence: u64,
    error: Error,
    /// A wait has returned it.
    reported: AtomicBool,
    /// It poisons nothing any more: a wait for all has returned it.
    lifted: AtomicBool,
}

/// Why an operation did not succeed.
pub(crate) enum Reason {
    Error(super::error::Cause),
    Panic(String),
}

impl Failure {
    pub(crate) fn new(sequence: u64, op: &str, reason: Reason) -> Arc<Failure> {
        let op = op.to_string();
        let error = match reason {
            Reason::Error(cause) => Error::Failed { op, cause: cause.into() },
            Reason::Panic(message) => Error::Panicked { op, message },
        };
        Arc::new(Failure {
            sequence,
            error,
            reported: AtomicBool::new(false),
            lifted: AtomicBool::new(false),
        })
    }

    /// The error for a wait.
    pub(crate) fn report(&self) -> Error {
        self.reported.store(true, Ordering::Relaxed);
        self.error.clone()
    }

    pub(crate) fn lifted(&self) -> bool {
        self.lifted.load(Ordering::Relaxed)
    }

    /// Of two root causes the one that was pushed first, so that it does not matter which of them was met first.
    pub(crate) fn first(slot: &mut Option<Arc<Failure>>, other: &Arc<Failure>) {
        if slot.as_ref().is_none_or(|failure| other.sequence < failure.sequence) {
            *slot = Some(other.clone());
        }
    }

    fn reported(&self) -> bool {
        self.reported.load(Ordering::Relaxed)
    }

    /// Nobody needs to hear of it: it was reported, and no variable is poisoned by it. The list's is the last handle.
    fn settled(self: &Arc<Failure>) -> bool {
        self.reported() && Arc::strong_count(self) == 1
    }
}

/// All failures of an engine that still matter.
pub(crate) struct Failures(Mutex<Vec<Arc<Failure>>>);

impl Failures {
    pub(crate) fn new() -> Failures {
        Failures(Mutex::new(Vec::new()))
    }

    pub(crate) fn add(&self, failure: &Arc<Failure>) {
        let mut list = lock(&self.0);
        // Each is asked once whether it poisons anything: the answer may change meanwhile.
        let poisons: Vec<bool> = list.iter().map(|f| Arc::strong_count(f) > 1).collect();
        // Of those that poison nothing the first is enough to report, so the list does not grow without end.
        let idle = list.iter().zip(&poisons).filter(|(f, poisons)| !**poisons && !f.reported());
        let first = idle.map(|(f, _)| f.sequence).min();
        let mut poisons = poisons.into_iter();
        list.retain(|f| poisons.next() == Some(true) || Some(f.sequence) == first);
        list.push(failure.clone());
    }

    /// The first failure that was not reported or still poisons a variable; afterwards none does.
    pub(crate) fn report_all(&self) -> Result<()> {
        let list = std::mem::take(&mut *lock(&self.0));
        let first = list.iter().filter(|f| !f.settled()).min_by_key(|f| f.sequence);
        list.iter().for_each(|f| f.lifted.store(true, Ordering::Relaxed));
        first.map_or(Ok(()), |f| Err(f.report()))
    }
}
