//! [`threads`]: ranks as threads of this process.

use std::fmt::Display;
use std::time::Duration;

use phalanx_tensor::{Context, Device};

use super::cores::Cores;
use super::{Rank, TIMEOUT, caught::caught};
use crate::comm::threads::{World, member};
use crate::comm::{Error, Result};

/// Runs `f` on `ranks` threads, each with a device of its own, and returns their results in order.
///
/// # Errors
/// What went wrong first: a rank's error or panic, or what it led to. No thread is left behind.
pub fn threads<T: Send, E: Display>(ranks: usize, f: impl Fn(Rank) -> Result<T, E> + Sync) -> Result<Vec<T>> {
    Threads::new(ranks).run(f)
}

/// How ranks are started as threads.
#[derive(Clone, Copy, Debug)]
pub struct Threads {
    ranks: usize,
    timeout: Duration,
    cores: Option<usize>,
    meta: bool,
}

impl Threads {
    /// This many.
    pub fn new(ranks: usize) -> Threads {
        Threads { ranks, timeout: TIMEOUT, cores: None, meta: false }
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
        self.meta = true;
        self
    }

    /// Runs `f` on every rank, in the caller's [`Context`].
    ///
    /// # Errors
    /// As [`threads`].
    pub fn run<T: Send, E: Display>(self, f: impl Fn(Rank) -> Result<T, E> + Sync) -> Result<Vec<T>> {
        let device = |rank: usize| {
            let index =
                u16::try_from(rank).map_err(|_| Error::Launch(format!("got {} ranks", self.ranks)))?;
            Ok(if self.meta { Device::Meta(index) } else { Device::Cpu(index) })
        };
        let devices: Vec<Device> = (0..self.ranks).map(device).collect::<Result<_>>()?;
        let numbered: Vec<_> = devices.iter().copied().enumerate().collect();
        let _cores = Cores::share(self.cores, self.ranks, &numbered)?;
        let world = World::new(self.ranks, self.timeout);
        let context = Context::current();
        let work = |rank: usize| {
            let _context = context.enter();
            let me = Rank::new(member(&world, rank), devices[rank]);
            let outcome = caught(|| f(me.clone()));
            let outcome = outcome.map_err(|cause| me.fail(&cause)).ok();
            world.end(rank);
            outcome
        };
        let results: Vec<Option<T>> = std::thread::scope(|scope| {
            let spawn = |rank| {
                let builder = std::thread::Builder::new().name(format!("rank {rank}"));
                let spawned = builder.spawn_scoped(scope, move || work(rank));
                spawned.map_err(|e| world.fail(Error::Launch(format!("no thread for rank {rank}: {e}")))).ok()
            };
            let threads: Vec<_> = (0..self.ranks).map(spawn).collect();
            threads.into_iter().map(|thread| thread?.join().ok()?).collect()
        });
        let failed =
            || world.failure().unwrap_or_else(|| Error::Launch("a rank ended without a result".into()));
        let results: Option<Vec<T>> = results.into_iter().collect();
        match world.failure() {
            None => results.ok_or_else(failed),
            Some(failure) => Err(failure),
        }
    }
}
