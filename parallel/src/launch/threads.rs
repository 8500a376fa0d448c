//! [`threads`]: ranks as threads of this process, which exchange tensors directly ([`crate::comm::threads`]).

use std::fmt::Display;
use std::sync::Mutex;
use std::time::Duration;

use phalanx_tensor::{Context, Device, unpoisoned};

use super::devices::{Cores, RankDevices};
use super::{Rank, TIMEOUT};
use crate::catch_panic::catch_panic;
use crate::comm::threads::{World, member};
use crate::comm::{Error, Result};

/// Runs `f` on `ranks` threads, each with a device of its own, and returns their results in order.
///
/// # Errors
/// The first error or panic of a rank, or the error it led to. No thread is left behind.
pub fn threads<T: Send, E: Display>(ranks: usize, f: impl Fn(Rank) -> Result<T, E> + Sync) -> Result<Vec<T>> {
    Threads::new(ranks).run(f)
}

/// How ranks are started as threads.
#[derive(Clone, Copy, Debug)]
pub struct Threads {
    ranks: usize,
    timeout: Duration,
    cores: Option<usize>,
    devices: RankDevices,
}

impl Threads {
    /// This many.
    pub fn new(ranks: usize) -> Threads {
        Threads { ranks, timeout: TIMEOUT, cores: None, devices: RankDevices::Cpu }
    }

    /// How long a rank waits for others ([`TIMEOUT`] unless set).
    pub fn timeout(mut self, timeout: Duration) -> Threads {
        self.timeout = timeout;
        self
    }

    /// The cores that the ranks' thread pools share (all unless set).
    pub fn cores(mut self, cores: usize) -> Threads {
        self.cores = Some(cores);
        self
    }

    /// Ranks on `meta` devices instead of CPUs.
    pub fn meta(mut self) -> Threads {
        self.devices = RankDevices::Meta;
        self
    }

    /// Rank `i` on `cuda:i`. Tensors there are exchanged by way of the host's memory.
    pub fn cuda(mut self) -> Threads {
        self.devices = RankDevices::Cuda;
        self
    }

    /// Rank `i` on `cuda:i`. Tensors there are exchanged over NCCL.
    #[cfg(feature = "nccl")]
    pub fn nccl(mut self, config: crate::comm::NcclConfig) -> Threads {
        self.devices = RankDevices::Nccl(config);
        self
    }

    /// Runs `f` on every rank, in the caller's [`Context`].
    ///
    /// # Errors
    /// As [`threads`].
    pub fn run<T: Send, E: Display>(self, f: impl Fn(Rank) -> Result<T, E> + Sync) -> Result<Vec<T>> {
        let results: Vec<Mutex<Option<T>>> = (0..self.ranks).map(|_| Mutex::default()).collect();
        self.run_all(&|rank| {
            let slot = &results[rank.rank()];
            *unpoisoned(slot.lock()) = Some(f(rank).map_err(|error| error.to_string())?);
            Ok(())
        })?;
        let result = |slot: Mutex<Option<T>>| unpoisoned(slot.into_inner());
        Ok(results.into_iter().filter_map(result).collect())
    }

    /// [`Threads::run`], compiled once, whatever a rank returns.
    fn run_all(self, f: &(dyn Fn(Rank) -> Result<(), String> + Sync)) -> Result<()> {
        let devices: Vec<Device> =
            (0..self.ranks).map(|rank| self.devices.device(rank)).collect::<Result<_>>()?;
        devices.iter().try_for_each(|device| self.devices.check(*device))?;
        let numbered: Vec<_> = devices.iter().copied().enumerate().collect();
        let _cores = Cores::divide(self.cores, self.ranks, &numbered)?;
        let world = World::new(self.ranks, self.timeout);
        let context = Context::current();
        let work = |rank: usize| {
            let _context = context.enter();
            let control = member(&world, rank);
            let outcome = catch_panic(|| self.devices.join(&control, devices[rank]));
            let outcome = outcome.map_err(|cause| control.fail(&cause)).ok().and_then(|(comm, session)| {
                let outcome = catch_panic(|| f(Rank::new(comm, devices[rank], 0..self.ranks)));
                let outcome = outcome.map_err(|cause| control.fail(&cause)).ok();
                session.leave();
                outcome
            });
            world.end(rank);
            outcome
        };
        let results: Vec<Option<()>> = std::thread::scope(|scope| {
            let spawn = |rank| {
                let builder = std::thread::Builder::new().name(format!("rank {rank}"));
                let spawned = builder.spawn_scoped(scope, move || work(rank));
                spawned.map_err(|e| world.fail(Error::Launch(format!("no thread for rank {rank}: {e}")))).ok()
            };
            let threads: Vec<_> = (0..self.ranks).map(spawn).collect();
            threads.into_iter().map(|thread| thread?.join().ok()?).collect()
        });
        match world.failure() {
            Some(failure) => Err(failure),
            None if results.contains(&None) => Err(Error::Launch("a rank ended without a result".into())),
            None => Ok(()),
        }
    }
}
