//! (launch/seat.rs)
//! [`Seat`]: the device that a rank computes on, and how it exchanges what is there.
//!
//! (launch/cores.rs)
//! [`Cores`]: the ranks of one machine share its cores, so that their thread pools do not fight for them.

use std::num::NonZero;

use phalanx_tensor::Device;

use crate::comm::{Comm, Error, Result, shares};

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

/// Gives devices pools that together have no more threads than the machine has cores, until it is dropped.
pub(super) struct Cores {
    before: Vec<(Device, usize)>,
}

impl Cores {
    /// Shares `cores` (all there are, if none are named) among `ranks`, each at least one; `devices` are those of
    /// this process, by their rank on this machine.
    pub(super) fn share(
        cores: Option<usize>,
        ranks: usize,
        devices: &[(usize, Device)],
    ) -> phalanx_tensor::Result<Cores> {
        let cores = cores.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, NonZero::get));
        let threads = shares(cores, ranks);
        let mut shared = Cores { before: vec![] };
        for &(rank, device) in devices.iter().filter(|(_, device)| matches!(device, Device::Cpu(_))) {
            let (wanted, now) = (threads[rank].max(1), device.pool()?.threads());
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
