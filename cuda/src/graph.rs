//! [`Graph`]: a piece of work captured once and launched again whole, without the host's time for each kernel.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::Result;
use crate::driver::{self, CUgraphExec};
use crate::gpu::Gpu;
use crate::memory::{DeviceBlock, Pinned, begin_capture, end_capture};

/// Work of one device, ready to run again: the same kernels on the same memory. Memory that the work uses and did not allocate must
/// stay. Memory that it allocated and freed belongs to the graph.
///
/// Arguments of kernels are those of the capture, except for the number of the step ([`captured_step`](crate::captured_step)): it is in
/// device memory, where each launch puts its own.
pub struct Graph {
    gpu: &'static Gpu,
    graph: CUgraphExec,
    step: DeviceBlock,
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
        let stream = gpu.stream();
        let cell = gpu.allocate(OP, size_of::<u64>())?;
        // A graph's memory is apart from the pool's, which need not keep what the work has used so far.
        gpu.synchronize()?;
        gpu.trim()?;
        // SAFETY: the stream exists.
        gpu.called(OP, unsafe { driver::begin_capture(stream) })?;
        begin_capture(step, cell.address());
        let worked = catch_unwind(AssertUnwindSafe(work));
        let constants = end_capture();
        // SAFETY: as above.
        let ended = unsafe { driver::end_capture(stream) };
        // The stream is out of capture mode now, so a panic of the work may go on.
        let worked = worked.unwrap_or_else(|panic| resume_unwind(panic));
        match (worked, ended) {
            (Err(error), Ok(graph)) => {
                drop(Graph { gpu, graph, step: cell, constants });
                Ok(Err(error))
            }
            (Err(error), Err(_)) => Ok(Err(error)),
            (Ok(()), ended) => Ok(Ok(Graph { gpu, graph: gpu.called(OP, ended)?, step: cell, constants })),
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
        self.gpu.called("graph", unsafe { driver::graph_launch(self.graph, self.gpu.stream()) })
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
