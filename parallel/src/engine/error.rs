//! What can go wrong with work that was handed to an engine.

use std::fmt;
use std::sync::Arc;

/// The engine's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Whatever an operation may fail with.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// An error of the engine or of an operation it ran. A failure is kept and handed out by reference, so it can be
/// returned to all who wait for what it spoiled.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation returned an error: the root cause, however many operations it spoiled.
    #[error("engine: `{op}` failed: {cause}")]
    Failed {
        /// The operation.
        op: String,
        /// What it returned.
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
