//! [`join`]: a rank with a GPU, as a communicator.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use phalanx_tensor::{Device, Tensor};

use super::combine::prepare;
use super::lane::Lane;
use super::watch::Watch;
use super::{NcclConfig, Sums, check_nccl};
use crate::comm::{Call, Comm, Communicator, Error, Kind, Pending, Result, Traffic};

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

/// See [`nccl`](super::nccl).
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
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
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
