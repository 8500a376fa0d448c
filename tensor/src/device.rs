//! [`Device`]: a CPU, a CUDA device or `meta`, with its thread pool, caching allocator and memory ledger.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use crate::allocator::Allocator;
use crate::cuda::Gpu;
use crate::sync::lock;
use crate::{Error, Ledger, Pool, Result};

/// Where a tensor lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// A *logical* CPU device: a thread pool, an allocator and a ledger of its own. Tensors of different logical
    /// devices do not mix, exactly as on different GPUs, so a missing copy shows up on a laptop.
    Cpu(u16),
    /// An NVIDIA GPU.
    Cuda(u16),
    /// Shapes, dtypes and the ledger, without bytes and arithmetic.
    Meta(u16),
}

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
    /// Of a CUDA device.
    pub(crate) gpu: Option<Gpu>,
    pool: RwLock<Arc<Pool>>,
}

impl State {
    fn new(threads: usize, gpu: Option<Gpu>) -> State {
        State {
            ledger: Ledger::default(),
            allocator: Allocator::new(),
            gpu,
            pool: RwLock::new(Arc::new(Pool::new(threads))),
        }
    }
}

impl Device {
    /// The device that programs use when they name none.
    pub const CPU: Device = Device::Cpu(0);

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
        Ok(self.state()?.pool.read().unwrap_or_else(PoisonError::into_inner).clone())
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
        *self.state()?.pool.write().unwrap_or_else(PoisonError::into_inner) = pool.into();
        Ok(())
    }

    /// Returns memory that no tensor uses to the system.
    ///
    /// # Errors
    /// If the device cannot be used.
    pub fn trim(self) -> Result<()> {
        let state = self.state()?;
        state.allocator.trim(&state.ledger);
        state.gpu.as_ref().map_or(Ok(()), |gpu| gpu.trim()).map_err(Error::of_gpu)
    }

    /// The device for a few numbers that the host reads about tensors of this one: itself if it is a CPU, else `cpu:0`.
    pub fn host(self) -> Device {
        if let Device::Cpu(_) = self { self } else { Device::CPU }
    }

    /// Waits until all work given to the device by this thread is done. Only a GPU's work outlives its call.
    ///
    /// # Errors
    /// If the device cannot be used, or what its work has reported.
    pub fn synchronize(self) -> Result<()> {
        self.state()?.gpu.as_ref().map_or(Ok(()), Gpu::synchronize)
    }

    /// Whether tensors here are a GPU's, whose elements the host cannot touch.
    #[inline]
    pub fn is_cuda(self) -> bool {
        matches!(self, Device::Cuda(_))
    }

    /// Whether tensors here have no elements.
    #[inline]
    pub fn is_meta(self) -> bool {
        matches!(self, Device::Meta(_))
    }
}

/// The cores this process may use.
fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(THREADS_MAX))
}

impl Default for Device {
    fn default() -> Device {
        Device::CPU
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu(i) => write!(f, "cpu:{i}"),
            Device::Cuda(i) => write!(f, "cuda:{i}"),
            Device::Meta(i) => write!(f, "meta:{i}"),
        }
    }
}

impl std::str::FromStr for Device {
    type Err = Error;

    /// `cpu`, `cuda`, `meta`, each with an optional `:index`.
    fn from_str(text: &str) -> Result<Device> {
        let (kind, index) = text.split_once(':').unwrap_or((text, "0"));
        let wrong = || {
            Error::invalid(
                "device",
                format!("got {text:?}, wanted cpu, cuda or meta, with :INDEX or without"),
            )
        };
        let index = index.parse().map_err(|_| wrong())?;
        match kind {
            "cpu" => Ok(Device::Cpu(index)),
            "cuda" => Ok(Device::Cuda(index)),
            "meta" => Ok(Device::Meta(index)),
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_bad_ones_say_what_was_wanted() {
        for device in [Device::Cpu(0), Device::Cuda(3), Device::Meta(7)] {
            assert_eq!(device.to_string().parse::<Device>().unwrap(), device);
        }
        assert_eq!("cpu".parse::<Device>().unwrap(), Device::CPU);
        assert!("gpu".parse::<Device>().unwrap_err().to_string().contains("cpu, cuda or meta"));
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
