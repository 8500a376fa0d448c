//! Memory that is allocated in a capture: it has the same addresses at each launch of the graph.
//!
//! So it stays allocated for as long as the graph may run, whoever frees it in the meantime. When the graph is gone,
//! what was freed is freed, and what was not is its user's, like any other memory. What a launch leaves allocated has to be
//! freed before the next one, unless that frees it (`CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`).

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::context::Context;
use crate::status::{Result, Status};

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
    ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner)
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
}

impl GraphMemory {
    pub(crate) fn new(context: Arc<Context>) -> GraphMemory {
        GraphMemory { context, allocated: Vec::new(), freed: Vec::new() }
    }

    /// Something is allocated in the capture.
    pub(crate) fn allocated(&mut self, address: u64) {
        self.allocated.push(address);
        addresses().insert(address, Held::default());
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
    pub(crate) fn freed(&mut self, address: u64) -> Result<()> {
        if !self.allocated.contains(&address) || self.freed.contains(&address) {
            let why = format!("{address:#x} was not allocated in the capture that frees it");
            return Err(Status::INVALID_VALUE.because(why));
        }
        self.freed.push(address);
        Ok(())
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        for address in &self.allocated {
            if addresses().remove(address).is_some_and(|held| !held.now) {
                // It was allocated by the capture, and this is the only free.
                let _ = self.context.device().memory.free(*address);
            }
        }
    }
}
