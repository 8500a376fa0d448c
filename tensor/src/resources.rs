//! What a device owns: its thread pool, caching allocator, memory ledger and GPU. All is made at the device's first use.

use std::sync::{Arc, Mutex, OnceLock, RwLock};

use crate::allocator::Allocator;
use crate::cuda::Gpu;
use crate::sync::{lock, unpoisoned};
use crate::{Device, Error, Ledger, Pool, Result};

/// Logical devices of one kind.
const DEVICES: usize = 1024;
/// Threads of a device at most: more than the cores of any machine, less than a process may start.
const THREADS_MAX: usize = 1024;

static CPUS: [OnceLock<State>; DEVICES] = [const { OnceLock::new() }; DEVICES];
static CUDAS: [OnceLock<State>; DEVICES] = [const { OnceLock::new() }; DEVICES];
static METAS: [OnceLock<State>; DEVICES] = [const { OnceLock::new() }; DEVICES];

/// Everything that a device owns.
pub(crate) struct State {
    pub(crate) ledger: Ledger,
    pub(crate) allocator: Allocator,
    /// Of a CPU device: the storages in pinned memory that wait for their next use.
    pub(crate) pinned: Allocator,
    /// Of a CUDA device.
    pub(crate) gpu: Option<Gpu>,
    pool: RwLock<Arc<Pool>>,
}

impl State {
    fn new(threads: usize, gpu: Option<Gpu>) -> State {
        State {
            ledger: Ledger::default(),
            allocator: Allocator::new(),
            pinned: Allocator::new(),
            gpu,
            pool: RwLock::new(Arc::new(Pool::new(threads))),
        }
    }
}

impl Device {
    #[inline]
    pub(crate) fn state(self) -> Result<&'static State> {
        let (table, index) = self.slot();
        match table.get(usize::from(index)).and_then(OnceLock::get) {
            Some(state) => Ok(state),
            None => self.start(table),
        }
    }

    /// The state of a device that is open; none if it is not. For errors, which may arise while a device is being opened.
    pub(crate) fn opened(self) -> Option<&'static State> {
        let (table, index) = self.slot();
        table.get(usize::from(index)).and_then(OnceLock::get)
    }

    #[inline]
    fn slot(self) -> (&'static [OnceLock<State>], u16) {
        match self {
            Device::Cpu(i) => (&CPUS, i),
            Device::Meta(i) => (&METAS, i),
            Device::Cuda(i) => (&CUDAS, i),
        }
    }

    /// The first use.
    #[cold]
    fn start(self, table: &'static [OnceLock<State>]) -> Result<&'static State> {
        let (Device::Cpu(index) | Device::Cuda(index) | Device::Meta(index)) = self;
        let slot = table.get(usize::from(index));
        let slot = slot.ok_or_else(|| Error::range("device", self, format!("an index below {DEVICES}")))?;
        // The number of cores is asked for once a device: the system call takes longer than a small operation.
        let Device::Cuda(index) = self else {
            let threads = if self.is_meta() { 1 } else { default_threads() };
            return Ok(slot.get_or_init(|| State::new(threads, None)));
        };
        static OPENING: Mutex<()> = Mutex::new(());
        let _one = lock(&OPENING);
        match slot.get() {
            Some(state) => Ok(state),
            None => {
                let gpu = Gpu::open(index)?;
                Ok(slot.get_or_init(|| State::new(1, Some(gpu))))
            }
        }
    }

    /// The GPU behind a CUDA device, opened if it is not yet.
    ///
    /// # Errors
    /// If there is none: which files were looked for. If this is another kind of device.
    #[inline]
    pub fn gpu(self) -> Result<&'static Gpu> {
        let refuse = || Error::Unsupported { op: "gpu", device: self, why: "it is no CUDA device".into() };
        self.state()?.gpu.as_ref().ok_or_else(refuse)
    }

    /// The device's memory ledger.
    ///
    /// # Errors
    /// If the device cannot be used.
    pub fn ledger(self) -> Result<&'static Ledger> {
        Ok(&self.state()?.ledger)
    }

    /// The threads that run this device's operations.
    ///
    /// # Errors
    /// If the device cannot be used.
    pub fn pool(self) -> Result<Arc<Pool>> {
        Ok(unpoisoned(self.state()?.pool.read()).clone())
    }

    /// Gives the device a pool of `threads` threads; operations already running finish on the old one. Results do
    /// not depend on it.
    ///
    /// # Errors
    /// If the device cannot be used, or `threads` is 0 or more than 1024.
    pub fn set_threads(self, threads: usize) -> Result<()> {
        if !(1..=THREADS_MAX).contains(&threads) {
            return Err(Error::range(
                "set_threads",
                format!("{threads} threads"),
                format!("1 to {THREADS_MAX}"),
            ));
        }
        self.state()?; // before threads are started for it
        self.set_pool(Pool::new(threads))
    }

    /// Gives the device another pool, one that several devices share or that has rayon's workers ([`Pool::on_rayon`]);
    /// operations already running finish on the old one. Results do not depend on it.
    ///
    /// # Errors
    /// If the device cannot be used.
    pub fn set_pool(self, pool: impl Into<Arc<Pool>>) -> Result<()> {
        *unpoisoned(self.state()?.pool.write()) = pool.into();
        Ok(())
    }

    /// Returns memory that no tensor uses to the system.
    ///
    /// # Errors
    /// If the device cannot be used.
    pub fn trim(self) -> Result<()> {
        let state = self.state()?;
        state.allocator.trim(&state.ledger);
        state.pinned.trim(&state.ledger);
        state.gpu.as_ref().map_or(Ok(()), |gpu| gpu.trim()).map_err(Error::of_gpu)
    }

    /// Waits until all work given to the device by this thread is done. Only a GPU's work outlives its call.
    ///
    /// # Errors
    /// If the device cannot be used, or what its work has reported.
    pub fn synchronize(self) -> Result<()> {
        self.state()?.gpu.as_ref().map_or(Ok(()), Gpu::synchronize)
    }
}

/// The cores this process may use.
fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(THREADS_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_beyond_all_reason_are_refused() {
        assert!(Device::Cpu(5000).ledger().is_err());
    }

    #[test]
    fn threads_beyond_all_reason_are_refused() {
        for threads in [0, 1025, 20000, usize::MAX] {
            let message = Device::Cpu(9).set_threads(threads).unwrap_err().to_string();
            assert!(message.contains(&threads.to_string()) && message.contains("1 to 1024"), "{message}");
        }
    }
}
