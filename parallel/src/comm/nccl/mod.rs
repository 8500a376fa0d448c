//! (comm/nccl/mod.rs)
//! Ranks with a GPU each, over NCCL.
//!
//! Another communicator of the same ranks (threads, TCP, MPI) stays as the control plane. There every call is announced, so
//! that it is compared between ranks, late and lost ranks are named and the first error ends the run of all, as on every
//! backend; and what lies in the host's memory is exchanged there altogether. NCCL is given a call only when all its
//! ranks have come to it, so nothing waits on a GPU for a rank that may never come.
//!
//! ```text
//! caller   announce ──submit──────────────────── wait: its later work on the GPU comes after
//! lane              └─all have come─ exchange ─ add in order of the ranks ─ exchange ─┘     (a stream of its own)
//! watch                                looks after what is under way; aborts it where the run has failed
//!
//! route    what a rank does for a call: messages, and what is added when. Pure    library  NCCL's calls
//! combine  the kernel that adds in order of the ranks                            lane     the calls of a group, in order
//! watch    what is under way on the GPU                                          member   the communicator
//! ```
//!
//! A group has a lane and an NCCL communicator of its own, made when it is first used; messages have one a pair and direction.
//! No call waits for the GPU, but those that somebody observes.
//!
//! (comm/nccl/member.rs)
//! [`join`]: a rank with a GPU, as a communicator.

mod lane;
mod library;
mod route;
mod watch;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use lane::{Lane, prepare};
use phalanx_tensor::cuda::{Library, require};
use phalanx_tensor::{Device, Tensor};
use watch::Watch;

use super::{Call, Comm, Communicator, Error, Kind, Pending, Result, Traffic};
use crate::panics::unpoisoned;

/// Who adds the elements of several ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sums {
    /// This crate, in order of the ranks: the bits are those of every other backend.
    #[default]
    InOrder,
    /// NCCL, in an order of its own, which may depend on the machine and on sizes. bf16 and f16 may be rounded at each
    /// addition.
    Library,
}

/// How ranks exchange what is on their GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclConfig {
    /// Who adds.
    pub sums: Sums,
    /// How long a call may run on a GPU, and how long NCCL may take to find the other ranks.
    pub timeout: Duration,
}

impl Default for NcclConfig {
    fn default() -> NcclConfig {
        NcclConfig { sums: Sums::InOrder, timeout: crate::launch::TIMEOUT }
    }
}

/// `control`'s rank with a GPU: what is there is exchanged over NCCL, everything else over `control`. All ranks do this, each
/// with a GPU of its own. `control` is not used for anything else from now on.
///
/// # Errors
/// If `device` is no GPU, or NCCL is not found.
pub fn nccl(control: Comm, device: Device, config: NcclConfig) -> Result<Comm> {
    join(control, device, config).map(|(_, comm)| comm)
}

/// Whether NCCL can be used here.
///
/// # Errors
/// What was looked for, and where.
pub fn check_nccl() -> Result<&'static str> {
    let from = require(Library::Nccl).map_err(Error::Launch)?;
    library::functions().map(|_| from).map_err(Error::Launch)
}

/// A rank's use of NCCL, until it is left.
#[derive(Debug)]
pub(crate) struct Session {
    watch: Arc<Watch>,
    thread: JoinHandle<()>,
}

impl Session {
    /// Waits until everything under way has ended, and NCCL has.
    pub(crate) fn leave(self) {
        self.watch.end();
        // It does not panic; if it did, there would be nothing left to wait for.
        let _ = self.thread.join();
    }
}

/// See [`nccl`](nccl).
pub(crate) fn join(control: Comm, device: Device, config: NcclConfig) -> Result<(Session, Comm)> {
    let gpu = device.gpu()?;
    check_nccl()?;
    let (watch, thread) = Watch::start(gpu, Arc::clone(&control), config.timeout)?;
    let root = Arc::new(Root { watch: Arc::clone(&watch), device, sums: config.sums });
    let comm = Member::new(root, control)?;
    Ok((Session { watch, thread }, Arc::new(comm)))
}

/// What a rank's communicators share. When the last is gone, nobody can call anything any more.
#[derive(Debug)]
struct Root {
    watch: Arc<Watch>,
    device: Device,
    sums: Sums,
}

impl Drop for Root {
    fn drop(&mut self) {
        self.watch.end();
    }
}

/// The group's collectives, or the messages to (true) or from another rank.
type Lanes = HashMap<Option<(usize, bool)>, Arc<Lane>>;

/// A rank's membership in a group.
#[derive(Debug)]
struct Member {
    root: Arc<Root>,
    /// The control plane: calls are announced here, in the order of the lanes.
    control: Comm,
    /// The same ranks, for what lanes say to each other.
    private: Comm,
    lanes: Mutex<Lanes>,
}

impl Member {
    fn new(root: Arc<Root>, control: Comm) -> Result<Member> {
        let all: Vec<usize> = (0..control.size()).collect();
        let private = control.group(&all)?;
        Ok(Member { root, control, private, lanes: Mutex::default() })
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
            // Now, since nobody waits for this rank on a GPU yet. The lane says what is wrong, if anything is.
            let _ = prepare(call.kind().name(), self.root.watch.gpu, dtype, by);
        }
        let key = call.peer().map(|peer| (peer, call.kind() == Kind::Send));
        // Announced and handed over in the same order.
        let mut lanes = unpoisoned(self.lanes.lock());
        let lane = match lanes.get(&key) {
            Some(lane) => Arc::clone(lane),
            None => {
                let watch = Arc::clone(&self.root.watch);
                let lane = Lane::new(watch, Arc::clone(&self.private), key, self.root.sums)?;
                lanes.insert(key, Arc::clone(&lane));
                lane
            }
        };
        let announced = self.control.start(announcement);
        Ok(lane.start(call, announced))
    }
}

/// What a collective of one rank leaves to do.
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
}
