//! [`observed`]: a communicator whose calls are timed, from their start to their true end.
//!
//! The observation is part of the call. The thread that finishes the call reports it, so no thread has to wait for it.

use std::fmt;
use std::sync::Arc;

use super::{Call, Comm, Communicator, Error, Observer, Pending, Result, Traffic};
use crate::flight::FlightRecorder;

/// The same communicator, and groups made of it, with an observer of this rank's calls. It is called before
/// any thread that waits for the call goes on. Calls that are refused before they start, or that the end of the run cuts
/// off, may not be reported.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use phalanx_parallel::comm::{CollectiveKind, observed};
/// use phalanx_parallel::launch;
///
/// let kinds = launch::threads(2, |rank| -> phalanx_parallel::comm::Result<Vec<CollectiveKind>> {
///     let heard = Arc::new(Mutex::new(vec![]));
///     let told = Arc::clone(&heard);
///     let comm = observed(rank.comm().clone(), Arc::new(move |call| told.lock().unwrap().push(call.kind)));
///     comm.barrier()?;
///     let kinds = heard.lock().unwrap().clone();
///     Ok(kinds)
/// })?;
/// assert_eq!(kinds, [[CollectiveKind::Barrier], [CollectiveKind::Barrier]]);
/// # Ok::<(), phalanx_parallel::comm::Error>(())
/// ```
pub fn observed(comm: Comm, observer: Observer) -> Comm {
    Arc::new(ObservedComm { comm, observer })
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

    fn flight_recorder(&self) -> Option<&FlightRecorder> {
        self.comm.flight_recorder()
    }

    fn has_peers(&self) -> bool {
        self.comm.has_peers()
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Comm>> {
        let group = self.comm.split(color, key)?;
        Ok(group.map(|group| observed(group, Arc::clone(&self.observer))))
    }
}
