//! [`Board`]: where workers leave what others go on with, and hear of the first error.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use phalanx_nn::autograd::Var;

use super::copy::Sent;
use super::{Cell, Route, Skip};
use crate::{Error, Result};

/// How many micro-batches a stage is ahead of the next one at most: a cell is computed after the next stage's cell of so
/// many micro-batches before, and in backward before it. So no more values wait between two stages than that, or gradients.
/// In the clock cycles it is 2; one more lets copies take their time.
pub(super) const AHEAD: usize = 3;

/// What has arrived for a cell: its batch, its skips in the order of its stage's routes, and the phony of the next stage's
/// cell that it comes after.
pub(super) struct Arrived {
    pub(super) batch: Vec<Sent>,
    pub(super) skips: Vec<Option<Sent>>,
    pub(super) after: Option<Var>,
}

/// Shared by the workers of one forward pass.
#[derive(Default)]
pub(super) struct Board {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    batches: BTreeMap<Cell, Vec<Sent>>,
    /// By the micro-batch.
    skips: BTreeMap<(usize, Skip), Option<Sent>>,
    /// The phonies of cells that are computed.
    ended: BTreeMap<Cell, Option<Var>>,
    outputs: BTreeMap<usize, Vec<Var>>,
    ties: Vec<Var>,
    error: Option<Error>,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves the batch of a cell.
    pub(super) fn post(&self, cell: Cell, batch: Vec<Sent>) {
        self.lock().batches.insert(cell, batch);
        self.changed.notify_all();
    }

    /// Leaves a skip of a micro-batch. It is there before the batch of the cell that pops it, which comes through the
    /// stages between.
    pub(super) fn post_skip(&self, micro_batch: usize, skip: &Skip, value: Option<Sent>) {
        self.lock().skips.insert((micro_batch, skip.clone()), value);
    }

    /// A cell is computed, and leaves this phony, if any.
    pub(super) fn post_end(&self, cell: Cell, phony: Option<Var>) {
        self.lock().ended.insert(cell, phony);
        self.changed.notify_all();
    }

    /// Leaves an output of the last stage.
    pub(super) fn post_output(&self, micro_batch: usize, values: Vec<Var>) {
        self.lock().outputs.insert(micro_batch, values);
    }

    /// Leaves the phony of a device's last cell.
    pub(super) fn post_tie(&self, phony: Var) {
        self.lock().ties.push(phony);
    }

    /// Takes what a cell of one of so many stages begins with, as soon as it is there; `None` once anybody has failed.
    pub(super) fn take(&self, cell: Cell, stages: usize, incoming: &[Route]) -> Option<Arrived> {
        let Cell { micro_batch, stage } = cell;
        let before = (stage + 1 < stages && micro_batch >= AHEAD)
            .then(|| Cell { micro_batch: micro_batch - AHEAD, stage: stage + 1 });
        let mut state = self.lock();
        loop {
            if state.error.is_some() {
                return None;
            }
            if before.is_none_or(|before| state.ended.contains_key(&before))
                && let Some(batch) = state.batches.remove(&cell)
            {
                let after = before.and_then(|before| state.ended.remove(&before).flatten());
                let mut skip =
                    |route: &Route| state.skips.remove(&(micro_batch, route.skip.clone())).flatten();
                let skips = incoming.iter().map(&mut skip).collect();
                return Some(Arrived { batch, skips, after });
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the pass; the first error wins.
    pub(super) fn fail(&self, error: Error) {
        self.lock().error.get_or_insert(error);
        self.changed.notify_all();
    }

    /// The outputs in order of their micro-batches, and the phonies of all devices.
    ///
    /// # Errors
    /// The first one.
    pub(super) fn end(self) -> Result<(Vec<Vec<Var>>, Vec<Var>)> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        match state.error {
            Some(error) => Err(error),
            None => Ok((state.outputs.into_values().collect(), state.ties)),
        }
    }
}
