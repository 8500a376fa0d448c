//! [`Cores`]: the ranks of one machine share its cores, so that their thread pools do not fight for them.

use std::num::NonZero;

use phalanx_tensor::Device;

use crate::comm::shares;

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
