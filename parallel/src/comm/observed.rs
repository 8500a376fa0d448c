//! [`observed`]: a communicator whose calls are timed, from their start to their true end.
//!
//! The observation is part of the call. The thread that finishes the call reports it, so no thread has to wait for it.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::{Call, Comm, Communicator, Error, Kind, Pending, Result, Traffic};

/// A call of one rank that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observed {
    /// What it was.
    pub kind: Kind,
    /// Bytes of elements of the larger of this rank's tensors.
    pub bytes: usize,
    /// When this rank called it.
    pub started: Instant,
    /// When its tensors were free again, or the call had failed.
    pub ended: Instant,
}

/// Hears of calls that are over, on whatever thread finishes them; it must be quick and not panic.
pub type Observer = Arc<dyn Fn(Observed) + Send + Sync>;

/// The same communicator, and groups made of it, with an observer of this rank's calls. It hears of a call before
/// any thread that waits for the call goes on. Calls that are refused before they start, or that the end of the run cuts
/// off, may not be reported.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use phalanx_parallel::comm::{Kind, observed};
/// use phalanx_parallel::launch;
///
/// let kinds = launch::threads(2, |rank| -> phalanx_parallel::comm::Result<Vec<Kind>> {
///     let heard = Arc::new(Mutex::new(vec![]));
///     let told = Arc::clone(&heard);
///     let comm = observed(rank.comm().clone(), Arc::new(move |call| told.lock().unwrap().push(call.kind)));
///     comm.barrier()?;
///     let kinds = heard.lock().unwrap().clone();
///     Ok(kinds)
/// })?;
/// assert_eq!(kinds, [[Kind::Barrier], [Kind::Barrier]]);
/// # Ok::<(), phalanx_parallel::comm::Error>(())
/// ```
pub fn observed(comm: Comm, observer: Observer) -> Comm {
    Arc::new(ObservedComm { comm, observer })
}

/// An observer and the start time, carried by a call.
#[derive(Clone)]
pub(crate) struct Observation {
    bytes: usize,
    started: Instant,
    observer: Observer,
}

impl Observation {
    /// The call is over.
    pub(crate) fn report(&self, kind: Kind) {
        let &Observation { bytes, started, .. } = self;
        (self.observer)(Observed { kind, bytes, started, ended: Instant::now() });
    }
}

impl fmt::Debug for Observation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Observation of {} bytes", self.bytes)
    }
}

impl Call {
    /// Adds an observer; the time of the call begins now.
    pub(crate) fn observed(mut self, observer: Observer) -> Call {
        let tensors = self.input.iter().chain(&self.output);
        let bytes = tensors.map(|tensor| tensor.numel() * tensor.dtype().size()).max().unwrap_or(0);
        self.observations.push(Observation { bytes, started: Instant::now(), observer });
        self
    }
}

/// A communicator and its observer.
struct ObservedComm {
    comm: Comm,
    observer: Observer,
}

impl ObservedComm {
    fn watch(&self, call: Call) -> Call {
        call.observed(Arc::clone(&self.observer))
    }
}

impl fmt::Debug for ObservedComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ObservedComm").field(&self.comm).finish()
    }
}

impl Communicator for ObservedComm {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn ranks(&self) -> &[usize] {
        self.comm.ranks()
    }

    fn start(&self, call: Call) -> Pending {
        self.comm.start(self.watch(call))
    }

    fn run(&self, call: Call) -> Result<()> {
        self.comm.run(self.watch(call))
    }

    fn group(&self, ranks: &[usize]) -> Result<Comm> {
        Ok(observed(self.comm.group(ranks)?, Arc::clone(&self.observer)))
    }

    fn traffic(&self) -> Traffic {
        self.comm.traffic()
    }

    fn fail(&self, cause: &str) {
        self.comm.fail(cause);
    }

    fn failure(&self) -> Option<Error> {
        self.comm.failure()
    }

    fn has_peers(&self) -> bool {
        self.comm.has_peers()
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Comm>> {
        let group = self.comm.split(color, key)?;
        Ok(group.map(|group| observed(group, Arc::clone(&self.observer))))
    }
}
