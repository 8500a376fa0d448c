//! Graphs: captured work that can be launched any number of times, the capture that makes one, and its memory.
//!
//! Memory that is allocated in a capture has the same addresses at each launch of the graph. So it stays allocated
//! for as long as the graph may run, even if a stream frees it in the meantime. When the graph is gone, what was
//! freed is freed, and what was not is its user's, like any other memory. What a launch leaves allocated has to be
//! freed before the next one, unless that frees it (`CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`).
//!
//! A GPU backs addresses that are not in use at the same time with the same memory. So a graph counts with the most bytes
//! that its allocations have at a time, in the order of the capture; it holds these until it is gone.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::thread::ThreadId;

use phalanx_emulator_link::handle::Handles;
use phalanx_emulator_link::lock;
use phalanx_ptx::OutOfMemory;

use crate::context::Context;
use crate::device::Device;
use crate::queue::{Point, Task};
use crate::status::{Result, Status};

/// Each task with the nodes before it, which come earlier in the list.
pub(crate) type Nodes = Vec<(Arc<Task>, Vec<usize>)>;

/// A graph as it was captured.
#[derive(Debug)]
pub(crate) struct Graph {
    pub nodes: Nodes,
    pub memory: Arc<GraphMemory>,
}

/// A node of a graph, for programs that count them.
#[derive(Debug)]
pub(crate) struct Node;

/// A graph that can be launched.
#[derive(Debug)]
pub(crate) struct Executable {
    pub nodes: Mutex<Nodes>,
    /// The end of its last launch, behind which the next one comes, and the chains of its branches.
    pub last: Mutex<(Point, Vec<u64>)>,
    pub memory: Mutex<Arc<GraphMemory>>,
    /// A launch frees what the one before left allocated.
    pub frees_first: bool,
}

/// All graphs.
pub(crate) static GRAPHS: Handles<Arc<Graph>> = Handles::new("graph", 6);
/// The nodes that programs asked for.
pub(crate) static NODES: Handles<Arc<Node>> = Handles::new("graph node", 7);
/// All graphs that can be launched.
pub(crate) static EXECUTABLES: Handles<Arc<Executable>> = Handles::new("executable graph", 8);

impl Graph {
    pub(crate) fn new(nodes: Nodes, memory: GraphMemory) -> Graph {
        Graph { nodes, memory: Arc::new(memory) }
    }
}

/// Which calls of which threads a capture forbids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CaptureMode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl CaptureMode {
    pub(crate) fn from_number(mode: i32) -> Result<CaptureMode> {
        let known = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
        let found = usize::try_from(mode).ok().and_then(|i| known.get(i)).copied();
        found.ok_or_else(|| Status::INVALID_VALUE.because(format!("capture mode {mode}")))
    }
}

/// A graph that is being captured.
#[derive(Debug)]
pub(crate) struct Capture {
    pub mode: CaptureMode,
    pub thread: ThreadId,
    /// The number of the stream that it began on.
    pub origin: u64,
    pub nodes: Nodes,
    pub memory: GraphMemory,
    pub broken: bool,
}

/// A stream's part in a capture: the nodes that its next one comes behind.
#[derive(Debug, Clone)]
pub(crate) struct Joined {
    pub capture: u64,
    pub ends: Vec<usize>,
}

/// Whether memory of a graph is allocated.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    /// By what has run.
    now: bool,
    /// By what has been queued.
    queued: bool,
}

/// The addresses of all graphs.
static ADDRESSES: LazyLock<Mutex<HashMap<u64, Held>>> = LazyLock::new(Mutex::default);

fn addresses() -> MutexGuard<'static, HashMap<u64, Held>> {
    lock(&ADDRESSES)
}

/// The graph's node that allocates `address` has run.
pub(crate) fn set_allocated(address: u64) {
    if let Some(held) = addresses().get_mut(&address) {
        held.now = true;
    }
}

/// A free of what may be a graph's memory is queued, outside of any graph.
pub(crate) fn free_queued(address: u64) {
    if let Some(held) = addresses().get_mut(&address) {
        held.queued = false;
    }
}

/// Notes a free of memory that a graph made. `None` if it is no graph's.
///
/// # Errors
/// It is not allocated now.
pub(crate) fn set_freed(address: u64) -> Option<Result<()>> {
    let mut addresses = addresses();
    let held = addresses.get_mut(&address)?;
    let why =
        || Status::INVALID_VALUE.because(format!("{address:#x} is memory of a graph, and free already"));
    Some(if std::mem::replace(&mut held.now, false) { Ok(()) } else { Err(why()) })
}

/// What one graph allocates.
#[derive(Debug)]
pub(crate) struct GraphMemory {
    context: Arc<Context>,
    allocated: Vec<u64>,
    freed: Vec<u64>,
    /// Bytes allocated where the capture has come to, and the most of them, which are reserved.
    live: u64,
    reserved: u64,
}

impl GraphMemory {
    pub(crate) fn new(context: Arc<Context>) -> GraphMemory {
        GraphMemory { context, allocated: Vec::new(), freed: Vec::new(), live: 0, reserved: 0 }
    }

    /// Allocates in the capture.
    ///
    /// # Errors
    /// The device has no more memory.
    pub(crate) fn allocate(&mut self, device: &Device, bytes: u64) -> Result<u64> {
        if bytes == 0 {
            return Err(Status::INVALID_VALUE.because("an allocation of 0 bytes"));
        }
        let full = |error: OutOfMemory| Status::OUT_OF_MEMORY.because(error.to_string());
        let more = (self.live + bytes).saturating_sub(self.reserved);
        device.memory.reserve(more).map_err(full)?;
        self.reserved += more;
        let address = device.memory.allocate_reserved(bytes).map_err(full)?;
        self.live += bytes;
        self.allocated.push(address);
        addresses().insert(address, Held::default());
        Ok(address)
    }

    /// The graph is launched; `frees_first` if it was made to free what it left allocated before.
    ///
    /// # Errors
    /// What an earlier launch left allocated is not freed yet.
    pub(crate) fn launched(&self, frees_first: bool) -> Result<()> {
        let mut addresses = addresses();
        let left: Vec<u64> = self.allocated.iter().copied().filter(|a| !self.freed.contains(a)).collect();
        let is_held = |address: &&u64| addresses.get(address).is_some_and(|held| held.queued);
        if let (false, Some(address)) = (frees_first, left.iter().find(is_held)) {
            let why =
                format!("memory at {address:#x}, which the graph's last launch allocated, is not freed yet");
            return Err(Status::INVALID_VALUE.because(why));
        }
        for address in left {
            addresses.entry(address).or_default().queued = true;
        }
        Ok(())
    }

    /// Something is freed in the capture.
    ///
    /// # Errors
    /// It was not allocated there.
    pub(crate) fn freed(&mut self, address: u64, bytes: u64) -> Result<()> {
        if !self.allocated.contains(&address) || self.freed.contains(&address) {
            let why = format!("{address:#x} was not allocated in the capture that frees it");
            return Err(Status::INVALID_VALUE.because(why));
        }
        self.freed.push(address);
        self.live -= bytes;
        Ok(())
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        let memory = &self.context.device().memory;
        memory.release(self.reserved);
        for address in &self.allocated {
            match addresses().remove(address) {
                // It is its user's from now on.
                Some(held) if held.now => memory.count(*address),
                // It was allocated by the capture, and this is the only free.
                Some(_) => drop(self.context.device().free(*address)),
                None => {}
            }
        }
    }
}
