//! Asynchronous copies between devices, and the autograd node that copies gradients back.
//!
//! ```text
//! forward    cpu:0  ── cell (i, 0) ─ send ── cell (i+1, 0) ──          backward is the same from right to left:
//!                                      │                               `Copy` sends the gradient, and the `leave` of
//!     copy stream                      └─copy─┐                        cell (i, 0) waits for it
//!            cpu:1  ── cell (i-1, 1) ──── receive ── cell (i, 1) ──
//! ```
//! Each pair of devices has a copy stream in each direction: a thread that copies in the order of sending, and on GPUs a CUDA
//! stream at both ends. Only the cell that needs a value waits for its copy: its thread until the copy is done, or queued on a
//! GPU, whose compute stream then waits for the copy. What a GPU computes of other micro-batches waits for no copy. The memory of
//! the copy is the copy stream's until the value is received ([`adopt`]); that of the source stays until it is read
//! ([`record_use`]).

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};

use phalanx_nn::autograd::{
    Backward, Cx, Error as GradError, Grads, Result as GradResult, SaveContext, Var, grads1,
    is_detecting_anomaly, record,
};
use phalanx_tensor::cuda::GpuEvent;
use phalanx_tensor::{Device, Result as TensorResult, Stream, Tensor, adopt, record_use, unpoisoned};

use super::clock::Phase;
use super::observe::CellObserver;
use crate::Result;

/// The copy streams of a pipeline, by source and target device.
pub(super) struct CopyStreams(BTreeMap<(Device, Device), Stream>);

impl CopyStreams {
    /// A stream in each direction for each pair of different devices.
    ///
    /// # Errors
    /// If a device cannot be used, or the system refuses a thread.
    pub(super) fn new(pairs: impl IntoIterator<Item = (Device, Device)>) -> Result<CopyStreams> {
        let mut copy_streams = BTreeMap::new();
        for (a, b) in pairs.into_iter().filter(|(a, b)| a != b && !b.is_meta()) {
            for (from, to) in [(a, b), (b, a)] {
                copy_streams.insert((from, to), Stream::between(from, to)?);
            }
        }
        Ok(CopyStreams(copy_streams))
    }

    /// Begins to copy `from` to the device of the cell that it is for.
    fn copy(&self, from: &Tensor, to: &CellObserver) -> TensorResult<PendingCopy> {
        let stream = self.0.get(&(from.device(), to.device));
        let tensor = match stream {
            Some(stream) => stream.empty(from.shape(), from.dtype())?,
            None => Tensor::empty(from.shape(), from.dtype(), to.device)?,
        };
        let (completed, completion) = sync_channel(1);
        if to.device.is_meta() {
            let _ = completed.send(Ok(None));
            return Ok(PendingCopy { tensor, completion });
        }
        let (source, target, cell_observer) = (from.clone(), tensor.clone(), to.clone());
        let job = move || {
            let _ = completed.send(run(source, target, &cell_observer));
            Ok(())
        };
        match stream {
            Some(stream) => stream.submit(job),
            None => job()?,
        }
        Ok(PendingCopy { tensor, completion })
    }
}

/// Copies on this thread's current streams, or queues the copy there: then returns the event after which a GPU has the value.
fn run(source: Tensor, mut target: Tensor, to: &CellObserver) -> TensorResult<Option<GpuEvent>> {
    // The time for which the copy waits for its source is not the copy's.
    if let (true, true) = (source.device().is_cuda(), to.device.is_cuda()) {
        GpuEvent::record(source.device().gpu()?)?.order(to.device.gpu()?)?;
    }
    let begin = to.now()?;
    target.copy_from(&source)?;
    // The source's memory is free before the receiver learns of the copy, or on a GPU when the copy has read it.
    record_use(&source)?;
    drop((source, target));
    to.report(Phase::Copy, begin)?;
    if to.device.is_cuda() { GpuEvent::record(to.device.gpu()?).map(Some) } else { Ok(None) }
}

/// A copy under way. Its tensor must not be read before the copy has completed.
pub(super) struct PendingCopy {
    tensor: Tensor,
    completion: Receiver<TensorResult<Option<GpuEvent>>>,
}

impl PendingCopy {
    /// Waits until the copy is done. On a GPU, waits until it is queued, and makes this thread's later work there wait for it.
    fn wait(self) -> GradResult<Tensor> {
        let ended = |_| GradError::Custom("copy: the copy stream ended before the copy was done".into());
        if let Some(copied) = self.completion.recv().map_err(ended)?? {
            copied.order(self.tensor.device().gpu()?)?;
            adopt(&self.tensor);
        }
        Ok(self.tensor)
    }
}

/// Gradients that are being copied to a cell.
#[derive(Clone, Default)]
pub(super) struct PendingGrads(Arc<Mutex<Vec<PendingCopy>>>);

impl PendingGrads {
    fn lock(&self) -> MutexGuard<'_, Vec<PendingCopy>> {
        unpoisoned(self.0.lock())
    }

    /// Waits for those of the pending copies that are these gradients. (Another pass over the same graph may have others.)
    pub(super) fn wait(&self, grads: &[&Tensor]) -> GradResult<()> {
        let ours = |copy: &mut PendingCopy| grads.iter().any(|grad| grad.shares_storage(&copy.tensor));
        let copies: Vec<PendingCopy> = self.lock().extract_if(.., ours).collect();
        copies.into_iter().try_for_each(|copy| copy.wait().map(drop))
    }
}

/// The side of a copy that sends the value, and receives the gradient.
#[derive(Clone)]
pub(super) struct Sender {
    pub(super) copy_streams: Arc<CopyStreams>,
    pub(super) cell_observer: CellObserver,
    pub(super) pending_grads: PendingGrads,
}

/// A value on its way from one cell to another.
pub(super) enum Sent {
    /// Both cells are on one device.
    Local(Var),
    /// `place` is the value's node in the graph, without the value: its memory is free when the copy is done.
    Remote { place: Var, copy: PendingCopy, sender: Sender },
}

impl Sender {
    /// Sends a value to another cell.
    ///
    /// # Errors
    /// If its device has no room.
    pub(super) fn send(&self, value: Var, to: &CellObserver) -> Result<Sent> {
        if value.device() == to.device {
            return Ok(Sent::Local(value));
        }
        let copy = self.copy_streams.copy(value.tensor(), to)?;
        Ok(Sent::Remote { place: value.place()?, copy, sender: self.clone() })
    }
}

impl Sent {
    /// The value on the device of the receiving cell.
    ///
    /// # Errors
    /// If it could not be copied.
    pub(super) fn receive(self) -> Result<Var> {
        match self {
            Sent::Local(value) => Ok(value),
            Sent::Remote { place, copy, sender } => {
                let tensor = copy.wait()?;
                Ok(record("copy", &[&place], tensor, |_: &SaveContext<'_>| Ok(Copy(sender)))?)
            }
        }
    }
}

/// `y = x` on another device; `dx = dy`, copied back. The sending cell's `leave` waits for it ([`PendingGrads::wait`]).
struct Copy(Sender);

impl Backward for Copy {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        let Sender { copy_streams, cell_observer, pending_grads } = &self.0;
        if cx.create_graph() || is_detecting_anomaly() {
            return grads1(cx.dy().to_device(cell_observer.device)?);
        }
        let copy = copy_streams.copy(cx.dy().tensor(), cell_observer)?;
        let dx = Var::new(copy.tensor.clone());
        pending_grads.lock().push(copy);
        grads1(dx)
    }
}
