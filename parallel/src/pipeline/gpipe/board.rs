//! [`Board`]: where workers leave what others go on with, and hear of the first error.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use phalanx_nn::autograd::Var;

use super::copy::Sent;
use super::{Cell, Route, Skip};
use crate::{Error, Result};

/// What has arrived for a cell: its batch, and its skips in the order of its stage's routes.
pub(super) struct Arrived {
    pub(super) batch: Vec<Sent>,
    pub(super) skips: Vec<Option<Sent>>,
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

    /// Leaves an output of the last stage.
    pub(super) fn post_output(&self, micro_batch: usize, values: Vec<Var>) {
        self.lock().outputs.insert(micro_batch, values);
    }

    /// Leaves the phony of a device's last cell.
    pub(super) fn post_tie(&self, phony: Var) {
        self.lock().ties.push(phony);
    }

    /// Takes what a cell begins with, as soon as it is there; `None` once anybody has failed.
    pub(super) fn take(&self, cell: Cell, incoming: &[Route]) -> Option<Arrived> {
        let mut state = self.lock();
        loop {
            if state.error.is_some() {
                return None;
            }
            if let Some(batch) = state.batches.remove(&cell) {
                let mut skip =
                    |route: &Route| state.skips.remove(&(cell.micro_batch, route.skip.clone())).flatten();
                return Some(Arrived { batch, skips: incoming.iter().map(&mut skip).collect() });
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
