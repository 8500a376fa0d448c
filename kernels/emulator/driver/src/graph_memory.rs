//! Memory that is allocated in a capture: it has the same addresses at each launch of the graph.
//!
//! So it stays allocated for as long as the graph may run, whoever frees it in the meantime. When the graph is gone,
//! what was freed is freed, and what was not is its user's, like any other memory.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::context::Context;
use crate::status::{Result, Status};

/// The addresses of all graphs: whether each is allocated now, as programs see it.
static ADDRESSES: LazyLock<Mutex<HashMap<u64, bool>>> = LazyLock::new(Mutex::default);

fn addresses() -> MutexGuard<'static, HashMap<u64, bool>> {
    ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The graph's node that allocates `address` has run.
pub(crate) fn set_allocated(address: u64) {
    if let Some(is_allocated) = addresses().get_mut(&address) {
        *is_allocated = true;
    }
}

/// Notes a free of memory that a graph made. `None` if it is no graph's.
///
/// # Errors
/// It is not allocated now.
pub(crate) fn set_freed(address: u64) -> Option<Result<()>> {
    let mut addresses = addresses();
    let is_allocated = addresses.get_mut(&address)?;
    let why =
        || Status::INVALID_VALUE.because(format!("{address:#x} is memory of a graph, and free already"));
    Some(if std::mem::replace(is_allocated, false) { Ok(()) } else { Err(why()) })
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
        addresses().insert(address, false);
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
            if addresses().remove(address) == Some(false) {
                // It was allocated by the capture, and this is the only free.
                let _ = self.context.device().memory.free(*address);
            }
        }
    }
}
