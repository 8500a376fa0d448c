//! The two autograd nodes around a cell, `enter` and `leave`, which make backward the mirror of the clock cycles.
//!
//! ```text
//!   cell (i-1, j)                     cell (i, j)
//!   x ─ ops ─ leave ─ y               x ─ ops ─ leave ─ y            forward: left to right
//!                │                                │
//!   enter ───────┴── phony ── enter ──────────────┴── phony ──       backward: right to left
//! ```
//! The phony, a tensor without elements, ties the cells of a device together in the order in which the device computes them.
//! These are torchgpipe's fork and join, over all values of a cell at once. Backward runs, for each cell:
//!
//! 1. `leave`, which waits for the gradients of all values that left the cell;
//! 2. the cell's operations;
//! 3. `enter`, since it was recorded before them and a device runs last what was recorded first;
//! 4. the `leave` of the cell before.
//!
//! A recomputation hangs on the phony between two cells: it begins as soon as the device is free, while the gradient is still
//! being copied. Cells are tied to cells of the next stage too, so that no stage runs far ahead of the next ([`AHEAD_MAX`]).
//!
//! [`AHEAD_MAX`]: super::worker::AHEAD_MAX

use std::sync::{Arc, Mutex};

use phalanx_nn::autograd::{
    Backward, Cx, Grads, Result as GradResult, SaveContext, Var, phony, record, record_many,
};
use phalanx_tensor::cuda::Moment;
use phalanx_tensor::{Device, Tensor, unpoisoned};

use super::clock::Phase;
use super::copy::PendingGrads;
use super::observe::CellObserver;
use crate::Result;

/// When a cell's backward pass began.
pub(super) struct BackwardStart {
    cell_observer: CellObserver,
    begun: Mutex<Option<Moment>>,
}

impl BackwardStart {
    pub(super) fn new(cell_observer: CellObserver) -> Arc<BackwardStart> {
        Arc::new(BackwardStart { cell_observer, begun: Mutex::default() })
    }

    fn set(&self, begun: Option<Moment>) -> Option<Moment> {
        std::mem::replace(&mut *unpoisoned(self.begun.lock()), begun)
    }
}

/// The node at the beginning of a cell. `after` are the phonies of the cells that are computed before it.
///
/// # Errors
/// If the device refuses.
pub(super) fn enter(after: &[&Var], start: &Arc<BackwardStart>) -> Result<Var> {
    let device = start.cell_observer.device;
    let first = phony(device, true)?;
    let inputs = if after.is_empty() { &[&first] } else { after };
    let devices = inputs.iter().map(|phony| phony.device()).collect();
    let node = |_: &SaveContext<'_>| Ok(Enter { start: start.clone(), devices });
    Ok(record("enter", inputs, empty(device)?, node)?)
}

/// The node at the end of a cell: the values that leave it, and the phony for the next cell, which is `None` if no value
/// requires a gradient.
///
/// # Errors
/// If the device refuses.
pub(super) fn leave(
    mut values: Vec<Var>,
    entered: &Var,
    start: &Arc<BackwardStart>,
    pending_grads: PendingGrads,
) -> Result<(Vec<Var>, Option<Var>)> {
    let mut tied: Vec<&mut Var> = values.iter_mut().filter(|value| value.requires_grad()).collect();
    if tied.is_empty() {
        return Ok((values, None));
    }
    let tensors = tied.iter().map(|value| value.tensor().clone());
    let outputs = tensors.chain([empty(start.cell_observer.device)?]).collect();
    let node = |_: &SaveContext<'_>| Ok(Leave { start: start.clone(), pending_grads });
    let inputs: Vec<&Var> = tied.iter().map(|value| &**value).chain([entered]).collect();
    let mut left = record_many("leave", &inputs, outputs, node)?;
    let phony = left.pop();
    tied.iter_mut().zip(left).for_each(|(value, left)| **value = left);
    Ok((values, phony))
}

fn empty(device: Device) -> Result<Tensor> {
    Ok(phony(device, false)?.into_tensor())
}

/// The last node of a cell in backward: reports that its backward pass has ended.
struct Enter {
    start: Arc<BackwardStart>,
    /// The devices of the phonies that were its inputs.
    devices: Vec<Device>,
}

impl Backward for Enter {
    fn backward(&self, _: &Cx<'_>) -> GradResult<Grads> {
        let begun = self.start.set(None);
        self.start.cell_observer.report(Phase::Backward, begun)?;
        self.devices.iter().map(|&device| Ok(Some(phony(device, false)?))).collect()
    }
}

/// The first node of a cell in backward: waits for the gradients, and notes when the backward pass began.
struct Leave {
    start: Arc<BackwardStart>,
    pending_grads: PendingGrads,
}

impl Backward for Leave {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        // The gradients of the values, and a phony as the gradient of the phony.
        let values = cx.outputs() - 1;
        let grads: Vec<&Tensor> = (0..values).filter_map(|i| cx.dy_at(i)).map(Var::tensor).collect();
        self.pending_grads.wait(&grads)?;
        self.start.set(self.start.cell_observer.now()?);
        let phony = phony(self.start.cell_observer.device, false)?;
        Ok((0..values).map(|i| cx.dy_at(i).cloned()).chain([Some(phony)]).collect())
    }
}
