//! [`Gpu`]: a logical CUDA device with all that belongs to it. [`Graph`]: work that is captured once and launched again whole, without the
//! host's time for each kernel. [`Readback`]: results that are copied to the host while it goes on.
#![allow(unsafe_code)]

use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use crate::Result;
use crate::context::{Context, GpuEvent, count_wait};
use crate::cublaslt::{CublasLt, PlannedProduct};
use crate::driver::{self, CUgraphExec};
use crate::fault::{Faults, RECORD_BYTES};
use crate::kernel::{Kernel, Kernels};
use crate::load_gate::{CollectiveGuard, LoadGate, load_gate};
use crate::memory::{DeviceBlock, Pinned, Uploads, take_constants};
use crate::product::{ProductForm, ProductPointers};
use crate::program::Program;
use crate::trace::{Work, start_as_asked};

/// A logical CUDA device, open for as long as the process lives: its [`Context`], loaded kernels, fault record, pinned memory for
/// uploads and plans of matrix products.
pub struct Gpu {
    context: Context,
    kernels: Kernels,
    faults: Faults,
    products: CublasLt,
    gate: Arc<LoadGate>,
    uploads: Uploads,
}

impl Deref for Gpu {
    type Target = Context;

    #[inline]
    fn deref(&self) -> &Context {
        &self.context
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.context.fmt(f)
    }
}

impl Gpu {
    /// Opens `cuda:index`. `count_memory` is called with the index and each change of the device memory in use, in bytes.
    ///
    /// # Errors
    /// If there is no such device: which files were looked for, or how many devices there are.
    pub fn open(index: u16, count_memory: fn(u16, isize)) -> Result<Gpu> {
        let context = Context::open(index, count_memory)?;
        let gate = load_gate(context.ordinal());
        let (kernels, faults, products, uploads) = Default::default();
        start_as_asked();
        Ok(Gpu { context, kernels, faults, products, gate, uploads })
    }

    /// Waits until all work of this thread's current stream is done.
    ///
    /// # Errors
    /// An error that a kernel or the driver has reported since the last wait.
    pub fn synchronize(&'static self) -> Result<()> {
        self.bind("synchronize")?;
        count_wait();
        self.wait("synchronize")?;
        self.check_faults()
    }

    /// Takes the report of a kernel whose stream was waited for.
    ///
    /// # Errors
    /// That report.
    pub fn check_faults(&'static self) -> Result<()> {
        self.faults.check(&self.context)
    }

    /// The address of the fault record and the code of `op` there: a kernel's arguments `Faults* faults, unsigned code`.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn fault_code(&'static self, op: &'static str) -> Result<(u64, u32)> {
        self.faults.code(&self.context, op)
    }

    /// Copies device memory to the host, as [`Context::copy_to_host`], and counts the wait.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Safety
    /// There is as much memory at `from`.
    pub unsafe fn download(&'static self, op: &'static str, to: &mut [u8], from: u64) -> Result<()> {
        count_wait();
        // SAFETY: by the caller.
        unsafe { self.copy_to_host(op, to, from) }
    }

    /// Copies bytes of the host to `to`, in the order of this thread's current stream. They may change once this returns.
    ///
    /// # Errors
    /// If the device is lost, or memory cannot be pinned.
    ///
    /// # Safety
    /// There is as much memory at `to`, and it lives until the stream has come so far.
    pub unsafe fn upload(&'static self, op: &'static str, to: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.uploads.copy(&self.context, op, to, bytes) }
    }

    /// Copies pinned memory to `to`, in the order of this thread's current stream.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Safety
    /// There is as much memory at `to`; both live, and the bytes stay as they are, until the stream has come so far.
    pub unsafe fn upload_pinned(&'static self, op: &'static str, to: u64, bytes: &[u8]) -> Result<()> {
        self.context.bind(op)?;
        // SAFETY: by the caller.
        unsafe { self.copy_from_host(op, to, bytes) }
    }

    /// Whether this thread captures a graph.
    pub fn is_capturing(&self) -> bool {
        crate::capture::is_capturing()
    }

    /// A program's kernel `entry`, compiled for this device and loaded if it is not yet.
    ///
    /// # Errors
    /// If there is no compiler, or the program is wrong: what the compiler says.
    pub fn kernel(&'static self, op: &'static str, program: &Program<'_>, entry: &str) -> Result<Kernel> {
        self.kernels.get(&self.context, &self.gate, op, program, entry)
    }

    /// Announces a collective: work of this thread's stream that does not end before other GPUs have come to theirs. Until the guard is
    /// dropped and that work has ended, nothing is loaded into the GPU, so the thread must not use a kernel for the first time.
    pub fn enter_collective(&'static self) -> CollectiveGuard {
        CollectiveGuard::new(&self.context, &self.gate)
    }

    /// How cuBLASLt computes products of a form, such as the one at these addresses. None if the library is not there or does not do
    /// them.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn plan_product(
        &'static self,
        op: &'static str,
        form: &ProductForm,
        at: &ProductPointers,
    ) -> Result<Option<Arc<PlannedProduct>>> {
        self.products.plan(&self.context, &self.gate, op, form, at)
    }

    /// Computes a product.
    ///
    /// # Errors
    /// If the device is lost or has no memory for the algorithm to work in.
    ///
    /// # Safety
    /// The plan came from this device's [`Gpu::plan_product`]. The matrices lie at the addresses as the form says, and stay until the
    /// stream has come so far.
    pub unsafe fn multiply(
        &'static self,
        op: &'static str,
        planned: &PlannedProduct,
        at: ProductPointers,
    ) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.products.multiply(&self.context, &self.gate, op, planned, at) }
    }
}

/// Work of one device, ready to run again: the same kernels on the same memory. Memory that the work uses and did not allocate must
/// stay. Memory that it allocated and freed belongs to the graph.
///
/// Arguments of kernels are those of the capture, except for the number of the step ([`captured_step`](crate::captured_step)): it is in
/// device memory, where each launch puts its own.
pub struct Graph {
    gpu: &'static Gpu,
    graph: CUgraphExec,
    step: DeviceBlock,
    /// The kernels and products in it.
    launches: u64,
    /// The memory from which the work's uploads copy at each launch.
    constants: Vec<Pinned>,
}

// SAFETY: a graph's handle may be used from any thread, one at a time (`launch` takes `&mut self`).
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the work that `work` gives to `gpu` on this thread instead of running it. `step` is the number of the step whose random
    /// draws it makes. Meanwhile nothing may wait for the device and nothing may be compiled: run the work once before.
    ///
    /// # Errors
    /// If `work` does what cannot be captured, or the device is lost. The inner error is that of `work`.
    pub fn capture<E>(
        gpu: &'static Gpu,
        step: u64,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Result<Graph, E>> {
        const OP: &str = "capture";
        gpu.bind(OP)?;
        let cell = gpu.allocate(OP, size_of::<u64>())?;
        // A graph's memory is apart from the pool's, which need not keep what the work has used so far.
        gpu.synchronize()?;
        gpu.trim()?;
        gpu.begin_capture(OP, step, cell.address())?;
        let launched = gpu.launches();
        let worked = catch_unwind(AssertUnwindSafe(work));
        let (ended, constants, launches) = (gpu.end_capture(), take_constants(), gpu.launches() - launched);
        // The stream is out of capture mode now, so a panic of the work may go on.
        let worked = worked.unwrap_or_else(|panic| resume_unwind(panic));
        match (worked, ended) {
            (Err(error), Ok(graph)) => {
                drop(Graph { gpu, graph, step: cell, launches, constants });
                Ok(Err(error))
            }
            (Err(error), Err(_)) => Ok(Err(error)),
            (Ok(()), ended) => {
                Ok(Ok(Graph { gpu, graph: gpu.called(OP, ended)?, step: cell, launches, constants }))
            }
        }
    }

    /// Runs it on this thread's current stream with the random draws of `step`.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn launch(&mut self, step: u64) -> Result<()> {
        self.gpu.bind("graph")?;
        // SAFETY: the memory exists; the driver has read pageable memory before it returns.
        unsafe { self.gpu.copy_from_host("graph", self.step.address(), &step.to_le_bytes())? };
        // SAFETY: graph and stream exist; so does the memory, by the promise in `Graph`, and a GPU's pages stay mapped.
        let launch =
            || self.gpu.called("graph", unsafe { driver::graph_launch(self.graph, self.gpu.stream()) });
        self.gpu.traced("graph", Work::Graph { launches: self.launches }, launch)
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph on cuda:{} with {} constants", self.gpu.index(), self.constants.len())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind("graph").is_ok() {
            // SAFETY: this was the only owner of the handle; the driver lets a running launch finish.
            let _ = unsafe { driver::graph_destroy(self.graph) };
        }
    }
}

/// Pinned memory for bytes of a GPU, used again and again. [`Readback::start`] queues a copy to it after all work
/// queued so far, and [`Readback::finish`] waits for that copy. The device may be given more work in between.
#[derive(Debug)]
pub struct Readback {
    gpu: &'static Gpu,
    /// The bytes, then the device's fault record.
    memory: Pinned,
    bytes: usize,
    in_flight: Option<GpuEvent>,
}

impl Readback {
    /// For `bytes` bytes.
    ///
    /// # Errors
    /// If the system has no more memory that can be pinned.
    pub fn new(gpu: &'static Gpu, bytes: usize) -> Result<Readback> {
        Ok(Readback { gpu, memory: Pinned::zeros(gpu, bytes + RECORD_BYTES)?, bytes, in_flight: None })
    }

    /// Queues the copy from `from`. Waits only for a copy that was started before and not finished.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Safety
    /// There is as much memory at `from`, and it lives until the stream has come so far.
    pub unsafe fn start(&mut self, op: &'static str, from: u64) -> Result<()> {
        self.wait()?;
        self.gpu.bind(op)?;
        let (numbers, faults) = self.memory.split_at_mut(self.bytes);
        // SAFETY: device memory exists. The pinned memory is this value's, which neither reads, writes nor frees it before the event,
        // but where an error here loses the device.
        unsafe {
            self.gpu.start_copy_to_host(op, numbers, from)?;
            if let Some(record) = self.gpu.faults.address() {
                self.gpu.start_copy_to_host(op, faults, record)?;
            }
        }
        self.in_flight = Some(GpuEvent::record(self.gpu)?);
        Ok(())
    }

    /// Waits for the copy and returns the bytes; none if no copy was started.
    ///
    /// # Errors
    /// What kernels have reported before. The report is taken: later waits for the device do not return it again.
    pub fn finish(&mut self) -> Result<Option<&[u8]>> {
        if self.in_flight.is_none() {
            return Ok(None);
        }
        self.wait()?;
        if let Some(error) = self.gpu.faults.error(&self.memory[self.bytes..]) {
            self.memory[self.bytes..].fill(0);
            // Takes the report from the device.
            return Err(self.gpu.synchronize().err().unwrap_or(error));
        }
        Ok(Some(&self.memory[..self.bytes]))
    }

    /// Waits for a copy that is in flight.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn wait(&mut self) -> Result<()> {
        self.in_flight.take().map_or(Ok(()), |event| event.synchronize())
    }
}

impl Drop for Readback {
    fn drop(&mut self) {
        // If it fails the device is lost, and writes nothing any more.
        let _ = self.wait();
    }
}
