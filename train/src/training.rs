//! [`Training`]: the loop of a run, and the files that it writes as it goes.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use phalanx_nn::{Batch, Entry};
use phalanx_tensor::{Device, Tensor};

use crate::ahead::Ahead;
use crate::callback::{Callback, Event};
use crate::checkpoints::{self, Checkpoints};
use crate::data::DataLoader;
use crate::divergence::{Origin, Verdict, Watch, origin};
use crate::inspect::{self, Inspection};
use crate::outputs::{Outputs, files};
use crate::place::Place;
use crate::record::{Metrics, Record, Summary, Told};
use crate::run::Run;
use crate::step::{Outcome, Passed, converted, in_step, pass, update};
use crate::{Config, Error, Result, asynchronous, mfu};

/// A run while it trains.
pub(crate) struct Training<'a> {
    run: &'a mut Run,
    callbacks: &'a mut [Box<dyn Callback>],
    metrics: Metrics,
    /// What is taken back if there is an error before the first step is done.
    fresh: Outputs,
    checkpoints: Option<Checkpoints>,
    loader: DataLoader,
    ahead: Ahead,
    watch: Watch,
    losses: Vec<(u64, f64)>,
    last_validation: Option<f64>,
    /// Operations a second that the ranks could do, as measured; 0 if unknown.
    peak: f64,
    begin: Instant,
}

/// What came of a step.
enum Done {
    /// It is done, or begun where numbers come later.
    Step,
    /// The run has gone back.
    Back,
}

impl<'a> Training<'a> {
    pub fn new(run: &'a mut Run, callbacks: &'a mut [Box<dyn Callback>]) -> Result<Training<'a>> {
        let (config, done) = (run.means.config.clone(), run.done);
        let mut fresh = Outputs::default();
        let metrics = match run.place.is_first() {
            true => files(run, &mut fresh)?,
            false => Metrics::create(&[], None, 0)?,
        };
        let checkpoints = config.folder().map(|folder| Checkpoints::new(folder, &config));
        let ledger = run.place.device.ledger()?;
        // Peaks are the steps', not those of building the model.
        ledger.reset_peak();
        // What is captured has room of its own for the batch.
        let device = if run.captured.is_some() { Device::CPU } else { run.place.device };
        let waits = run.is_guarded() || config.trace.is_some();
        let ahead = Ahead::new(run.place.device, run.place.size() == 1, waits);
        let loader = run.loader(device, done)?;
        let peak = if run.flops > 0.0 { mfu::peak(&run.place)? } else { 0.0 };
        let parameters = run.parameters;
        callbacks.iter_mut().try_for_each(|c| c.started(&config, done, parameters))?;
        Ok(Training {
            watch: Watch::new(&config, &run.watched),
            run,
            callbacks,
            metrics,
            fresh,
            checkpoints,
            loader,
            ahead,
            losses: Vec::new(),
            last_validation: None,
            peak,
            begin: Instant::now(),
        })
    }

    pub fn go(mut self) -> Result<Summary> {
        // A run that had ended early has, still.
        let mut stopped = self.out_of_patience();
        while self.run.done < self.run.means.config.steps && stopped.is_none() {
            let end = self.next_pause();
            let (told, interrupted) = match self.run.means.config.asynchronous {
                Some(kind) => {
                    let told = self.stretch(kind, end)?;
                    (told, self.of_all(0.0)?.1)
                }
                None => match self.step(end)? {
                    Some(told) => told,
                    None => continue,
                },
            };
            let paused = self.run.done == end || interrupted;
            let validated = if self.is_validated() { Some(self.validate()?) } else { None };
            let last = told.last().map(|told| told.step);
            for told in told {
                self.record(&told, validated.filter(|_| Some(told.step) == last))?;
            }
            if interrupted {
                stopped = Some("interrupted".to_string());
            } else if validated.is_some() {
                stopped = self.out_of_patience();
            }
            if let Some(why) = &stopped {
                self.event(&Event::Stopping { step: self.run.done, why })?;
            }
            if paused && (self.is_saved() || stopped.is_some()) {
                self.save()?;
            }
            for (every, work) in self.run.hooks.clone() {
                if let Some(text) =
                    if self.is_due(every) || stopped.is_some() { work(self.run)? } else { None }
                {
                    self.event(&Event::Sample { step: self.run.done, text: &text })?;
                }
            }
        }
        self.end(stopped)
    }

    /// The number of steps after which a checkpoint or a validation is due, once there are more than are done.
    fn next_pause(&self) -> u64 {
        let Config { steps, save_every, validate_every, .. } = self.run.means.config;
        let done = self.run.done;
        let due = |every: u64| done.checked_div(every).map_or(steps, |times| (times + 1) * every);
        let validations = if self.run.validation.is_some() { due(validate_every) } else { steps };
        let hooks = self.run.hooks.iter().map(|(every, _)| due(*every)).min().unwrap_or(steps);
        due(save_every).min(validations).min(hooks).min(steps)
    }

    fn is_due(&self, every: u64) -> bool {
        let done = self.run.done;
        done == self.run.means.config.steps || every > 0 && done.is_multiple_of(every)
    }

    fn is_saved(&self) -> bool {
        self.is_due(self.run.means.config.save_every)
    }

    fn is_validated(&self) -> bool {
        self.run.validation.is_some() && self.is_due(self.run.means.config.validate_every)
    }

    /// Why the run ends early, if too many validations brought no lower loss.
    fn out_of_patience(&self) -> Option<String> {
        let since = self.run.best.since;
        let most = self.run.means.config.patience?;
        (since >= most).then(|| format!("{since} validations without a lower loss"))
    }

    /// A step, and what was told meanwhile; whether the run is to end. Nothing if it has gone back.
    fn step(&mut self, end: u64) -> Result<Option<(Vec<Told>, bool)>> {
        let (since, step) = (Instant::now(), self.run.done);
        let peak = |run: &Run| -> Result<usize> { Ok(run.place.device.ledger()?.total().peak) };
        if self.run.is_guarded() {
            let (outcome, interrupted, done) = in_step(step, self.inspected(step))?;
            if let Done::Back = done {
                return Ok(None);
            }
            self.run.done += 1;
            let told = Told { step, outcome, seconds: since.elapsed().as_secs_f64(), peak: peak(self.run)? };
            return Ok(Some((vec![told], interrupted)));
        }
        let results = in_step(step, self.unguarded(step))?;
        self.ahead.begun(step, since, peak(self.run)?, &results)?;
        self.run.done += 1;
        let (mut told, mut interrupted) = (Vec::new(), false);
        while let Some(own) = self.ahead.next(step + 1 == end)? {
            let (loss, stop) = self.of_all(own.outcome.loss)?;
            let outcome = Outcome { loss, ..own.outcome };
            if let Verdict::Stop(why) = self.watch.judge(outcome, || Ok(String::new()))? {
                return Err(Error::Diverged(why).in_step(own.step));
            }
            interrupted |= stop;
            told.push(Told { outcome, ..own });
        }
        Ok(Some((told, interrupted)))
    }

    fn batches(&mut self, step: u64) -> Result<Vec<Batch>> {
        let (lane, loader) = (self.run.lane.clone(), &mut self.loader);
        let dtype = self.run.means.config.dtype;
        lane.span("data", step, || {
            loader.next_step()?.into_iter().map(|batch| converted(batch, dtype)).collect()
        })
    }

    /// A guarded step; one of them is looked at for the report.
    fn inspected(&mut self, step: u64) -> Result<(Outcome, bool, Done)> {
        let notes = self.run.lane.notes().filter(|_| step == inspect::STEP).cloned();
        let Some(notes) = notes else { return self.guarded(step) };
        let inspection = Inspection::begin(&notes, self.run.place.device)?;
        let done = self.guarded(step)?;
        let layout = &self.run.means.config.layout;
        let note = if layout.pp > 1 { layout.schedule.as_str() } else { "" };
        let (memory, timeline) = inspection.end(&self.run.place, note)?;
        self.event(&Event::Inspected { memory: &memory, timeline: &timeline })?;
        Ok(done)
    }

    /// A step whose numbers are looked at before the parameters are updated.
    fn guarded(&mut self, step: u64) -> Result<(Outcome, bool, Done)> {
        let micros = self.batches(step)?;
        let lane = self.run.lane.clone();
        lane.begin(step);
        // What cannot be written is said by the next span.
        let watch = |phase: &'static str, begin| drop(lane.note(phase, step, begin));
        let begin = Instant::now();
        self.run.optimizers.set_lr(&self.run.means.config.lr, step);
        let settings = self.run.means.settings(&watch);
        let buffers = self.kept_buffers()?;
        let passed = pass(&self.run.model, &self.run.optimizers, &micros, settings, step)?;
        let numbers = passed.results.to_vec::<f64>()?;
        let (loss, interrupted) = self.of_all(numbers[0])?;
        let outcome = Outcome { loss, grad_norm: numbers[1] };
        let parameters = self.run.means.share.parameters();
        let details = || origin_of_all(&self.run.place, &micros, &parameters, &passed);
        let done = match self.watch.judge(outcome, details)? {
            Verdict::Fine => {
                let settings = self.run.means.settings(&watch);
                update(&mut self.run.optimizers, &passed, settings)?;
                Done::Step
            }
            Verdict::Stop(why) => return Err(Error::Diverged(why)),
            Verdict::Skip(why) => {
                drop(passed);
                self.run.means.share.zero_grad()?;
                for (mut buffer, before) in buffers {
                    buffer.copy_from(&before)?;
                }
                self.event(&Event::Skipped { step, why: &why })?;
                Done::Step
            }
            Verdict::Rollback(why) => {
                drop(passed);
                self.back(step, &why)?;
                Done::Back
            }
        };
        lane.note("step", step, begin)?;
        Ok((outcome, interrupted, done))
    }

    /// The model's buffers and what they are before a step that may be left out: running statistics, say.
    fn kept_buffers(&self) -> Result<Vec<(Tensor, Tensor)>> {
        let mut kept: Vec<Tensor> = Vec::new();
        if !matches!(self.run.means.config.on_divergence, crate::OnDivergence::Skip { .. }) {
            return Ok(Vec::new());
        }
        self.run.model.visit("", &mut |_, entry| {
            if let Entry::Buffer(buffer) = entry {
                kept.push(buffer.tensor());
            }
        });
        kept.into_iter().map(|buffer| Ok((buffer.clone(), buffer.copy()?))).collect()
    }

    /// Back to the last checkpoint, and on with the data behind what went wrong.
    fn back(&mut self, step: u64, why: &str) -> Result<()> {
        let data = step + self.run.data_ahead + 1;
        self.run.means.share.zero_grad()?;
        self.run.means.saver.wait()?;
        let folder = self.run.means.config.folder().map(Path::to_path_buf).unwrap_or_default();
        let saved =
            checkpoints::latest(&folder).map_err(|error| Error::Diverged(format!("{why}; {error}")))?;
        let identity = self.run.identity.clone();
        let position = checkpoints::restore(&saved, self.run, &identity)?;
        self.watch.remember(&position.losses);
        self.run.done = position.step;
        self.run.data_ahead = data - position.step;
        self.loader = self.run.loader(self.run.place.device, position.step)?;
        self.losses.retain(|(at, _)| *at < position.step);
        if self.run.place.is_first() {
            self.metrics.rewind(position.step)?;
        }
        self.event(&Event::RolledBack { step, to: position.step, why })
    }

    /// A step whose numbers come when they are there.
    fn unguarded(&mut self, step: u64) -> Result<Tensor> {
        let micros = self.batches(step)?;
        let (lane, begin) = (self.run.lane.clone(), Instant::now());
        let results = self.run.unguarded(&micros)?;
        // In a trace a step lasts until the device has done it.
        if self.run.means.config.trace.is_some() {
            self.run.place.device.synchronize()?;
        }
        lane.note("step", step, begin)?;
        Ok(results)
    }

    /// The loss of the whole batch, of which each rank has a part, and whether a rank was told to stop.
    fn of_all(&self, own: f64) -> Result<(f64, bool)> {
        let place = &self.run.place;
        let stop = f64::from(u8::from(self.run.stop.load(Ordering::Relaxed)));
        if place.size() == 1 {
            return Ok((own, stop > 0.0));
        }
        let all = place.all_of(&[if place.tells_loss() { own } else { 0.0 }, stop])?;
        let (losses, stops) = (all.iter().step_by(2), all.iter().skip(1).step_by(2));
        Ok((losses.fold(0.0, |sum, x| sum + x), stops.sum::<f64>() > 0.0))
    }

    /// Steps without a flush between them.
    fn stretch(&mut self, kind: crate::Asynchronous, end: u64) -> Result<Vec<Told>> {
        let steps = self.run.done..end;
        let mut told = in_step(steps.start, asynchronous::stretch(kind, self.run, steps))?;
        let peak = self.run.place.device.ledger()?.total().peak;
        for told in &mut told {
            told.peak = peak;
            if let Verdict::Stop(why) = self.watch.judge(told.outcome, || Ok(String::new()))? {
                return Err(Error::Diverged(why).in_step(told.step));
            }
        }
        self.run.done = end;
        Ok(told)
    }

    fn validate(&mut self) -> Result<f64> {
        let step = self.run.done.saturating_sub(1);
        let lane = self.run.lane.clone();
        let loss = in_step(step, lane.span("validation", step, || self.run.validate()))?;
        self.last_validation = Some(loss);
        self.run.best.hear(self.run.done, loss);
        if self.run.means.config.keep_best
            && self.run.best.step == self.run.done
            && let Some(checkpoints) = &self.checkpoints
        {
            self.run.watched = self.watch.state();
            checkpoints.save_best(self.run)?;
        }
        Ok(loss)
    }

    fn record(&mut self, told: &Told, validation_loss: Option<f64>) -> Result<()> {
        let Told { step, outcome, seconds, peak } = *told;
        let place = &self.run.place;
        let config = &self.run.means.config;
        let tokens_per_s = (config.batch * self.run.data.counted) as f64 / seconds;
        let record = Record {
            step,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            lr: config.lr.lr(step),
            step_ms: seconds * 1e3,
            tokens_per_s,
            mfu: (self.peak > 0.0).then(|| tokens_per_s * self.run.flops / self.peak),
            peak_bytes: peaks(place, peak)?,
            validation_loss,
            skipped: self.watch.has_skipped(),
        };
        self.losses.push((step, outcome.loss));
        self.metrics.step(&record)?;
        self.fresh.keep();
        self.callbacks.iter_mut().try_for_each(|c| c.step(&record))
    }

    fn save(&mut self) -> Result<()> {
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        let step = self.run.done;
        let lane = self.run.lane.clone();
        self.run.watched = self.watch.state();
        let run = &*self.run;
        let path = lane.span("checkpoint", step.saturating_sub(1), || checkpoints.save(run))?;
        self.event(&Event::Saving { step, path: &path })
    }

    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        self.callbacks.iter_mut().try_for_each(|c| c.event(event))
    }

    fn end(mut self, stopped: Option<String>) -> Result<Summary> {
        self.run.means.saver.wait()?;
        self.fresh.keep();
        if self.losses.is_empty() && self.run.validation.is_some() {
            self.last_validation = Some(self.run.validate()?);
        }
        let seconds = self.begin.elapsed().as_secs_f64();
        if let Some(notes) = self.run.lane.notes().filter(|_| self.run.place.size() > 1).cloned() {
            let all = inspect::collectives(&notes, &self.run.place)?;
            self.event(&Event::Collectives(&all))?;
        }
        let peak_bytes = peaks(&self.run.place, self.run.place.device.ledger()?.total().peak)?;
        let rows = self.losses.len() * self.run.means.config.batch;
        let summary = Summary {
            steps: self.losses.len() as u64,
            parameters: self.run.parameters,
            first_loss: self.losses.first().map_or(f64::NAN, |l| l.1),
            last_loss: self.losses.last().map_or(f64::NAN, |l| l.1),
            validation_loss: self.last_validation,
            best_validation_loss: self.run.best.loss,
            seconds,
            tokens_per_s: (rows * self.run.data.counted) as f64 / seconds,
            peak_bytes,
            stopped,
        };
        self.metrics.summary(&summary)?;
        self.callbacks.iter_mut().try_for_each(|c| c.ended(&summary))?;
        Ok(summary)
    }
}

/// Where what is no number comes from, as the first rank that sees it says.
fn origin_of_all(
    place: &Place,
    micros: &[Batch],
    parameters: &[phalanx_nn::Parameter],
    passed: &Passed,
) -> Result<String> {
    let own = origin(micros, parameters, &passed.squares)?;
    // The nearest cause that a rank sees: its batch before its parameters before its gradients.
    let told = serde_json::to_string(&own).map_err(|e| Error::data("origin", e.to_string()))?;
    let all = place
        .texts(&told)?
        .into_iter()
        .filter_map(|text| serde_json::from_str::<Option<Origin>>(&text).ok()?);
    Ok(all.min().map_or_else(String::new, |(_, text)| text))
}

/// Every rank's peak.
fn peaks(place: &Place, own: usize) -> Result<Vec<usize>> {
    Ok(place.all(own as f64)?.into_iter().map(|peak| peak as usize).collect())
}
