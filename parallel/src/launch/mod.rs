//! Starts ranks: as threads of this process, or as the processes that a launcher such as `mpirun`, `srun` or `torchrun` has
//! started already. Each gets a [`Rank`]: its communicator and its device.
//!
//! ```
//! use phalanx_parallel::comm::Reduction;
//! use phalanx_parallel::launch;
//! use phalanx_tensor::Tensor;
//!
//! let sums = launch::threads(3, |rank| {
//!     let mut x = Tensor::scalar(rank.rank() as f32 + 1.0, rank.device())?;
//!     rank.comm().all_reduce(&mut x, Reduction::Sum)?;
//!     Ok::<f32, phalanx_parallel::comm::Error>(x.item()?)
//! })?;
//! assert_eq!(sums, [6.0; 3]);
//! # Ok::<(), phalanx_parallel::comm::Error>(())
//! ```

mod devices;
mod environment;
mod rejoin;
#[cfg(test)]
mod tests;
mod threads;
mod worker_env;

use std::ops::Range;
use std::time::Duration;

use phalanx_tensor::Device;

use crate::comm::Comm;
use rejoin::{Rejoin, Seat};

pub use environment::{Backend, Environment, environment, is_launched};
pub use threads::{Threads, threads};

/// How long ranks wait for each other in a collective unless told otherwise. One of them may write a model to a slow disk meanwhile.
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// How long processes wait for each other at the start unless told otherwise.
pub const JOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// One rank of a run: its communicator with all others, and its device.
#[derive(Clone, Debug)]
pub struct Rank {
    comm: Comm,
    device: Device,
    on_this_machine: Range<usize>,
    epoch: u64,
    rejoin: Rejoin,
    seat: Option<Seat>,
}

impl Rank {
    /// To be made on the rank's own thread.
    pub(super) fn new(comm: Comm, device: Device, on_this_machine: Range<usize>) -> Rank {
        phalanx_nn::note_ranks(comm.size());
        Rank { comm, device, on_this_machine, epoch: 0, rejoin: Rejoin::Never, seat: None }
    }

    /// The same in an epoch of the run.
    fn in_epoch(self, epoch: u64, rejoin: Rejoin, seat: Option<Seat>) -> Rank {
        Rank { epoch, rejoin, seat, ..self }
    }

    /// Its number, from 0.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.comm.size()
    }

    /// The ranks of this machine, as far as the launcher says how many those are; otherwise all.
    pub fn on_this_machine(&self) -> Range<usize> {
        self.on_this_machine.clone()
    }

    /// The device that is this rank's alone.
    pub fn device(&self) -> Device {
        self.device
    }

    /// How often the ranks of this run had met before they did now: 0 at the first start. A meeting that a process's death has ended
    /// may have taken a number. See [`Environment::run_elastic`].
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether processes wait that have no place in this epoch, so that the next one would have more ranks. Cheap enough for each step.
    /// Ranks may learn it at different steps, so they must agree on one, for instance by a sum of the answers; then all of them call
    /// [`Rank::meet_again`] and return.
    pub fn wants_to_change(&self) -> bool {
        self.seat.as_ref().is_some_and(Seat::wants_to_change)
    }

    /// Lets this process meet the others again as soon as its function has returned, whose result is dropped; the function is called
    /// again in the next epoch, where [`Rank::size`] may be another one. Without a store, or under [`Environment::run`], the run ends.
    pub fn meet_again(&self) {
        self.seat.iter().for_each(Seat::meet_again);
    }

    /// Whether the epoch has failed because of another rank, so that this process will meet the others again when its function has
    /// returned. Its error is none of the run then.
    pub fn is_left_to_rejoin(&self) -> bool {
        self.comm.failure().is_some_and(|failure| self.rejoin.follows(&failure, self.rank()))
    }

    /// The communicator of all ranks.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }
}
