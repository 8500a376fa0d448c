//! [`Staged`]: tensors of a GPU by way of the host's memory, for backends that move elements themselves.
//!
//! A call that such a backend starts takes the host's copies of its tensors along. Whoever finishes it brings the output back
//! to the GPU, after the work that the caller had given to the GPU before; whoever waits for it lets the GPU wait for
//! that. It is right wherever elements can be read at all, and slow: the caller waits for the GPU at the start.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use phalanx_tensor::Tensor;
use phalanx_tensor::cuda::{Gpu, GpuEvent};

use super::{Call, Kind, Result};

/// An output on a GPU, of a call that works with a copy.
#[derive(Debug)]
pub(crate) struct Staged {
    gpu: &'static Gpu,
    /// Until somebody has waited for it: only then is its memory free for what comes later.
    output: Mutex<Option<Tensor>>,
    /// What the caller had given to the GPU before.
    before: GpuEvent,
    /// When the output has come.
    after: OnceLock<GpuEvent>,
}

impl Call {
    /// The same on rank `rank`, a GPU's tensors replaced by the host's.
    pub(crate) fn on_host(mut self, rank: usize) -> Result<Call> {
        if let Some(input) = self.input.take() {
            let host = if input.device().is_cuda() { input.device().host() } else { input.device() };
            self.input = Some(input.to_device(host, false)?);
        }
        let Some(output) = self.output.take_if(|output| output.device().is_cuda()) else { return Ok(self) };
        let (at_root, kind) = (self.signature.root == Some(rank), self.kind());
        let is_read = self.input.is_none() && kind != Kind::Receive && (kind != Kind::Broadcast || at_root);
        let is_written = !matches!((kind, at_root), (Kind::Broadcast, true) | (Kind::Reduce, false));
        let host = output.device().host();
        self.output = Some(match is_read {
            true => output.to_device(host, true)?,
            false => Tensor::empty(output.shape(), output.dtype(), host)?,
        });
        if is_written {
            let gpu = output.device().gpu()?;
            let (before, output) = (GpuEvent::record(gpu)?, Mutex::new(Some(output)));
            self.staged = Some(Arc::new(Staged { gpu, output, before, after: OnceLock::new() }));
        }
        Ok(self)
    }
}

impl Staged {
    fn output(&self) -> MutexGuard<'_, Option<Tensor>> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings the output back.
    pub(crate) fn deliver(&self, host: Option<Tensor>) -> Result<()> {
        let mut output = self.output();
        let (Some(output), Some(host)) = (output.as_mut(), host) else { return Ok(()) };
        self.before.order(self.gpu)?;
        output.copy_from(&host)?;
        // A call has one end.
        let _ = self.after.set(GpuEvent::record(self.gpu)?);
        Ok(())
    }

    /// Lets what this thread gives to the GPU from now on wait for the output, and gives it up.
    pub(crate) fn order(&self) -> Result<()> {
        self.after.get().map_or(Ok(()), |after| after.order(self.gpu))?;
        *self.output() = None;
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let (Some(after), true) = (self.after.get(), self.output().is_some()) {
            // Nobody has waited, and this thread's stream may be any. A failure means that the device is lost.
            let _ = after.synchronize();
        }
    }
}
