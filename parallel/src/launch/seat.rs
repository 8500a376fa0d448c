//! [`Seat`]: the device that a rank computes on, and how it exchanges what is there.

use phalanx_tensor::Device;

use crate::comm::{Comm, Error, Result};
#[cfg(feature = "nccl")]
use crate::comm::{NcclConfig, join_nccl};

/// What the ranks of a run compute on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Seat {
    /// CPUs, as logical devices.
    #[default]
    Cpu,
    /// Nothing: shapes only.
    Meta,
    /// A GPU each. What is there is exchanged by way of the host's memory.
    Cuda,
    /// A GPU each. What is there is exchanged over NCCL.
    #[cfg(feature = "nccl")]
    Nccl(NcclConfig),
}

impl Seat {
    /// The device of the rank of this number on its machine.
    pub(super) fn device(self, index: usize) -> Result<Device> {
        let index = u16::try_from(index).map_err(|_| Error::Launch(format!("got {} ranks", index + 1)))?;
        Ok(match self {
            Seat::Cpu => Device::Cpu(index),
            Seat::Meta => Device::Meta(index),
            _ => Device::Cuda(index),
        })
    }

    /// Refuses what this machine has not: the rank of this number would find out late, and alone.
    pub(super) fn check(self, device: Device) -> Result<()> {
        if device.is_cuda() {
            device.gpu()?;
        }
        #[cfg(feature = "nccl")]
        if matches!(self, Seat::Nccl(_)) {
            crate::comm::check_nccl()?;
        }
        Ok(())
    }

    /// The communicator of a rank whose ranks meet by `control`, and what is to be left at its end.
    pub(super) fn join(self, control: &Comm, device: Device) -> Result<(Comm, Session)> {
        match self {
            #[cfg(feature = "nccl")]
            Seat::Nccl(config) => {
                let (session, comm) = join_nccl(control.clone(), device, config)?;
                Ok((comm, Session(Some(session))))
            }
            _ => self.check(device).map(|()| (control.clone(), Session::default())),
        }
    }
}

/// What a rank leaves after its work, before it leaves the run.
#[derive(Debug, Default)]
pub(super) struct Session(
    #[cfg(feature = "nccl")] Option<crate::comm::NcclSession>,
    #[cfg(not(feature = "nccl"))] (),
);

impl Session {
    /// Waits until what is under way has ended.
    pub(super) fn leave(self) {
        #[cfg(feature = "nccl")]
        if let Some(session) = self.0 {
            session.leave();
        }
    }
}
