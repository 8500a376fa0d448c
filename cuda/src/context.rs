//! [`Context`]: a logical device's CUDA context and streams. [`GpuEvent`]: a point in a stream's work. [`calls`]: how often a thread
//! has waited for GPUs and asked for memory.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::capture::Capture;
use crate::driver::{self, CUcontext, CUevent, CUstream};
use crate::lane::{self, LaneStream};
use crate::vendor::{DeviceProperties, Failure};
use crate::{Error, Result};

/// A logical device: the context of a GPU, and the streams to which threads give its work.
///
/// Devices are *logical*, as CPUs are in Phalanx: `PHALANX_CUDA_DEVICES=4` makes `cuda:0` to `cuda:3`, dealt out over the GPUs at
/// hand. Each has its own stream and its share of the memory pool. Without the variable there is one device a GPU.
pub struct Context {
    index: u16,
    ordinal: usize,
    handle: CUcontext,
    stream: CUstream,
    properties: DeviceProperties,
    /// Streams of lanes that have ended, for the next lanes.
    pub(crate) idle: Mutex<Vec<LaneStream>>,
    /// The stream on which memory is freed that several streams have used.
    pub(crate) frees: OnceLock<LaneStream>,
    /// Streams that are being captured.
    pub(crate) captures: Mutex<Vec<Capture>>,
    /// Why memory was not freed, the first time.
    pub(crate) refused_free: OnceLock<String>,
    launches: AtomicU64,
    count_memory: fn(u16, isize),
}

// SAFETY: the driver's handles may be used from any thread, and a context is never closed.
unsafe impl Send for Context {}
// SAFETY: as for `Send`; what changes is behind locks.
unsafe impl Sync for Context {}

/// The number of logical devices.
const DEVICES: &str = "PHALANX_CUDA_DEVICES";

thread_local! {
    /// The device whose context is current on this thread.
    static CURRENT: Cell<Option<u16>> = const { Cell::new(None) };
}

impl Context {
    /// Opens `cuda:index`. `count_memory` is called with the index and each change of the device memory in use.
    pub(crate) fn open(index: u16, count_memory: fn(u16, isize)) -> Result<Context> {
        let unsupported = |why| Error::Unsupported { index, why };
        let gpus = driver::count().map_err(unsupported)?;
        let named = std::env::var(DEVICES).ok().map(|text| {
            text.parse::<usize>().map_err(|_| unsupported(format!("{DEVICES}={text:?} is not a number")))
        });
        let devices = named.transpose()?.unwrap_or(gpus);
        if gpus == 0 || usize::from(index) >= devices {
            return Err(unsupported(format!(
                "CUDA devices: {devices}, GPUs: {gpus}; {DEVICES}={} makes as many devices of them",
                usize::from(index) + 1
            )));
        }
        let ordinal = usize::from(index) % gpus;
        let failed = |failure: Failure| unsupported(failure.text);
        let (handle, properties) = driver::open(ordinal).map_err(failed)?;
        CURRENT.set(Some(index));
        connect(ordinal).map_err(failed)?;
        Ok(Context {
            index,
            ordinal,
            handle,
            stream: driver::stream().map_err(failed)?,
            properties,
            idle: Mutex::default(),
            frees: OnceLock::new(),
            captures: Mutex::default(),
            refused_free: OnceLock::new(),
            launches: AtomicU64::new(0),
            count_memory,
        })
    }

    /// The logical device's index.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// The number of the GPU behind it.
    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// What the vendor calls it.
    pub fn name(&self) -> &str {
        &self.properties.name
    }

    /// Its compute capability: major and minor.
    pub fn capability(&self) -> (u32, u32) {
        self.properties.capability
    }

    /// Its streaming multiprocessors. As many blocks run at the same time, times the blocks that fit one.
    pub fn processors(&self) -> u32 {
        self.properties.processors
    }

    /// Shared memory that a block may ask for, in bytes.
    pub fn shared_bytes_max(&self) -> u32 {
        self.properties.shared_bytes_max
    }

    /// Kernels launched so far.
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }

    pub(crate) fn count_launch(&self) {
        self.launches.fetch_add(1, Ordering::Relaxed);
    }

    /// Reports a change of the device memory in use.
    pub(crate) fn count_memory(&self, change: isize) {
        (self.count_memory)(self.index, change);
    }

    /// Waits until all work of this thread's current stream is done.
    pub(crate) fn wait(&self, op: &'static str) -> Result<()> {
        // SAFETY: the stream exists.
        self.called(op, unsafe { driver::synchronize(self.stream()) })
    }

    /// Returns the memory that the driver's pool keeps for later requests.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn trim(&self) -> Result<()> {
        self.called("trim", driver::trim(self.ordinal))
    }

    /// Makes its context current on this thread.
    #[inline]
    pub(crate) fn bind(&self, op: &'static str) -> Result<()> {
        if CURRENT.get() == Some(self.index) {
            return Ok(());
        }
        // SAFETY: the context came from `open`.
        self.called(op, unsafe { driver::set_current(self.handle) })?;
        CURRENT.set(Some(self.index));
        Ok(())
    }

    /// Makes this device's context current on this thread: to be called before a function of another library.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn make_current(&self) -> Result<()> {
        self.bind("make_current")
    }

    pub(crate) fn handle(&self) -> CUcontext {
        self.handle
    }

    /// The stream to which this thread's work goes: the stream of its lane, else the device's own.
    #[inline]
    pub(crate) fn stream(&self) -> CUstream {
        lane::current(self.index).unwrap_or(self.stream)
    }

    /// The handle (`CUstream`) of the stream to which this thread's work goes.
    pub fn stream_handle(&self) -> *mut c_void {
        self.stream().cast()
    }

    /// Calls `f` once the work that this thread has given its current stream so far is done, or has failed. `f` runs on a thread of
    /// the driver, where no CUDA work may be given, waited for or freed; no thread waits meanwhile. If the driver refuses the call,
    /// `f` gets the error at once.
    pub fn when_done(&'static self, f: impl FnOnce(Result<()>) + Send + 'static) {
        let op = "when_done";
        if let Err(error) = self.bind(op) {
            return f(Err(error));
        }
        // SAFETY: the stream exists.
        unsafe { driver::call_back(self.stream(), Box::new(move |outcome| f(self.called(op, outcome)))) };
    }

    /// Maps a failed call to an error.
    #[inline]
    pub(crate) fn called<T>(&self, op: &'static str, outcome: Result<T, Failure>) -> Result<T> {
        outcome.map_err(|failure| self.failed(op, &failure))
    }

    #[cold]
    pub(crate) fn failed(&self, op: &'static str, failure: &Failure) -> Error {
        let index = self.index;
        match failure.is_out_of_memory() {
            true => Error::OutOfMemory { op, index, bytes: 0 },
            false => Error::Failed { op, index, what: failure.text.clone() },
        }
    }
}

/// Lets the GPUs that this process has opened, and this one, use each other's memory.
fn connect(ordinal: usize) -> Result<(), Failure> {
    static OPENED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    let mut opened = lock(&OPENED);
    if !opened.contains(&ordinal) {
        for &other in opened.iter() {
            driver::share_pool(other, ordinal)?;
            driver::share_pool(ordinal, other)?;
        }
        opened.push(ordinal);
    }
    Ok(())
}

/// Locks a mutex, also after a thread has panicked while it held it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let DeviceProperties { name, capability: (major, minor), processors, .. } = &self.properties;
        let index = self.index;
        write!(f, "cuda:{index} ({name}, compute capability {major}.{minor}, {processors} multiprocessors)")
    }
}

/// A point in the work of a stream.
#[derive(Debug)]
pub struct GpuEvent {
    context: &'static Context,
    pub(crate) event: CUevent,
}

// SAFETY: an event's handle may be used from any thread.
unsafe impl Send for GpuEvent {}
// SAFETY: as for `Send`: nothing changes through a shared reference but the driver's own state.
unsafe impl Sync for GpuEvent {}

impl GpuEvent {
    /// Records an event in this thread's current stream.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn record(gpu: &'static Context) -> Result<GpuEvent> {
        GpuEvent::new(gpu, false)
    }

    /// [`GpuEvent::record`] with a time stamp, for [`GpuEvent::milliseconds_to`].
    ///
    /// # Errors
    /// If the device is lost.
    pub fn timed(gpu: &'static Context) -> Result<GpuEvent> {
        GpuEvent::new(gpu, true)
    }

    fn new(context: &'static Context, timing: bool) -> Result<GpuEvent> {
        context.bind("event")?;
        let event = GpuEvent { context, event: context.called("event", driver::event(timing))? };
        // SAFETY: event and stream exist.
        context.called("event", unsafe { driver::record(event.event, context.stream()) })?;
        Ok(event)
    }

    /// Makes the work that this thread gives to `gpu` from now on wait for the event, without blocking the thread.
    ///
    /// # Errors
    /// If a device is lost.
    pub fn order(&self, gpu: &'static Context) -> Result<()> {
        gpu.bind("event")?;
        // SAFETY: stream and event exist.
        gpu.called("event", unsafe { driver::wait(gpu.stream(), self.event) })
    }

    /// [`GpuEvent::order`] for the event's own device.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn order_here(&self) -> Result<()> {
        self.order(self.context)
    }

    /// Whether the work before it has run.
    ///
    /// # Errors
    /// If that work failed.
    pub fn is_done(&self) -> Result<bool> {
        self.context.bind("event")?;
        // SAFETY: the event exists.
        match unsafe { driver::query(self.event) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.is_not_ready() => Ok(false),
            Err(failure) => Err(self.context.failed("event", &failure)),
        }
    }

    /// Blocks until the work before it has run.
    ///
    /// # Errors
    /// If that work failed.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind("event")?;
        count_wait();
        // SAFETY: the event exists.
        self.context.called("event", unsafe { driver::event_synchronize(self.event) })
    }

    /// The time from this event to a later one, both [`GpuEvent::timed`] and done.
    ///
    /// # Errors
    /// If they are not.
    pub fn milliseconds_to(&self, later: &GpuEvent) -> Result<f32> {
        self.context.bind("event")?;
        // SAFETY: both events exist; the driver refuses events without a time stamp.
        self.context.called("event", unsafe { driver::elapsed_ms(self.event, later.event) })
    }
}

impl Drop for GpuEvent {
    fn drop(&mut self) {
        if self.context.bind("event").is_ok() {
            // SAFETY: this was the only owner of the handle; the driver keeps what waiting streams need.
            let _ = unsafe { driver::event_destroy(self.event) };
        }
    }
}

/// What a thread has asked of the driver so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Waits for a GPU's work.
    pub waits: u64,
    /// Allocations of device memory and of pinned memory.
    pub allocations: u64,
}

thread_local! {
    static CALLS: Cell<Calls> = const { Cell::new(Calls { waits: 0, allocations: 0 }) };
}

/// The calls of this thread, so that a test can assert that a step neither waits nor allocates.
pub fn calls() -> Calls {
    CALLS.get()
}

pub(crate) fn count_wait() {
    let calls = CALLS.get();
    CALLS.set(Calls { waits: calls.waits + 1, ..calls });
}

pub(crate) fn count_allocation() {
    let calls = CALLS.get();
    CALLS.set(Calls { allocations: calls.allocations + 1, ..calls });
}
