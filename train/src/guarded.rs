//! Guarded steps: the loss and the norm are read before the update, which is then made, skipped, or replaced by a return to a checkpoint.

use std::path::Path;
use std::time::Instant;

use phalanx_nn::{Batch, Entry};
use phalanx_parallel::all_gather_object;
use phalanx_tensor::Tensor;

use crate::callback::Event;
use crate::checkpoints;
use crate::divergence::{Verdict, origin};
use crate::place::Place;
use crate::step::{Outcome, Passed, Settings, pass, update};
use crate::training::Training;
use crate::{Error, Result};

impl Training<'_> {
    /// A step whose loss and norm are read before the update. Returns those of all ranks, and whether a rank was told to stop; `None` if
    /// the run has gone back to a checkpoint.
    pub(crate) fn guarded(&mut self, step: u64) -> Result<Option<(Outcome, bool)>> {
        let micros = self.batches(step)?;
        let lane = self.run.lane.clone();
        lane.begin(step);
        // An error of the trace's file is returned by the next span.
        let watch = |phase: &'static str, begin| drop(lane.note(phase, step, begin));
        let begin = Instant::now();
        self.run.optimizers.set_lr(&self.run.means.config.lr, step, self.run.rate.share);
        let scale = self.run.scaler.map_or(1.0, |scaler| scaler.scale());
        let settings = Settings { scale, ..self.run.means.settings(&watch) };
        let buffers = self.kept_buffers()?;
        let passed = pass(&self.run.model, &self.run.optimizers, &micros, settings, step)?;
        let numbers = passed.results.to_vec::<f64>()?;
        let (loss, interrupted) = self.of_all(numbers[0] / scale)?;
        let outcome = Outcome { loss, grad_norm: numbers[1] / scale };
        if let Some(why) = self.overflow(outcome) {
            drop(passed);
            self.leave_out(buffers)?;
            self.event(&Event::Skipped { step, why: &why })?;
            lane.note("step", step, begin)?;
            return Ok(Some((outcome, interrupted)));
        }
        let parameters = self.run.means.share.parameters();
        let details = || origin_of_all(&self.run.place, &micros, &parameters, &passed);
        match self.watch.judge(outcome, details)? {
            Verdict::Fine => {
                let settings = Settings { scale, ..self.run.means.settings(&watch) };
                update(&mut self.run.optimizers, &passed, settings)?;
            }
            Verdict::Stop(why) => return Err(Error::Diverged(why)),
            Verdict::Skip(why) => {
                drop(passed);
                self.leave_out(buffers)?;
                self.event(&Event::Skipped { step, why: &why })?;
            }
            Verdict::Rollback(why) => {
                drop(passed);
                self.back(step, &why)?;
                return Ok(None);
            }
        }
        lane.note("step", step, begin)?;
        Ok(Some((outcome, interrupted)))
    }

    /// Whether scaled gradients have overflowed. This is not a divergence of the model: the next ones are scaled by less.
    fn overflow(&mut self, Outcome { loss, grad_norm }: Outcome) -> Option<String> {
        let scaler = self.run.scaler.as_mut()?;
        let leave_out = !scaler.update(grad_norm.is_finite() && loss.is_finite());
        let why = || format!("gradients overflowed; losses are multiplied by {} from now on", scaler.scale());
        (leave_out && loss.is_finite()).then(why)
    }

    /// Skips a step's update: drops the gradients and restores the buffers from before the step.
    fn leave_out(&mut self, buffers: Vec<(Tensor, Tensor)>) -> Result<()> {
        self.run.means.share.zero_grad()?;
        self.skipped = true;
        buffers.into_iter().try_for_each(|(mut buffer, before)| Ok(buffer.copy_from(&before)?))
    }

    /// The model's buffers, such as running statistics, with copies from before a step whose update may be skipped.
    fn kept_buffers(&self) -> Result<Vec<(Tensor, Tensor)>> {
        let mut kept: Vec<Tensor> = Vec::new();
        let skips = matches!(self.run.means.config.on_divergence, crate::OnDivergence::Skip { .. });
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
    fn back(&mut self, step: u64, why: &str) -> Result<()> {
        let data = step + self.run.data_ahead + 1;
        self.run.means.share.zero_grad()?;
        self.run.means.saver.wait()?;
        let folder = self.run.means.config.folder().map(Path::to_path_buf).unwrap_or_default();
        let saved =
            checkpoints::latest(&folder).map_err(|error| Error::Diverged(format!("{why}; {error}")))?;
        let identity = self.run.identity.clone();
        let position = checkpoints::restore(&saved, self.run, &identity)?;
        self.watch.remember(&self.run.watched);
        (self.run.done, self.run.best) = (position.step, position.best);
        self.run.data_ahead = data - position.step;
        self.loader = self.run.loader(self.run.place.device, position.step)?;
        self.losses.retain(|(at, _)| *at < position.step);
        if self.run.place.is_first() {
            self.metrics.rewind(position.step)?;
        }
        self.event(&Event::RolledBack { step, to: position.step, why })
    }
}

/// The cause of a step's divergence. Each rank checks its batch, then its parameters, then its gradients; the earliest of these three that
/// a rank finds is reported. If all are finite, it is the parameter with the largest gradient.
fn origin_of_all(
    place: &Place,
    micros: &[Batch],
    parameters: &[phalanx_nn::Parameter],
    passed: &Passed,
) -> Result<String> {
    let own = origin(micros, parameters, &passed.squares)?;
    let nearest = all_gather_object(place.all_ranks(), &own)?.into_iter().flatten().min();
    Ok(nearest.map_or_else(String::new, |(.., text)| text))
}
