//! [`Rank`]: what one rank of a run knows of itself.

use phalanx_tensor::Device;

use crate::comm::Comm;

/// One rank of a run: its communicator with all others, and its device.
#[derive(Clone, Debug)]
pub struct Rank {
    comm: Comm,
    device: Device,
}

impl Rank {
    /// Made on the thread that is the rank.
    pub(super) fn new(comm: Comm, device: Device) -> Rank {
        phalanx_nn::note_ranks(comm.size());
        Rank { comm, device }
    }

    /// Its number, from 0.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.comm.size()
    }

    /// The device that is this rank's alone.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The communicator of all ranks.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }
}
