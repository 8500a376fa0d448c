//! A piece of work that can be queued on a stream or be a node of a graph: it may run many times.

use std::sync::Arc;

use crate::access::Access;
use crate::context::Context;
use crate::status::Failure;

/// What became of a task whose turn it was.
#[derive(Debug)]
pub(crate) enum Progress {
    /// It has run, and touched this besides what it said beforehand.
    Done(Vec<Access>),
    /// It waits for something other than operations before it, and is to be asked again.
    Waiting,
    /// It failed, which its context does not survive.
    Failed(Failure),
}

/// The number of an operation: each time a task is queued it is another one, and later ones are larger.
pub(crate) type Turn = u64;

/// What a task does when it is its turn.
pub(crate) type Run = dyn Fn(Turn) -> Progress + Send + Sync;

/// What is queued.
pub(crate) struct Task {
    /// As in "kernel gelu": who it is in reports. The stream is added when it is queued.
    pub what: String,
    pub context: Arc<Context>,
    /// Device memory that it is known to touch.
    pub accesses: Vec<Access>,
    /// Page-locked memory of the host that must stay until it has run: `start .. end`.
    pub host: Option<(usize, usize)>,
    pub run: Box<Run>,
}

impl Task {
    /// A task that touches nothing.
    pub(crate) fn new(
        what: impl Into<String>,
        context: &Arc<Context>,
        run: impl Fn(Turn) -> Progress + Send + Sync + 'static,
    ) -> Task {
        Task {
            what: what.into(),
            context: context.clone(),
            accesses: Vec::new(),
            host: None,
            run: Box::new(run),
        }
    }

    /// A task that does nothing but keep its place in the order.
    pub(crate) fn marker(what: &str, context: &Arc<Context>) -> Task {
        Task::new(what, context, |_| Progress::Done(Vec::new()))
    }

    /// With device memory that it touches.
    pub(crate) fn touching(mut self, accesses: impl IntoIterator<Item = Access>) -> Task {
        self.accesses.extend(accesses);
        self
    }
}

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.what)
    }
}

/// `Done`, or the failure.
impl From<Result<(), Failure>> for Progress {
    fn from(result: Result<(), Failure>) -> Progress {
        result.map_or_else(Progress::Failed, |()| Progress::Done(Vec::new()))
    }
}
