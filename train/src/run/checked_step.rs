//! Checked steps: the host reads the loss and the gradient norm before the update. The update is then made or skipped, or the run goes back to
//! a checkpoint.

use std::path::Path;
use std::time::Instant;

use phalanx_nn::Entry;
use phalanx_parallel as parallel;
use phalanx_tensor::Tensor;

use super::change::Request;
use super::divergence::Verdict;
use super::second_look::cause_of_divergence;
use super::step::{Outcome, StepOptions, compute_gradients, update};
use super::training_loop::TrainingLoop;
use crate::callback::Event;
use crate::checkpoints;
use crate::record::StepDigests;
use crate::{Error, Result};

impl TrainingLoop<'_> {
    /// A step whose loss and norm are read before the update. Returns those of all ranks, and what the ranks ask for; `None` if
    /// the run has gone back to a checkpoint.
    pub(crate) fn checked_step(&mut self, step: u64) -> Result<Option<(Outcome, Request)>> {
        let micros = self.batches(step)?;
        let trace = self.run.trace.clone();
        trace.begin(step);
        // An error of the trace's file is returned by the next span.
        let watch = |phase: &'static str, begin| drop(trace.note(phase, step, begin));
        let begin = Instant::now();
        self.run.optimizers.set_lr(&self.run.setup.config.lr, step, self.run.plateau.lr_factor);
        let scale = self.run.scaler.map_or(1.0, |scaler| scaler.scale());
        let counted = self.run.counted_in(step);
        let options = StepOptions { scale, ..self.run.setup.step_options(counted, &watch) };
        let buffers = self.copied_buffers()?;
        let gradients = compute_gradients(&self.run.model, &self.run.optimizers, &micros, options, step)?;
        let numbers = gradients.results.to_vec::<f64>()?;
        let own = Outcome { loss: numbers[0] / scale, grad_norm: numbers[1] / scale };
        let (outcome, request) = self.of_all_ranks(own)?;
        if let Some(why) = self.overflow(outcome) {
            drop(gradients);
            self.skip_update(buffers)?;
            self.event(&Event::Skipped { step, why: &why })?;
            trace.note("step", step, begin)?;
            return Ok(Some((outcome, request)));
        }
        let run = &*self.run;
        match self.loss_watch.judge(outcome, || cause_of_divergence(run, &micros, step, scale))? {
            Verdict::Fine => {
                let of_gradients = self.run.gradient_digests(step)?;
                let options = StepOptions { scale, ..self.run.setup.step_options(counted, &watch) };
                update(&mut self.run.optimizers, &gradients, options)?;
                let of_parameters = self.run.parameter_digests(step)?;
                self.digests = StepDigests::new(outcome.loss, of_gradients, of_parameters);
            }
            Verdict::Stop(why) => return Err(Error::Diverged(why)),
            Verdict::Skip(why) => {
                drop(gradients);
                self.skip_update(buffers)?;
                self.event(&Event::Skipped { step, why: &why })?;
            }
            Verdict::Rollback(why) => {
                drop(gradients);
                self.roll_back(step, &why)?;
                return Ok(None);
            }
        }
        trace.note("step", step, begin)?;
        Ok(Some((outcome, request)))
    }

    /// The message that scaled gradients have overflowed, if they have. This is not a divergence of the model, as long as the next ones can be
    /// scaled by less.
    fn overflow(&mut self, Outcome { loss, grad_norm }: Outcome) -> Option<String> {
        let scaler = self.run.scaler.as_mut()?;
        let before = scaler.scale();
        scaler.update(grad_norm.is_finite() && loss.is_finite());
        let why = || format!("gradients overflowed; losses are multiplied by {} from now on", scaler.scale());
        (scaler.scale() < before && loss.is_finite()).then(why)
    }

    /// Skips a step's update: drops the gradients and restores the buffers from before the step.
    fn skip_update(&mut self, buffers: Vec<(Tensor, Tensor)>) -> Result<()> {
        self.run.setup.data_parallel.zero_grad()?;
        self.skipped = true;
        buffers.into_iter().try_for_each(|(mut buffer, before)| Ok(buffer.copy_from(&before)?))
    }

    /// The model's buffers, such as running statistics, with copies from before a step whose update may be skipped.
    fn copied_buffers(&self) -> Result<Vec<(Tensor, Tensor)>> {
        let mut kept: Vec<Tensor> = Vec::new();
        let skips = matches!(self.run.setup.config.on_divergence, crate::OnDivergence::Skip { .. });
        if !skips && self.run.scaler.is_none() {
            return Ok(Vec::new());
        }
        self.run.model.visit("", &mut |_, entry| {
            if let Entry::Buffer(buffer) = entry {
                kept.push(buffer.tensor());
            }
        });
        kept.into_iter().map(|buffer| Ok((buffer.clone(), buffer.copy()?))).collect()
    }

    /// Returns to the last checkpoint, and goes on with the data after the diverged step.
    pub(crate) fn roll_back(&mut self, step: u64, why: &str) -> Result<()> {
        let data = step + self.run.data_ahead + 1;
        self.run.setup.data_parallel.zero_grad()?;
        self.run.setup.saver.wait()?;
        let folder = self.run.setup.config.folder().map(Path::to_path_buf).unwrap_or_default();
        let saved =
            checkpoints::agreed(checkpoints::latest(&folder), self.run).map_err(|error| match error {
                // Every rank has this one, as at the start of a run.
                Error::Parallel(parallel::Error::Disagreement(_)) => error,
                error => Error::Diverged(format!("{why}; {error}")),
            })?;
        let identity = self.run.identity.clone();
        let position = checkpoints::restore(&saved, self.run, &identity)?;
        let data_ahead = data.checked_sub(position.step).ok_or_else(|| {
            let wanted =
                format!("wanted a checkpoint before step {step}, got one after {} steps", position.step);
            Error::file(saved.path(), wanted)
        })?;
        self.loss_watch.remember(&self.run.loss_watch);
        (self.run.done, self.run.best) = (position.step, position.best);
        self.run.data_ahead = data_ahead;
        self.loader = self.run.loader(self.run.mesh_rank.device, position.step)?;
        self.losses.retain(|(at, _)| *at < position.step);
        if self.run.mesh_rank.is_first() {
            self.metrics.rewind(position.step)?;
        }
        self.event(&Event::RolledBack { step, to: position.step, why })?;
        // The copies in memory are of the steps that were taken back.
        self.hold()
    }
}
