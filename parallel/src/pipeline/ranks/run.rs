//! [`Run`]: a schedule under way.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use phalanx_nn::autograd::waiting;
use phalanx_tensor::Tensor;

use super::cell::Cell;
use super::updates::Updates;
use super::{Executed, Pipeline, Stages};
use crate::comm::Pending;
use crate::launch::caught;
use crate::pipeline::schedule::{Action, Kind};
use crate::{Error, Result};

pub(super) struct Run<'a, S> {
    pub(super) pipeline: &'a Pipeline,
    pub(super) work: &'a Arc<S>,
    /// By stage and micro-batch.
    cells: HashMap<(usize, usize), Cell>,
    /// What is held for receivers that may be slow, by the action that releases it.
    pub(super) held: HashMap<Option<Action>, Vec<Tensor>>,
    /// Sends that may still be under way.
    pub(super) sent: Vec<(Action, Pending)>,
    pub(super) losses: Vec<Option<Tensor>>,
    /// The action after this one.
    pub(super) following: Option<Action>,
    /// What updates weights meanwhile, in a schedule without flushes.
    updates: Option<Updates<'a>>,
}

impl<'a, S: Stages> Run<'a, S> {
    pub(super) fn new(pipeline: &'a Pipeline, work: &'a Arc<S>) -> Run<'a, S> {
        let losses = vec![None; pipeline.schedule.micro_batches];
        let (cells, held) = (HashMap::new(), HashMap::new());
        Run { pipeline, work, cells, held, sent: Vec::new(), losses, following: None, updates: None }
    }

    /// The same, with updates.
    pub(super) fn updated_by(self, updates: Updates<'a>) -> Run<'a, S> {
        Run { updates: Some(updates), ..self }
    }

    /// Carries out the actions of these kinds, and returns the losses.
    pub(super) fn run(mut self, wanted: impl Fn(Kind) -> bool) -> Result<Vec<Tensor>> {
        self.walk(wanted)?;
        self.updates.take().map_or(Ok(()), Updates::end)?;
        Ok(self.losses.into_iter().flatten().collect())
    }

    fn walk(&mut self, wanted: impl Fn(Kind) -> bool) -> Result<()> {
        let Pipeline { schedule, comm, observer, .. } = self.pipeline;
        let mut actions = schedule.ranks[comm.rank()].iter().filter(|action| wanted(action.kind)).peekable();
        while let Some(&action) = actions.next() {
            self.following = actions.peek().map(|&&action| action);
            let started = Instant::now();
            self.guarded(action, |run| run.perform(action))?;
            self.forget(action);
            self.held.remove(&Some(action));
            let ended = Instant::now();
            self.settle(false)?;
            // Sends are reported by whoever ends them.
            let reports = !matches!(action.kind, Kind::SendForward | Kind::SendBackward);
            if let Some(observer) = observer.as_ref().filter(|_| reports) {
                observer(Executed { action, started, ended });
            }
        }
        self.settle(true)
    }

    /// An error or panic of `f` names the action and ends the run of all ranks.
    fn guarded<T>(&mut self, action: Action, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let comm = &self.pipeline.comm;
        caught(|| f(self)).map_err(|cause| {
            let error = Error::Action { action: action.to_string(), cause };
            comm.fail(&error.to_string());
            error
        })
    }

    /// Forgets a cell in which nothing waits.
    fn forget(&mut self, Action { stage, micro_batch, .. }: Action) {
        if self.cells.get(&(stage, micro_batch)).is_some_and(Cell::is_empty) {
            self.cells.remove(&(stage, micro_batch));
        }
    }

    /// Forgets sends that are over, and with `all` waits for the others.
    fn settle(&mut self, all: bool) -> Result<()> {
        let is_over = |(_, send): &(Action, Pending)| all || send.is_done();
        let (over, under_way): (Vec<_>, Vec<_>) = self.sent.drain(..).partition(is_over);
        self.sent = under_way;
        over.into_iter()
            .try_for_each(|(action, send)| self.guarded(action, |_| Ok(waiting("send", || send.wait())?)))
    }

    /// An action, with the weights that are meant.
    fn perform(&mut self, action: Action) -> Result<()> {
        self.updates.iter_mut().try_for_each(|updates| updates.enter(action))?;
        self.act(action)?;
        self.updates.iter_mut().try_for_each(|updates| updates.leave(action))
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action.kind {
            Kind::Forward => self.forward(action),
            Kind::Backward | Kind::Input => self.backward(action),
            Kind::Weight => self.weight(action),
            Kind::Update => self.updates.iter_mut().try_for_each(|updates| updates.update(action)),
            Kind::SendForward => self.send_forward(action),
            Kind::RecvForward => self.receive_forward(action),
            Kind::SendBackward => self.send_backward(action),
            Kind::RecvBackward => self.receive_backward(action),
        }
    }
}

/// Looking things up.
impl<S> Run<'_, S> {
    pub(super) fn cell(&mut self, stage: usize, micro_batch: usize) -> &mut Cell {
        self.cells.entry((stage, micro_batch)).or_default()
    }

    /// The micro-batches whose gradients are added up: all, or those of an update.
    pub(super) fn interval(&self) -> usize {
        self.updates.as_ref().map_or(self.losses.len(), |updates| updates.interval())
    }

    pub(super) fn rank(&self) -> usize {
        self.pipeline.comm.rank()
    }

    pub(super) fn rank_of(&self, stage: usize) -> Option<usize> {
        self.pipeline.schedule.placement.get(stage).copied()
    }

    pub(super) fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.pipeline.schedule.placement.len()
    }
}

/// What a schedule that was checked does not come to.
pub(super) fn missing(what: &str) -> Error {
    Error::Config(format!("there is no {what} of this micro-batch at this stage"))
}
