//! CUDA devices for tensors. The crate `phalanx-cuda` drives the GPU on addresses and sizes; this module ties tensors to it.
//!
//! Every operation of a thread goes to its *current stream*: the device's own, or the stream of the lane ([`crate::Stream`]) whose
//! thread it is. Lanes wait for each other through events, as on every other device.
//!
//! ```text
//! mod      Gpu, Kernel, GpuEvent, Graph: their namesakes of phalanx-cuda, with this crate's errors, ledger and random step
//! args     the arguments of a launch, which hold guards on tensors; scratch memory; addresses for other libraries
//! copy     elements to, from and on GPUs; views made contiguous; numbers that are read late
//! clock    when a device comes to a point in its work
//! product  matrix products of tensors by cuBLASLt
//! ```
#![allow(unsafe_code)]

mod args;
mod clock;
mod copy;
mod product;

use std::ops::{Deref, DerefMut};

use crate::{Context, Device, Error, Result};

pub use args::{Args, DevicePointer, Scratch};
pub use clock::{GpuClock, Moment};
pub use copy::Readback;
pub use phalanx_cuda::{
    Boxes, Calls, ChromeTrace, CollectiveGuard, Doctor, DryLog, FAULT, Grid, Image, KernelSource, Library,
    LoggedOperation, Program, Span, Target, Traffic, Version, Work, calls, compile, compile_key, compiled,
    doctor, driver_name, emulated, nccl_lacks, require, start_trace, take_dry_log, take_trace, version,
};
/// The bindings to the CUDA libraries, for crates that call more of them than this one does.
#[cfg(feature = "cuda")]
pub use phalanx_cuda::{cudarc, symbol};
pub use product::{Epilogue, Matrices, Products, multiply};

pub(crate) use copy::{copy_strided, zero};
pub(crate) use phalanx_cuda::DeviceBlock;

/// A CUDA device, open for as long as the process lives. [`Device::gpu`] gives it.
///
/// Devices are *logical*, as on the CPU: `PHALANX_CUDA_DEVICES=4` makes `cuda:0` to `cuda:3`, dealt out over the GPUs at
/// hand, each with its own stream, ledger and share of the memory pool. Without the variable there is one device a GPU.
pub struct Gpu(phalanx_cuda::Gpu);

impl Deref for Gpu {
    type Target = phalanx_cuda::Gpu;

    #[inline]
    fn deref(&self) -> &phalanx_cuda::Gpu {
        &self.0
    }
}

macro_rules! debug_as_inner {
    ($($name:ident)*) => {$(
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

debug_as_inner!(Gpu Pinned Graph);

impl Gpu {
    /// Opens `cuda:index`.
    pub(crate) fn open(index: u16) -> Result<Gpu> {
        phalanx_cuda::Gpu::open(index, count_memory).map(Gpu).map_err(Error::of_gpu)
    }

    /// The device that it serves.
    pub fn device(&self) -> Device {
        Device::Cuda(self.index())
    }

    /// Waits until all work of this thread's current stream is done.
    ///
    /// # Errors
    /// What kernels or the driver found wrong since the last time.
    pub fn synchronize(&'static self) -> Result<()> {
        self.0.synchronize().map_err(Error::of_gpu)
    }

    /// Calls `f` once the work that this thread has given its current stream so far is done, or has failed. `f` runs on a thread of
    /// the driver, where no CUDA work may be given, waited for or freed; no thread waits meanwhile.
    pub fn when_done(&'static self, f: impl FnOnce(Result<()>) + Send + 'static) {
        self.0.when_done(move |outcome| f(outcome.map_err(Error::of_gpu)));
    }

    /// Makes this device's context current on this thread: to be called before a function of another library.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn make_current(&self) -> Result<()> {
        self.0.make_current().map_err(Error::of_gpu)
    }

    /// Calls `queue`, which gives `work` to this thread's current stream, and times the work if a trace is under way.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn traced<T>(&'static self, op: &'static str, work: Work, queue: impl FnOnce() -> T) -> Result<T> {
        self.0.traced(op, work, || Ok(queue())).map_err(Error::of_gpu)
    }

    /// A program's kernel `entry`, compiled for this device and loaded if it is not yet.
    ///
    /// # Errors
    /// If there is no compiler, or the program is wrong: what the compiler says.
    pub fn kernel(&'static self, op: &'static str, program: &Program<'_>, entry: &str) -> Result<Kernel> {
        self.0.kernel(op, program, entry).map(Kernel).map_err(Error::of_gpu)
    }

    /// Announces a collective: work of this thread's stream that does not end before other GPUs have come to theirs. Until the guard is
    /// dropped and that work has ended, nothing is loaded into the GPU, so the thread must not use a kernel for the first time.
    pub fn enter_collective(&'static self) -> CollectiveGuard {
        self.0.enter_collective()
    }
}

/// Counts memory that a device has obtained from its driver, or returned.
fn count_memory(index: u16, change: isize) {
    let Ok(ledger) = Device::Cuda(index).ledger() else { return };
    match usize::try_from(change) {
        Ok(bytes) => ledger.obtained_add(bytes),
        Err(_) => ledger.obtained_sub(change.unsigned_abs()),
    }
}

/// A compiled kernel on a device.
#[derive(Clone, Copy)]
pub struct Kernel(phalanx_cuda::Kernel);

impl Kernel {
    /// Runs it on this thread's current stream. The arguments must be those that the kernel takes, in its order.
    ///
    /// # Errors
    /// If the grid is beyond the device's limits, or the device is lost.
    pub fn launch(&self, grid: Grid, mut args: Args<'_>) -> Result<()> {
        let op = args.op();
        // SAFETY: the tensors that the arguments point to are locked until the launch is queued, and freed in the order of their
        // stream; the driver refuses arguments of another size than the kernel's.
        unsafe { self.0.launch(op, grid, args.packed()) }.map_err(Error::of_gpu)
    }
}

/// A point in the work of one of a GPU's streams.
#[derive(Debug)]
pub struct GpuEvent(phalanx_cuda::GpuEvent);

impl GpuEvent {
    /// Records an event in this thread's current stream.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn record(gpu: &'static Gpu) -> Result<GpuEvent> {
        phalanx_cuda::GpuEvent::record(gpu).map(GpuEvent).map_err(Error::of_gpu)
    }

    /// [`GpuEvent::record`] with a time stamp, for [`GpuEvent::milliseconds_to`].
    ///
    /// # Errors
    /// If the device is lost.
    pub fn timed(gpu: &'static Gpu) -> Result<GpuEvent> {
        phalanx_cuda::GpuEvent::timed(gpu).map(GpuEvent).map_err(Error::of_gpu)
    }

    /// Makes the work that this thread gives to `gpu` from now on wait for the event, without blocking the thread.
    ///
    /// # Errors
    /// If a device is lost.
    pub fn order(&self, gpu: &'static Gpu) -> Result<()> {
        self.0.order(gpu).map_err(Error::of_gpu)
    }

    pub(crate) fn into_inner(self) -> phalanx_cuda::GpuEvent {
        self.0
    }

    /// [`GpuEvent::order`] for the event's own device.
    pub(crate) fn order_here(&self) -> Result<()> {
        self.0.order_here().map_err(Error::of_gpu)
    }

    /// Whether the work before it has run.
    ///
    /// # Errors
    /// If that work failed.
    pub fn is_done(&self) -> Result<bool> {
        self.0.is_done().map_err(Error::of_gpu)
    }

    /// Blocks until the work before it has run.
    ///
    /// # Errors
    /// If that work failed.
    pub fn synchronize(&self) -> Result<()> {
        self.0.synchronize().map_err(Error::of_gpu)
    }

    /// The time from this event to a later one, both [`GpuEvent::timed`] and done.
    ///
    /// # Errors
    /// If they are not.
    pub fn milliseconds_to(&self, later: &GpuEvent) -> Result<f32> {
        self.0.milliseconds_to(&later.0).map_err(Error::of_gpu)
    }
}

/// Host memory that a GPU reads and writes without the driver's help, so that a copy runs beside other work.
pub struct Pinned(phalanx_cuda::Pinned);

impl Pinned {
    /// `bytes` zeros.
    ///
    /// # Errors
    /// If the system has no more memory that can be pinned.
    pub fn zeros(gpu: &'static Gpu, bytes: usize) -> Result<Pinned> {
        phalanx_cuda::Pinned::zeros(gpu, bytes).map(Pinned).map_err(Error::of_gpu)
    }
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Work of one device, ready to run again: the same kernels on the same memory. Tensors that the work reads or writes and
/// did not make must stay; the memory of tensors that it made and dropped belongs to the graph.
///
/// Numbers that were given to kernels are those of the capture, but for the step of random draws: it is in the device's
/// memory, where each launch puts its own.
pub struct Graph(phalanx_cuda::Graph, Device);

impl Graph {
    /// Captures what `work` gives to `device` on this thread instead of running it. Nothing may wait for the device
    /// meanwhile, and nothing may be compiled: run the work once before.
    ///
    /// # Errors
    /// If `work` fails or does what cannot be captured, or `device` is no GPU.
    pub fn capture(device: Device, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        // The capture cannot wait.
        device.await_arrivals("capture")?;
        let graph = phalanx_cuda::Graph::capture(device.gpu()?, Context::current().rng.step, work);
        Ok(Graph(graph.map_err(Error::of_gpu)??, device))
    }

    /// Runs it on this thread's current stream, its random draws being those of `step`, after all values that are on their way to tensors
    /// of the device ([`Tensor::arriving`](crate::Tensor::arriving)).
    ///
    /// # Errors
    /// If the device is lost, or such values do not come.
    pub fn launch(&mut self, step: u64) -> Result<()> {
        self.1.await_arrivals("launch")?;
        self.0.launch(step).map_err(Error::of_gpu)
    }
}

#[allow(missing_docs)]
#[deprecated(since = "0.1.0", note = "renamed to `CollectiveGuard`")]
pub type Meeting = CollectiveGuard;

#[allow(missing_docs)]
#[deprecated(since = "0.1.0", note = "renamed to `Epilogue`")]
pub type Sums<'a> = Epilogue<'a>;

impl Gpu {
    #[allow(missing_docs)]
    #[deprecated(since = "0.1.0", note = "renamed to `enter_collective`")]
    pub fn meet(&'static self) -> CollectiveGuard {
        self.enter_collective()
    }
}
