//! [`CopyStream`]: copies of tensors from one device to another beside the work of both.
//!
//! ```text
//! cuda:0   compute   ──kernels─┐─────────────kernels──         ┌──kernels──
//!          copies              └─>copy─┐                 copy──┘
//! host     the tensor                  └─>wait───...───start
//! ```
//! A copy to the host waits for what its caller has given the GPU so far. The host waits for the copy only in [`PendingCopy::wait`]. A copy
//! to a GPU waits for nothing. [`PendingCopy::wait`] makes the GPU's later work wait for it, and the host goes on. Memory of the host is
//! pinned ([`HostMemory::beside`]). Between devices without a GPU a copy is done when it is started.

use crate::{Context, Device, Event, HostMemory, Result, Stream, StreamGuard, Tensor, adopt};

/// Copies from one device to another, in the order in which they are started.
#[derive(Clone, Debug)]
pub struct CopyStream {
    from: Device,
    to: Device,
    /// None if neither is a GPU.
    stream: Option<Stream>,
}

impl CopyStream {
    /// For copies between these devices.
    ///
    /// # Errors
    /// If a device cannot be used, or the system refuses a thread.
    pub fn new(from: Device, to: Device) -> Result<CopyStream> {
        let needs_stream = from != to && (from.is_cuda() || to.is_cuda());
        let stream = needs_stream.then(|| Stream::between(from, to)).transpose()?;
        Ok(CopyStream { from, to, stream })
    }

    /// Whether its copies run beside the caller's work.
    pub fn is_asynchronous(&self) -> bool {
        self.stream.is_some()
    }

    /// Until the result is dropped, what this thread gives the GPUs at the ends goes to the stream of the copies ([`Stream::enter`]).
    ///
    /// # Errors
    /// As [`Stream::enter`].
    pub fn enter(&self) -> Result<Option<StreamGuard>> {
        self.stream.as_ref().map(Stream::enter).transpose()
    }

    /// Begins to copy a tensor. A write to it waits until the copy has read it.
    ///
    /// # Errors
    /// If the target has no room.
    pub fn start(&self, source: &Tensor) -> Result<PendingCopy> {
        let Some(stream) = &self.stream else {
            return Ok(PendingCopy { tensor: source.to_device(self.to, false)?, done: None });
        };
        let source = source.contiguous()?;
        let tensor = {
            let memory = HostMemory::beside(self.from)?;
            let _memory = Context::with(|c| c.host_memory = memory);
            stream.empty(source.shape(), source.dtype())?
        };
        let (mut target, held) = (tensor.clone(), source.hold("copy")?);
        stream.submit(move || {
            target.copy_from(&source)?;
            drop(held);
            Ok(())
        });
        Ok(PendingCopy { tensor, done: Some(stream.record()) })
    }
}

/// A copy under way.
#[derive(Debug)]
pub struct PendingCopy {
    tensor: Tensor,
    /// None if it is done.
    done: Option<Event>,
}

impl PendingCopy {
    /// The copy. If it is on a GPU, the caller's later work there waits for it; otherwise the host does.
    ///
    /// # Errors
    /// What went wrong with this copy or an earlier one of its stream.
    pub fn wait(self) -> Result<Tensor> {
        if let Some(done) = self.done {
            done.synchronize()?;
            adopt(&self.tensor);
        }
        Ok(self.tensor)
    }
}
