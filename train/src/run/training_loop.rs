//! [`Run::train`]: the loop over the steps of a run.
//!
//! One turn of [`TrainingLoop::train_steps`] runs a step (or, without flushes, all steps up to the next pause), validates if a validation is
//! due, reports the steps whose numbers the host has read, saves a checkpoint if one is due, and calls the run's hooks. A step is a
//! [`checked_step`](super::checked_step) or an unchecked one, whose numbers [`PendingSteps`] reads later. A *pause* is a step that
//! a checkpoint, a validation or a hook follows; there all numbers are read.

use std::ops::Range;
use std::time::Instant;

use phalanx_nn::{Batch, UpdateGuard};
use phalanx_tensor::{Device, Tensor};

use super::asynchronous_steps;
use super::captured_step::CapturedTrainingStep;
use super::change::Request;
use super::divergence::{LossWatch, Verdict};
use super::inspect::{self, Inspection};
use super::output_files::{NewFiles, open_files};
use super::pending_steps::PendingSteps;
use super::second_look::cause_of_divergence;
use super::step::{Outcome, StepReport, in_model_dtype, in_step};
use super::waits;
use crate::callback::{Callback, Event};
use crate::checkpoints::Checkpoints;
use crate::data::DataLoader;
use crate::folder_lock::FolderLock;
use crate::machine::peak;
use crate::mesh_rank::MeshRank;
use crate::record::{Metrics, Record, StepDigests, Summary};
use crate::run::Run;
use crate::signals::{Phase, dump_on_signal};
use crate::{Error, Result};

/// A run while it trains.
pub(crate) struct TrainingLoop<'a> {
    pub(crate) run: &'a mut Run,
    callbacks: &'a mut [Box<dyn Callback>],
    pub(crate) metrics: Metrics,
    /// Files that are removed if there is an error before the first step is done.
    new_files: NewFiles,
    pub(super) checkpoints: Option<Checkpoints>,
    /// The loss of the best checkpoint in the folder. After a return to an earlier step it may be another than the run's lowest.
    pub(super) best_on_disk: Option<f64>,
    /// The lock on the folder `rescue`, on the first rank.
    pub(super) rescue_lock: Option<FolderLock>,
    pub(crate) loader: DataLoader,
    /// Steps whose loss and norm have not been read.
    pending: PendingSteps,
    pub(crate) loss_watch: LossWatch,
    /// The steps that were reported, each with its loss.
    pub(crate) losses: Vec<(u64, f64)>,
    last_validation: Option<f64>,
    /// Whether the last step had no update.
    pub(crate) skipped: bool,
    /// Of the last step, if they were due.
    pub(crate) digests: Option<StepDigests>,
    /// The rank that was conspicuously slow last.
    pub(super) slow_rank: Option<usize>,
    /// The share of time that others waited for each rank, for the next record.
    pub(super) waited_for: Option<Vec<f64>>,
    /// The measured peak of all ranks in operations a second; 0 if unknown.
    peak: f64,
    begin: Instant,
    /// The steps that the report shows in detail; none once it has them.
    to_inspect: Option<Range<u64>>,
}

impl Run {
    /// Trains up to the last step. All ranks call it; callbacks are the first rank's.
    ///
    /// # Errors
    /// An error of a step, with its number; an error of a callback or a file.
    pub fn train(&mut self, callbacks: &mut [Box<dyn Callback>]) -> Result<Summary> {
        if self.mesh_rank.device.is_meta() {
            let why =
                "train: a meta device has no numbers to train on; `memory_report` measures a step there";
            return Err(Error::Config(why.into()));
        }
        record_flight(self)?;
        let first = self.mesh_rank.is_first();
        TrainingLoop::new(self, if first { callbacks } else { &mut [] })?.run()
    }
}

impl<'a> TrainingLoop<'a> {
    /// Opens files, measures the peak, starts the loader, and calls [`Callback::started`].
    pub(crate) fn new(run: &'a mut Run, callbacks: &'a mut [Box<dyn Callback>]) -> Result<TrainingLoop<'a>> {
        run.check_initial_weights()?;
        let (config, done) = (run.setup.config.clone(), run.done);
        let mut new_files = NewFiles::default();
        let metrics = match run.mesh_rank.is_first() {
            true => open_files(run, &mut new_files)?,
            false => Metrics::create(&[], &[], 0)?,
        };
        let uncaptured = run.why_uncaptured();
        let checkpoints = config.folder().map(|folder| Checkpoints::new(folder, &config));
        let best_on_disk = match checkpoints.as_ref().filter(|_| config.keep_best) {
            Some(checkpoints) => checkpoints.best_loss(run)?,
            None => None,
        };
        let peak = if run.flops.is_some_and(|flops| flops.palm > 0.0) && !config.device.is_meta() {
            peak(&run.mesh_rank, &config)?
        } else {
            0.0
        };
        let ledger = run.mesh_rank.device.ledger()?;
        // The peak memory of building the model and of measuring is not a step's.
        ledger.reset_peak();
        // A captured step copies the batch from the host to tensors of its own.
        let device = if run.captured.is_some() { Device::CPU } else { run.mesh_rank.device };
        let waits = run.checks_steps() || config.trace.is_some();
        if !waits {
            run.guard_updates(UpdateGuard::lasting(run.mesh_rank.device)?);
        }
        let pending = PendingSteps::new(run.mesh_rank.device, run.mesh_rank.size() == 1, waits);
        let loader = run.loader(device, done)?;
        let parameters = run.parameters;
        let to_inspect = run.trace.notes().map(|_| inspect::steps_to_inspect(run));
        callbacks.iter_mut().try_for_each(|c| c.started(&config, done, parameters))?;
        if peak > 0.0 {
            callbacks.iter_mut().try_for_each(|c| c.event(&Event::Peak(peak)))?;
        }
        let uncaptured = uncaptured.map(|why| format!("steps are not captured: {why}"));
        for text in run.recovered.iter().chain(&uncaptured) {
            let event = Event::Notice { step: done, text };
            callbacks.iter_mut().try_for_each(|c| c.event(&event))?;
        }
        Ok(TrainingLoop {
            loss_watch: LossWatch::new(&config, &run.loss_watch),
            run,
            callbacks,
            metrics,
            new_files,
            checkpoints,
            best_on_disk,
            rescue_lock: None,
            loader,
            pending,
            losses: Vec::new(),
            last_validation: None,
            skipped: false,
            digests: None,
            slow_rank: None,
            waited_for: None,
            peak,
            to_inspect,
            begin: Instant::now(),
        })
    }

    /// Trains, and calls [`Callback::ended`] or [`Callback::failed`].
    fn run(mut self) -> Result<Summary> {
        let trained = self.train_steps();
        if let Err(error) = &trained
            && !self.losses.is_empty()
        {
            let step = self.run.done;
            // The run returns its own error, so errors of callbacks are dropped.
            self.callbacks.iter_mut().for_each(|c| drop(c.failed(step, error)));
        }
        self.end(trained?)
    }

    /// Runs the remaining steps. Returns why the run ends before the last, if it does.
    fn train_steps(&mut self) -> Result<Option<String>> {
        // A run that ended early before it was resumed ends early again.
        let mut stopped = self.out_of_patience();
        self.hold()?;
        let config = &self.run.setup.config;
        let is_saved = self.checkpoints.is_some() || config.rescue.is_some();
        if is_saved { Phase::Steps } else { Phase::StepsUnsaved }.begin();
        while self.run.done < self.run.setup.config.steps && stopped.is_none() {
            let end = self.next_pause();
            let (reports, request) = match self.run.setup.config.asynchronous {
                Some(kind) => {
                    let reports = self.asynchronous_steps(kind, end)?;
                    (reports, self.of_all_ranks(Outcome { loss: 0.0, grad_norm: 0.0 })?.1)
                }
                None => match self.step(self.next_hold().min(end))? {
                    Some(done) => done,
                    None => continue,
                },
            };
            let interrupted = request == Request::Stop;
            let paused = self.run.done == end || request > Request::GoOn;
            if paused {
                self.collectives()?;
            }
            if paused || self.run.done.is_multiple_of(waits::EVERY) {
                self.exchange_waits()?;
            }
            // A validation may lower the rate of the steps after it.
            let lr_factor = self.run.plateau.lr_factor;
            let validated = if self.is_validated() { Some(self.validate()?) } else { None };
            if let Some(why) = self.run.captured.as_mut().and_then(CapturedTrainingStep::new_refusal) {
                let text = format!("steps are not captured: {why}");
                self.event(&Event::Notice { step: self.run.done, text: &text })?;
            }
            let last = reports.last().map(|report| report.step);
            for report in reports {
                self.record(&report, lr_factor, validated.filter(|_| Some(report.step) == last))?;
            }
            if let Some(loss) = validated {
                self.save_best(loss)?;
            }
            if interrupted {
                stopped = Some("interrupted".to_string());
            } else if validated.is_some() {
                stopped = self.out_of_patience();
            }
            if let Some(why) = &stopped {
                self.event(&Event::Stopping { step: self.run.done, why })?;
            }
            if interrupted {
                self.rescue()?;
            }
            if paused && (self.is_saved() || stopped.is_some()) {
                self.save()?;
            }
            if stopped.is_some() || self.run.done == self.run.setup.config.steps {
                Phase::After.begin();
            }
            if interrupted {
                break;
            }
            if self.is_held() {
                self.hold()?;
            }
            for (every, work) in self.run.hooks.clone() {
                if let Some(text) =
                    if self.is_due(every) || stopped.is_some() { work(self.run)? } else { None }
                {
                    self.event(&Event::Sample { step: self.run.done, text: &text })?;
                }
            }
            let is_over = stopped.is_some() || self.run.done == self.run.setup.config.steps;
            if request == Request::MeetAgain && !is_over {
                self.meet_again()?;
                break;
            }
        }
        Ok(stopped)
    }

    /// Runs steps by `work`. If they are the steps to inspect, callbacks get the observations. All ranks call it.
    fn inspected<T>(&mut self, steps: Range<u64>, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let notes = self.run.trace.notes().cloned();
        let (notes, wanted) = match (notes, &self.to_inspect) {
            (Some(notes), Some(wanted)) if steps.contains(&wanted.start) => (notes, wanted.clone()),
            _ => return work(self),
        };
        let inspection = Inspection::begin(&notes, &self.run.trace, &self.run.mesh_rank, wanted)?;
        let done = work(self)?;
        self.to_inspect = None;
        let (memory, timeline, holds) = inspection.end(self.run)?;
        self.event(&Event::Inspected { memory: &memory, timeline: &timeline, holds: &holds })?;
        Ok(done)
    }

    /// Sends the ranks' communication calls so far to the callbacks. All ranks call it.
    fn collectives(&mut self) -> Result<()> {
        let Some(notes) = self.run.trace.notes().filter(|_| self.run.mesh_rank.size() > 1).cloned() else {
            return Ok(());
        };
        let all = inspect::collectives(&notes, &self.run.mesh_rank)?;
        self.event(&Event::Collectives(&all))
    }

    /// Runs a step. Returns the reports of the steps whose numbers have arrived, and what the ranks ask for; `None` if the run
    /// has gone back to a checkpoint.
    fn step(&mut self, end: u64) -> Result<Option<(Vec<StepReport>, Request)>> {
        let (since, step) = (Instant::now(), self.run.done);
        let peak = |run: &Run| -> Result<usize> { Ok(run.mesh_rank.device.ledger()?.total().peak) };
        if self.run.checks_steps() {
            let Some((outcome, request)) =
                in_step(step, self.inspected(step..step + 1, |own| own.checked_step(step)))?
            else {
                return Ok(None);
            };
            self.run.done += 1;
            let report =
                StepReport { step, outcome, seconds: since.elapsed().as_secs_f64(), peak: peak(self.run)? };
            return Ok(Some((vec![report], request)));
        }
        let results = in_step(step, self.inspected(step..step + 1, |own| own.unchecked_step(step)))?;
        self.pending.begun(step, since, peak(self.run)?, &results)?;
        self.run.done += 1;
        let (mut reports, mut request) = (Vec::new(), Request::GoOn);
        // At a pause all pending steps are read.
        while let Some(own) = self.pending.next(step + 1 == end || request > Request::GoOn)? {
            let (outcome, asked) = self.of_all_ranks(own.outcome)?;
            let run = &*self.run;
            // Without a finite norm this step and those after it have changed no weight.
            let details = || match outcome.grad_norm.is_finite() {
                true => Ok(String::new()),
                false => cause_of_divergence(run, &run.batches_of(own.step)?, own.step, 1.0),
            };
            match in_step(own.step, self.loss_watch.judge(outcome, details))? {
                Verdict::Fine | Verdict::Skip(_) => {}
                Verdict::Stop(why) => return self.diverged(&reports, own.step, why),
                Verdict::Rollback(why) => {
                    self.pending.clear()?;
                    self.run.guard.reset()?;
                    self.roll_back(own.step, &why)?;
                    return Ok(None);
                }
            }
            request = request.max(asked);
            reports.push(StepReport { outcome, ..own });
        }
        Ok(Some((reports, request)))
    }

    /// The micro-batches of this rank's next step.
    pub(crate) fn batches(&mut self, step: u64) -> Result<Vec<Batch>> {
        let (trace, loader) = (self.run.trace.clone(), &mut self.loader);
        let dtype = self.run.setup.config.dtype;
        trace.span("data", step, || {
            loader.next_step()?.into_iter().map(|batch| in_model_dtype(batch, dtype)).collect()
        })
    }

    /// A step whose loss and norm the host reads later. Returns both, f64 `[2]` on the device.
    fn unchecked_step(&mut self, step: u64) -> Result<Tensor> {
        let micros = self.batches(step)?;
        let (trace, begin) = (self.run.trace.clone(), Instant::now());
        let results = self.run.unchecked_step(&micros)?;
        // In a trace a step ends when the device has finished it.
        if self.run.setup.config.trace.is_some() {
            self.run.mesh_rank.device.synchronize()?;
        }
        trace.note("step", step, begin)?;
        Ok(results)
    }

    /// Runs the steps up to `end` without a flush between them.
    fn asynchronous_steps(&mut self, kind: crate::Asynchronous, end: u64) -> Result<Vec<StepReport>> {
        let steps = self.run.done..end;
        let work = |own: &mut Self| asynchronous_steps::run_asynchronously(kind, own.run, steps.clone());
        let mut reports = self.inspected(steps.clone(), work)?;
        let peak = self.run.mesh_rank.device.ledger()?.total().peak;
        reports.iter_mut().for_each(|report| report.peak = peak);
        for (number, report) in reports.iter().enumerate() {
            let unknown = "; the micro-batch and the parameter are not known, because steps without flushes cannot be repeated";
            if let Verdict::Stop(why) = self.loss_watch.judge(report.outcome, || Ok(unknown.into()))? {
                return self.diverged(&reports[..number], report.step, why);
            }
        }
        self.run.done = end;
        Ok(reports)
    }

    /// Ends the run by the error of a diverged step, once the good steps that were read in the same turn are recorded.
    fn diverged<T>(&mut self, good: &[StepReport], step: u64, why: String) -> Result<T> {
        let lr_factor = self.run.plateau.lr_factor;
        good.iter().try_for_each(|report| self.record(report, lr_factor, None))?;
        Err(Error::Diverged(why).in_step(step))
    }

    /// Validates, and remembers the lowest loss.
    fn validate(&mut self) -> Result<f64> {
        let step = self.run.done.saturating_sub(1);
        let trace = self.run.trace.clone();
        let loss = in_step(step, trace.span("validation", step, || self.run.validate()))?;
        self.last_validation = Some(loss);
        self.run.best.update(self.run.done, loss);
        if let Some(plateau) = self.run.setup.config.plateau {
            self.run.plateau.update(plateau, self.run.best.step == self.run.done);
        }
        Ok(loss)
    }

    /// Writes a step's record into the metrics and gives it to the callbacks.
    fn record(&mut self, report: &StepReport, lr_factor: f64, validation_loss: Option<f64>) -> Result<()> {
        let StepReport { step, outcome, seconds, peak } = *report;
        let mesh_rank = &self.run.mesh_rank;
        let config = &self.run.setup.config;
        let tokens_per_s = (config.batch * self.run.setup.data.counted) as f64 / seconds;
        let of_peak = |flops: f64| (self.peak > 0.0).then(|| tokens_per_s * flops / self.peak);
        let megatron = self.run.flops.and_then(|flops| flops.megatron);
        let record = Record {
            step,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            lr: config.lr.lr(step) * lr_factor,
            step_ms: seconds * 1e3,
            tokens_per_s,
            mfu: self.run.flops.and_then(|flops| of_peak(flops.palm)),
            flops_per_s: megatron.map(|flops| tokens_per_s * flops.hardware),
            megatron_mfu: megatron.and_then(|flops| of_peak(flops.model)),
            peak_bytes: peaks(mesh_rank, peak)?,
            validation_loss,
            skipped: std::mem::take(&mut self.skipped),
            digests: self.digests.take(),
            waited_for: self.waited_for.take(),
        };
        self.losses.push((step, outcome.loss));
        self.metrics.step(&record)?;
        self.new_files.keep();
        self.callbacks.iter_mut().try_for_each(|c| c.step(&record))
    }

    pub(crate) fn event(&mut self, event: &Event<'_>) -> Result<()> {
        self.callbacks.iter_mut().try_for_each(|c| c.event(event))
    }

    /// Writes the summary and gives it to the callbacks, unless the run goes on in another epoch.
    fn end(mut self, stopped: Option<String>) -> Result<Summary> {
        Phase::After.begin();
        self.run.setup.saver.wait()?;
        self.new_files.keep();
        if self.run.setup.config.restore_best && self.best_on_disk.is_some() && !self.run.meets_again {
            self.run.load_best()?;
        }
        if self.losses.is_empty() && self.run.validation.is_some() {
            self.last_validation = Some(self.run.validate()?);
        }
        let seconds = self.begin.elapsed().as_secs_f64();
        self.collectives()?;
        let peak_bytes = peaks(&self.run.mesh_rank, self.run.mesh_rank.device.ledger()?.total().peak)?;
        let rows = self.losses.len() * self.run.setup.config.batch;
        let summary = Summary {
            steps: self.losses.len() as u64,
            parameters: self.run.parameters,
            first_loss: self.losses.first().map_or(f64::NAN, |l| l.1),
            last_loss: self.losses.last().map_or(f64::NAN, |l| l.1),
            validation_loss: self.last_validation,
            best_validation_loss: self.run.best.loss,
            seconds,
            tokens_per_s: (rows * self.run.setup.data.counted) as f64 / seconds,
            peak_bytes,
            stopped,
        };
        if self.run.meets_again {
            return Ok(summary);
        }
        self.metrics.summary(&summary)?;
        self.callbacks.iter_mut().try_for_each(|c| c.ended(&summary))?;
        Ok(summary)
    }
}

/// Says where the run's flight recorder writes, and on which signal, and counts the waits of this thread.
fn record_flight(run: &Run) -> Result<()> {
    let Some(recorder) = run.mesh_rank.all_ranks().flight_recorder() else { return Ok(()) };
    if let Some(folder) = run.setup.config.folder() {
        recorder.set_folder(&folder.join("flight"));
    }
    recorder.count_waits();
    dump_on_signal()
}

/// Every rank's peak.
fn peaks(mesh_rank: &MeshRank, own: usize) -> Result<Vec<usize>> {
    Ok(mesh_rank.all_gather(own as f64)?.into_iter().map(|peak| peak as usize).collect())
}
