//! Ranks with a GPU each, over NCCL.
//!
//! A second communicator of the same ranks (threads, TCP or MPI) is the control plane. Every call is announced there, so it is
//! compared between ranks, late and lost ranks are named, and the first error ends the run of all ranks, as on every backend.
//! Tensors in the host's memory are exchanged over it too. NCCL gets a call only when all its ranks have announced it, so no
//! GPU waits for a rank that may never come.
//!
//! ```text
//! caller    announce ──submit─────────────────────── wait: the caller's later GPU work comes after the call
//! call stream        └─all have announced─ exchange ─ add in order of the ranks ─ exchange ─┘
//! watchdog                                 polls calls under way; aborts them if the run has failed
//!
//! mod (communicator) ──► call_stream (calls of a group, in order) ──► route (the steps of one rank; pure)
//!                           ├──► watchdog (calls under way on the GPU)
//!                           └──► library (NCCL's functions)       combine.cu: adds the ranks' elements in order
//! ```
//!
//! A group has a call stream (a queue of calls with a CUDA stream) and an NCCL communicator of its own, made at its first use;
//! a pair of ranks has one for each direction of its messages. The host waits for the GPU only in calls that have
//! an observer.

mod call_stream;
mod library;
mod route;
mod watchdog;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use call_stream::{CallStream, prepare};
use phalanx_tensor::cuda::{Library, require};
use phalanx_tensor::{Device, Tensor, unpoisoned};
use watchdog::Watchdog;

use super::{Call, CollectiveKind, Comm, Communicator, Error, Pending, Result, Traffic};
use crate::flight::FlightRecorder;

/// Which code adds the elements of several ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sums {
    /// This crate, in order of the ranks: the bits are those of every other backend.
    #[default]
    InOrder,
    /// NCCL, in an order of its own, which may depend on the machine and on sizes. bf16 and f16 may be rounded at each
    /// addition.
    Library,
}

/// How ranks exchange tensors of their GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclConfig {
    /// Which code adds.
    pub sums: Sums,
    /// How long a call may run on a GPU, and how long NCCL may take to find the other ranks.
    pub timeout: Duration,
}

impl Default for NcclConfig {
    fn default() -> NcclConfig {
        NcclConfig { sums: Sums::InOrder, timeout: crate::launch::TIMEOUT }
    }
}

/// The rank of `control` with a GPU: tensors there are exchanged over NCCL, all others over `control`. All ranks call this,
/// each with a GPU of its own. The caller does not use `control` afterwards.
///
/// # Errors
/// If `device` is no GPU, or NCCL is not found.
pub fn nccl(control: Comm, device: Device, config: NcclConfig) -> Result<Comm> {
    join(control, device, config).map(|(_, comm)| comm)
}

/// Whether NCCL can be used here.
///
/// # Errors
/// If it is not found: the names and places that were tried.
pub fn check_nccl() -> Result<&'static str> {
    let from = require(Library::Nccl).map_err(Error::Launch)?;
    library::functions().map(|_| from).map_err(Error::Launch)
}

/// A rank's use of NCCL, until it is left.
#[derive(Debug)]
pub(crate) struct Session {
    watchdog: Arc<Watchdog>,
    thread: JoinHandle<()>,
}

impl Session {
    /// Waits until everything under way has ended, and NCCL has.
    pub(crate) fn leave(self) {
        self.watchdog.end();
        // It does not panic; if it did, there would be nothing left to wait for.
        let _ = self.thread.join();
    }
}

/// See [`nccl`](nccl).
pub(crate) fn join(control: Comm, device: Device, config: NcclConfig) -> Result<(Session, Comm)> {
    let gpu = device.gpu()?;
    check_nccl()?;
    let (watchdog, thread) = Watchdog::start(gpu, Arc::clone(&control), config.timeout)?;
    let root = Arc::new(Root { watchdog: Arc::clone(&watchdog), device, sums: config.sums });
    let comm = Member::new(root, control)?;
    Ok((Session { watchdog, thread }, Arc::new(comm)))
}

/// The state that a rank's communicators share. When the last of them is dropped, no call can come any more.
#[derive(Debug)]
struct Root {
    watchdog: Arc<Watchdog>,
    device: Device,
    sums: Sums,
}

impl Drop for Root {
    fn drop(&mut self) {
        self.watchdog.end();
    }
}

/// The group's collectives, or the messages to (true) or from another rank.
type CallStreams = HashMap<Option<(usize, bool)>, Arc<CallStream>>;

/// A rank's membership in a group.
#[derive(Debug)]
struct Member {
    root: Arc<Root>,
    /// The control plane: calls are announced here, in the order of the call streams.
    control: Comm,
    /// The same ranks, for messages between call streams.
    private: Comm,
    streams: Mutex<CallStreams>,
}

impl Member {
    fn new(root: Arc<Root>, control: Comm) -> Result<Member> {
        let all: Vec<usize> = (0..control.size()).collect();
        let private = control.group(&all)?;
        Ok(Member { root, control, private, streams: Mutex::default() })
    }

    /// Whether everything that this rank brings is on its GPU. A message to itself goes over the control plane, which has
    /// both ends.
    fn is_on_gpu(&self, call: &Call) -> bool {
        let mut tensors = call.input.iter().chain(&call.output).peekable();
        let itself = call.peer() == Some(self.rank());
        !itself && tensors.peek().is_some() && tensors.all(|tensor| tensor.device() == self.root.device)
    }

    fn begin(&self, call: Call) -> Result<Pending> {
        let call = call.checked(self.rank(), self.size())?;
        let announcement = call.announcement();
        if self.size() == 1 {
            self.control.run(announcement)?;
            let outcome = copy_alone(&call);
            return Ok(Pending::done(call, outcome));
        }
        if let (Some(by), Some(dtype)) = (call.signature.by, call.signature.dtype) {
            // Compiled now, before a GPU waits for this rank. The call stream reports an error, if there is one.
            let _ = prepare(call.kind().name(), self.root.watchdog.gpu, dtype, by);
        }
        let key = call.peer().map(|peer| (peer, call.kind() == CollectiveKind::Send));
        // Announced and handed over in the same order.
        let mut streams = unpoisoned(self.streams.lock());
        let stream = match streams.get(&key) {
            Some(stream) => Arc::clone(stream),
            None => {
                let watchdog = Arc::clone(&self.root.watchdog);
                let stream = CallStream::new(watchdog, Arc::clone(&self.private), key, self.root.sums)?;
                streams.insert(key, Arc::clone(&stream));
                stream
            }
        };
        let announced = self.control.start(announcement);
        Ok(stream.start(call, announced))
    }
}

/// A collective of one rank: copies the input to the output.
fn copy_alone(call: &Call) -> Result<()> {
    match (&call.output, &call.input) {
        (Some(output), Some(input)) => {
            let flat = |t: &Tensor| t.view_into(0, &[t.numel()]);
            Ok(flat(output)?.copy_from(&flat(input)?)?)
        }
        _ => Ok(()),
    }
}

impl Communicator for Member {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn ranks(&self) -> &[usize] {
        self.control.ranks()
    }

    fn start(&self, call: Call) -> Pending {
        if !self.is_on_gpu(&call) {
            return self.control.start(call);
        }
        self.begin(call).unwrap_or_else(|error| Pending::done(Call::barrier(), Err(error)))
    }

    fn run(&self, call: Call) -> Result<()> {
        if self.is_on_gpu(&call) { self.start(call).wait() } else { self.control.run(call) }
    }

    fn group(&self, ranks: &[usize]) -> Result<Comm> {
        Ok(Arc::new(Member::new(Arc::clone(&self.root), self.control.group(ranks)?)?))
    }

    fn traffic(&self) -> Traffic {
        // Announcements count as what they announce.
        self.control.traffic()
    }

    fn fail(&self, cause: &str) {
        self.control.fail(cause);
    }

    fn failure(&self) -> Option<Error> {
        self.control.failure()
    }

    fn flight_recorder(&self) -> Option<&FlightRecorder> {
        self.control.flight_recorder()
    }
}
