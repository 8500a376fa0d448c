//! [`Graph`]: a piece of work captured once and launched again whole, without the host's time for each kernel.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::driver::{self, CUgraphExec};
use super::{DeviceBlock, Gpu, Pinned};
use crate::{Context, Device, Result};

/// Work of one device, ready to run again: the same kernels on the same memory. Tensors that the work reads or writes and
/// did not make must stay; what it made and dropped is its own.
///
/// Numbers that were given to kernels are those of the capture, but for the step of random draws: it is in the device's
/// memory, where each launch puts its own.
pub struct Graph {
    gpu: &'static Gpu,
    graph: CUgraphExec,
    step: DeviceBlock,
    /// What the work copies from the host: each launch copies it again.
    constants: Vec<Pinned>,
}

thread_local! {
    static CONSTANTS: RefCell<Vec<Pinned>> = const { RefCell::new(Vec::new()) };
    /// Of a thread that captures: the step whose draws it captures, and where a launch's step will be.
    static CAPTURING: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
}

impl Gpu {
    /// Where a kernel finds the number of the step that it is launched in, if it is being captured; else 0.
    pub(super) fn captured_step(&self, step: u64) -> u64 {
        CAPTURING.get().filter(|&(captured, _)| captured == step).map_or(0, |(_, cell)| cell)
    }
}

// SAFETY: a graph's handle may be used from any thread, one at a time (`launch` takes `&mut self`).
unsafe impl Send for Graph {}

/// Calls `copy` with bytes of the host that it gives to the device: during a capture with a copy of them, which the graph
/// will keep.
pub(super) fn from_host(
    gpu: &'static Gpu,
    bytes: &[u8],
    copy: impl FnOnce(&[u8]) -> Result<()>,
) -> Result<()> {
    if CAPTURING.get().is_none() {
        return copy(bytes);
    }
    let mut kept = Pinned::zeros(gpu, bytes.len())?;
    kept.copy_from_slice(bytes);
    copy(&kept)?;
    CONSTANTS.with_borrow_mut(|constants| constants.push(kept));
    Ok(())
}

impl Graph {
    /// Captures what `work` gives to `device` on this thread instead of running it. Nothing may wait for the device
    /// meanwhile, and nothing may be compiled: run the work once before.
    ///
    /// # Errors
    /// If `work` fails or does what cannot be captured, or `device` is no GPU.
    pub fn capture(device: Device, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        const OP: &str = "capture";
        let gpu = device.gpu()?;
        gpu.bind(OP)?;
        let stream = gpu.stream();
        let step = gpu.allocate(OP, size_of::<u64>())?;
        // A graph's memory is apart from the pool's, which need not keep what the work has used so far.
        gpu.synchronize()?;
        gpu.trim()?;
        // SAFETY: the stream exists.
        gpu.called(OP, unsafe { driver::begin_capture(stream) })?;
        CAPTURING.set(Some((Context::current().rng.step, step.address())));
        let worked = catch_unwind(AssertUnwindSafe(work));
        CAPTURING.set(None);
        let constants = CONSTANTS.take();
        // SAFETY: as above.
        let ended = unsafe { driver::end_capture(stream) };
        // The stream is free again, whatever becomes of the work.
        let worked = worked.unwrap_or_else(|panic| resume_unwind(panic));
        match (worked, ended) {
            (Err(error), Ok(graph)) => {
                drop(Graph { gpu, graph, step, constants });
                Err(error)
            }
            (Err(error), Err(_)) => Err(error),
            (Ok(()), ended) => Ok(Graph { gpu, graph: gpu.called(OP, ended)?, step, constants }),
        }
    }

    /// Runs it on this thread's current stream, its random draws being those of `step`.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn launch(&mut self, step: u64) -> Result<()> {
        self.gpu.bind("graph")?;
        let (cell, stream) = (self.step.address(), self.gpu.stream());
        // SAFETY: stream and memory exist; the driver has read pageable memory before it returns.
        self.gpu.called("graph", unsafe { driver::from_host(cell, &step.to_le_bytes(), stream) })?;
        // SAFETY: graph and stream exist; the tensors do by the promise in `Graph`, and a GPU's pages stay mapped.
        self.gpu.called("graph", unsafe { driver::graph_launch(self.graph, self.gpu.stream()) })
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph on {} with {} constants", self.gpu.device(), self.constants.len())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind("graph").is_ok() {
            // SAFETY: nobody else has the handle; the driver lets a running launch finish.
            let _ = unsafe { driver::graph_destroy(self.graph) };
        }
    }
}
