//! [`RankDevices`]: which devices the ranks of a run compute on, and how tensors there are exchanged. [`Cores`]: the ranks of a
//! machine share its cores, so that their thread pools do not compete.

use std::num::NonZero;

use phalanx_tensor::{Device, even_piece};

use crate::comm::{Comm, Error, Result};

#[cfg(feature = "nccl")]
use crate::comm::{NcclConfig, join_nccl};

/// The devices of the ranks of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum RankDevices {
    /// CPUs, as logical devices.
    #[default]
    Cpu,
    /// Meta devices: shapes only.
    Meta,
    /// A GPU each. Its tensors are exchanged by way of the host's memory.
    Cuda,
    /// A GPU each. Its tensors are exchanged over NCCL.
    #[cfg(feature = "nccl")]
    Nccl(NcclConfig),
}

impl RankDevices {
    /// The device of the rank of this number on its machine.
    pub(super) fn device(self, index: usize) -> Result<Device> {
        let index = u16::try_from(index).map_err(|_| Error::Launch(format!("got {} ranks", index + 1)))?;
        Ok(match self {
            RankDevices::Cpu => Device::Cpu(index),
            RankDevices::Meta => Device::Meta(index),
            _ => Device::Cuda(index),
        })
    }

    /// Refuses a device or library that this machine lacks, before ranks start: later a single rank would fail.
    pub(super) fn check(self, device: Device) -> Result<()> {
        if device.is_cuda() {
            device.gpu()?;
        }
        #[cfg(feature = "nccl")]
        if matches!(self, RankDevices::Nccl(_)) {
            crate::comm::check_nccl()?;
        }
        Ok(())
    }

    /// The communicator of a rank, made over `control`, and the session to leave at the rank's end.
    pub(super) fn join(self, control: &Comm, device: Device) -> Result<(Comm, Session)> {
        match self {
            #[cfg(feature = "nccl")]
            RankDevices::Nccl(config) => {
                let (session, comm) = join_nccl(control.clone(), device, config)?;
                Ok((comm, Session(Some(session))))
            }
            _ => self.check(device).map(|()| (control.clone(), Session::default())),
        }
    }
}

/// A rank's use of NCCL, left after its work and before it leaves the run.
#[derive(Debug, Default)]
pub(super) struct Session(
    #[cfg(feature = "nccl")] Option<crate::comm::NcclSession>,
    #[cfg(not(feature = "nccl"))] (),
);

impl Session {
    /// Waits until all calls under way have ended.
    pub(super) fn leave(self) {
        #[cfg(feature = "nccl")]
        if let Some(session) = self.0 {
            session.leave();
        }
    }
}

/// Gives devices pools that together have no more threads than the machine has cores, until it is dropped.
pub(super) struct Cores {
    before: Vec<(Device, usize)>,
}

impl Cores {
    /// Divides `cores` (all there are, if none are named) among `ranks`, each at least one; `devices` are those of
    /// this process, by their rank on this machine.
    pub(super) fn divide(
        cores: Option<usize>,
        ranks: usize,
        devices: &[(usize, Device)],
    ) -> phalanx_tensor::Result<Cores> {
        let cores = cores.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, NonZero::get));
        let mut shared = Cores { before: vec![] };
        for &(rank, device) in devices.iter().filter(|(_, device)| matches!(device, Device::Cpu(_))) {
            let (wanted, now) = (even_piece(cores, ranks, rank).len().max(1), device.pool()?.threads());
            if wanted != now {
                shared.before.push((device, now));
                device.set_threads(wanted)?;
            }
        }
        Ok(shared)
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        for (device, threads) in self.before.drain(..) {
            // The device was usable before, and its pool had threads.
            let _ = device.set_threads(threads);
        }
    }
}
