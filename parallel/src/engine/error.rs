//! [`Error`]: how work that was pushed to an engine can fail. [`Failure`]: the first error of a chain of operations, which
//! poisons the variables that depend on it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::sync::{Mutex, lock};

/// The engine's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An operation's own error, of any type.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// An error of the engine or of an operation it ran. It is cheap to clone, since every wait for a
/// poisoned variable returns it.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation returned an error: the root cause of all operations that were skipped because of it.
    #[error("engine: `{op}` failed: {cause}")]
    Failed {
        /// The operation.
        op: String,
        /// The error it returned.
        #[source]
        cause: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// An operation panicked.
    #[error("engine: `{op}` panicked: {message}")]
    Panicked {
        /// The operation.
        op: String,
        /// The panic's message.
        message: String,
    },
    /// An operation uses a variable that was deleted before.
    #[error("engine: `{op}` uses variable {variable}, which was deleted")]
    Deleted {
        /// The operation.
        op: String,
        /// The variable's number.
        variable: u64,
    },
    /// An operation uses a variable of another engine.
    #[error("engine: `{op}` uses variable {variable}, which belongs to another engine")]
    Foreign {
        /// The operation.
        op: String,
        /// The variable's number.
        variable: u64,
    },
    /// A declared operation is another engine's.
    #[error("engine: `{op}` was declared by another engine")]
    ForeignOperation {
        /// The operation.
        op: String,
    },
    /// The engine has no threads for the lane that an operation asks for.
    #[error("engine: `{op}` wants {lane}, got an engine with {known}")]
    NoLane {
        /// The operation.
        op: String,
        /// The lane it asked for.
        lane: String,
        /// The lanes there are.
        known: String,
    },
    /// An operation waits for its own engine, which could be waiting for that operation.
    #[error("engine: {wait} was called by an operation of the same engine, which might wait for itself")]
    WaitInside {
        /// The call.
        wait: &'static str,
    },
    /// A resource is in use by an operation that runs at the same time, so one of the two did not name it.
    #[error("engine: resource {variable} is in use: an operation takes it without naming its variable")]
    InUse {
        /// The number of the resource's variable.
        variable: u64,
    },
    /// A trace could not be written.
    #[error("engine: the trace {path} was not written: {why}")]
    Trace {
        /// The file.
        path: String,
        /// The system's answer.
        why: String,
    },
    /// The system refused a thread.
    #[error("engine: no thread for {lane}: {why}")]
    Thread {
        /// The lane that the thread was for.
        lane: String,
        /// The system's answer.
        why: String,
    },
}

/// The message, so that a program that ends with an error shows it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Which variables a wait for one variable heals when it returns a failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorClearing {
    /// The one that was waited for. The others hold values that were never computed, and a wait for one of them says so.
    #[default]
    Variable,
    /// All that the failure has poisoned, as in MXNet, where they share one reference to the exception. Whether an operation
    /// that was pushed before the wait is skipped may then depend on time.
    Failure,
}

/// The root cause that poisons variables: an operation's error or panic.
pub(crate) struct Failure {
    /// The number of the push, and the place in its bulk, by which the first failure is found.
    sequence: (u64, u32),
    error: Error,
    /// A wait has returned it.
    reported: AtomicBool,
    /// It poisons nothing any more: a wait that heals all variables has returned it.
    lifted: AtomicBool,
}

/// Why an operation did not succeed.
pub(crate) enum Reason {
    Error(Cause),
    Panic(String),
}

impl Failure {
    pub(crate) fn new(sequence: (u64, u32), op: &str, reason: Reason) -> Arc<Failure> {
        let op = op.to_string();
        let error = match reason {
            Reason::Error(cause) => Error::Failed { op, cause: cause.into() },
            Reason::Panic(message) => Error::Panicked { op, message },
        };
        Failure::of(sequence, error)
    }

    pub(crate) fn of(sequence: (u64, u32), error: Error) -> Arc<Failure> {
        Arc::new(Failure {
            sequence,
            error,
            reported: AtomicBool::new(false),
            lifted: AtomicBool::new(false),
        })
    }

    /// Ends the poison of all variables.
    pub(crate) fn lift(&self) {
        self.lifted.store(true, Ordering::Relaxed);
    }

    /// The error for a wait.
    pub(crate) fn report(&self) -> Error {
        self.reported.store(true, Ordering::Relaxed);
        self.error.clone()
    }

    pub(crate) fn lifted(&self) -> bool {
        self.lifted.load(Ordering::Relaxed)
    }

    /// Keeps the root cause that was pushed first, whichever of the two was found first.
    pub(crate) fn first(slot: &mut Option<Arc<Failure>>, other: &Arc<Failure>) {
        if slot.as_ref().is_none_or(|failure| other.sequence < failure.sequence) {
            *slot = Some(other.clone());
        }
    }

    fn reported(&self) -> bool {
        self.reported.load(Ordering::Relaxed)
    }

    /// Whether it was reported and poisons no variable: then the list's handle is the last one.
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
        // Each failure is asked once whether it poisons a variable, since the answer may change meanwhile.
        let poisons: Vec<bool> = list.iter().map(|f| Arc::strong_count(f) > 1).collect();
        // Of the failures that poison nothing, only the first is ever reported. The others go, so the list stays short.
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
        list.iter().for_each(|f| f.lift());
        first.map_or(Ok(()), |f| Err(f.report()))
    }
}
