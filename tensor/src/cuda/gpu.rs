//! [`Gpu`]: what a CUDA device owns beside its ledger: a context, streams, compiled kernels.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::GpuEvent;
use super::calls::count_wait;
use super::driver::{self, CUcontext, CUstream, Failure};
use super::fault::Faults;
use super::kernel::Kernels;
use super::memory::DeviceBlock;
use super::product::Engine;
use super::quiet::{Gate, gate};
use super::upload::Uploads;
use crate::{Device, Error, Result};

/// A CUDA device, open for as long as the process lives.
///
/// Devices are *logical*, as on the CPU: `PHALANX_CUDA_DEVICES=4` makes `cuda:0` to `cuda:3`, dealt out over the GPUs at
/// hand, each with its own stream, ledger and memory pool's share; without it there is one device a GPU.
pub struct Gpu {
    device: Device,
    ordinal: usize,
    context: CUcontext,
    stream: CUstream,
    about: About,
    /// Streams of lanes that have ended, for the next ones.
    idle: Mutex<Vec<Lane>>,
    pub(super) kernels: Kernels,
    pub(super) faults: OnceLock<Faults>,
    pub(super) products: OnceLock<Engine>,
    pub(super) gate: Arc<Gate<GpuEvent>>,
    pub(super) uploads: Uploads,
    launches: AtomicU64,
}

/// A stream that a lane borrows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Lane(pub(super) CUstream);

// SAFETY: the driver's handles may be used from any thread, and a `Gpu` is never closed.
unsafe impl Send for Gpu {}
// SAFETY: as for `Send`; what changes is behind locks.
unsafe impl Sync for Gpu {}
// SAFETY: a stream's handle may be used from any thread.
unsafe impl Send for Lane {}

/// What a GPU is.
#[derive(Clone, Debug)]
struct About {
    name: String,
    capability: (u32, u32),
    processors: u32,
    shared_bytes_max: u32,
}

/// How many logical devices there shall be.
const DEVICES: &str = "PHALANX_CUDA_DEVICES";

thread_local! {
    /// The device whose context is current on this thread.
    static CURRENT: Cell<Option<Device>> = const { Cell::new(None) };
    /// The stream of the lane whose thread this is.
    static LANE: Cell<Option<(Device, Lane)>> = const { Cell::new(None) };
}

impl Gpu {
    /// Opens `cuda:index`.
    pub(crate) fn open(index: u16) -> Result<Gpu> {
        let device = Device::Cuda(index);
        let unsupported = |why| Error::Unsupported { op: "device", device, why };
        let gpus = driver::count().map_err(unsupported)?;
        let named = std::env::var(DEVICES).ok().map(|text| {
            text.parse::<usize>().map_err(|_| unsupported(format!("{DEVICES}={text:?} is not a number")))
        });
        let devices = named.transpose()?.unwrap_or(gpus);
        if gpus == 0 || usize::from(index) >= devices {
            return Err(unsupported(format!("there are {devices} CUDA devices on {gpus} GPUs")));
        }
        let ordinal = usize::from(index) % gpus;
        let failed = |failure: Failure| unsupported(failure.text);
        let driver::About { context, name, capability, processors, shared_bytes_max } =
            driver::open(ordinal).map_err(failed)?;
        CURRENT.set(Some(device));
        connect(ordinal).map_err(failed)?;
        Ok(Gpu {
            device,
            ordinal,
            context,
            stream: driver::stream().map_err(failed)?,
            about: About { name, capability, processors, shared_bytes_max },
            idle: Mutex::default(),
            kernels: Kernels::default(),
            faults: OnceLock::new(),
            products: OnceLock::new(),
            gate: gate(ordinal),
            uploads: Uploads::default(),
            launches: AtomicU64::new(0),
        })
    }

    /// The device that it serves.
    pub fn device(&self) -> Device {
        self.device
    }

    /// What the vendor calls it.
    pub fn name(&self) -> &str {
        &self.about.name
    }

    /// Its compute capability: major and minor.
    pub fn capability(&self) -> (u32, u32) {
        self.about.capability
    }

    /// Its streaming multiprocessors: how many blocks can run at the same time, times those that fit one.
    pub fn processors(&self) -> u32 {
        self.about.processors
    }

    /// Shared memory that a block may ask for, in bytes.
    pub fn shared_bytes_max(&self) -> u32 {
        self.about.shared_bytes_max
    }

    /// Kernels launched so far.
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }

    /// Waits until all work of this thread's current stream is done.
    ///
    /// # Errors
    /// What kernels or the driver found wrong since the last time.
    pub fn synchronize(&'static self) -> Result<()> {
        self.bind("synchronize")?;
        count_wait();
        // SAFETY: the stream exists.
        self.called("synchronize", unsafe { driver::synchronize(self.stream()) })?;
        self.check_faults()
    }

    /// Bytes that the device's memory has free, and has in all, are the driver's to tell; what waits in its pool is
    /// returned to it here.
    pub(crate) fn trim(&self) -> Result<()> {
        self.called("trim", driver::trim(self.ordinal))
    }

    /// `bytes` of its memory, ordered by the current stream.
    pub(crate) fn allocate(&'static self, op: &'static str, bytes: usize) -> Result<DeviceBlock> {
        DeviceBlock::obtain(op, bytes, self)
    }

    /// Makes its context this thread's.
    #[inline]
    pub(super) fn bind(&self, op: &'static str) -> Result<()> {
        if CURRENT.get() == Some(self.device) {
            return Ok(());
        }
        // SAFETY: the context came from `open`.
        self.called(op, unsafe { driver::set_current(self.context) })?;
        CURRENT.set(Some(self.device));
        Ok(())
    }

    pub(super) fn context(&self) -> CUcontext {
        self.context
    }

    /// Whether both are the same physical GPU.
    pub(super) fn shares_gpu(&self, other: &Gpu) -> bool {
        self.ordinal == other.ordinal
    }

    /// Where this thread's work goes: its lane's stream, else the device's own.
    #[inline]
    pub(super) fn stream(&self) -> CUstream {
        match LANE.get() {
            Some((device, lane)) if device == self.device => lane.0,
            _ => self.stream,
        }
    }

    /// Makes this thread a lane with a stream of its own, until [`Gpu::leave_lane`].
    pub(super) fn enter_lane(&self) -> Result<()> {
        self.bind("stream")?;
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let lane = match idle {
            Some(lane) => lane,
            None => Lane(self.called("stream", driver::stream())?),
        };
        LANE.set(Some((self.device, lane)));
        Ok(())
    }

    /// Gives the lane's stream back. Memory may still be freed in its order, so streams are never destroyed.
    pub(super) fn leave_lane(&self) {
        if let Some((_, lane)) = LANE.take() {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
        }
    }

    pub(super) fn count_launch(&self) {
        self.launches.fetch_add(1, Ordering::Relaxed);
    }

    /// A call's outcome as this crate's.
    #[inline]
    pub(super) fn called<T>(&self, op: &'static str, outcome: Result<T, Failure>) -> Result<T> {
        outcome.map_err(|failure| self.failed(op, &failure))
    }

    #[cold]
    pub(super) fn failed(&self, op: &'static str, failure: &Failure) -> Error {
        match failure.is_out_of_memory() {
            true => Error::out_of_memory(op, self.device, 0),
            false => Error::Gpu { op, device: self.device, what: failure.text.clone() },
        }
    }
}

/// Lets the GPUs that this process has opened, and this one, use each other's memory.
fn connect(ordinal: usize) -> Result<(), Failure> {
    static OPENED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if !opened.contains(&ordinal) {
        for &other in opened.iter() {
            driver::share_pool(other, ordinal)?;
            driver::share_pool(ordinal, other)?;
        }
        opened.push(ordinal);
    }
    Ok(())
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let About { name, capability: (major, minor), processors, .. } = &self.about;
        write!(
            f,
            "{} ({name}, compute capability {major}.{minor}, {processors} multiprocessors)",
            self.device
        )
    }
}
