//! [`Run`]: one rank of a training run, from its first step to its last.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use phalanx_nn::{Batch, Optimizer, Parameters, cut};
use phalanx_parallel::checkpoint::Saver;
use phalanx_parallel::data_parallel::DataParallel;
use phalanx_parallel::hybrid::{OnMesh, Part};
use phalanx_parallel::mesh::Axis;
use phalanx_parallel::pipeline::ranks::{Observer, Pipeline, TiedTable};
use phalanx_tensor::{Device, Tensor};

use crate::ahead::Ahead;
use crate::callback::{Callback, Event};
use crate::captured::Captured;
use crate::checkpoints::{self, Checkpoints};
use crate::data::{DataLoader, DataLoaderConfig, Dataset, Samples};
use crate::divergence::{Verdict, Watch, origin};
use crate::optimizers::{AnyRule, Optimizers};
use crate::outputs::{Outputs, remove_leftovers};
use crate::place::Place;
use crate::record::{Metrics, Record, Summary, Told};
use crate::step::{Outcome, Passed, Saving, Settings, in_step, pass, update};
use crate::trace::Lane;
use crate::validation::{Best, Validation};
use crate::{Config, Error, Result, asynchronous};

/// What optimizers a rank's parameters get.
pub type MakeOptimizers<'a> =
    &'a (dyn Fn(Vec<phalanx_nn::Parameter>, f64) -> Result<Vec<Optimizer<AnyRule>>> + Sync);

/// What a run reads.
#[derive(Clone)]
pub struct Data {
    /// Training samples. Row r of step s is sample `s * batch + r`.
    pub samples: Arc<dyn Samples>,
    /// What of a row counts in the mean loss: 1, or the tokens of a sequence.
    pub counted: usize,
    /// Data that is not trained on.
    pub validation: Option<Arc<dyn Dataset>>,
    /// Threads that read.
    pub workers: usize,
}

/// How a rank trains, and with whom.
pub(crate) struct Means {
    pub config: Config,
    /// What this rank runs of the model, and in which order.
    pub pipeline: Pipeline,
    /// What the ranks share of the model.
    pub share: Arc<dyn DataParallel>,
    pub saver: Saving,
    /// What of a row counts.
    counted: usize,
}

impl Means {
    fn settings<'a>(&'a self, watch: &'a dyn Fn(&'static str, Instant)) -> Settings<'a> {
        let Means { config, pipeline, share: ranks, saver, counted } = self;
        let Config { chains, clip, seed, batch, .. } = *config;
        Settings { chains, counted: batch * counted, ranks, pipeline, saver, clip, seed, watch }
    }
}

/// One rank of a run.
pub struct Run {
    place: Place,
    pub(crate) lane: Lane,
    /// This rank's part of the model, which may hold no values outside of a step.
    pub(crate) model: Arc<dyn Part>,
    pub(crate) means: Means,
    pub(crate) optimizers: Optimizers,
    pub(crate) data: Data,
    validation: Option<Validation>,
    parameters: usize,
    identity: BTreeMap<String, String>,
    /// Steps done.
    done: u64,
    /// How much further than the step the data is, since steps were left behind.
    pub(crate) data_ahead: u64,
    /// The step as a graph, if it is to be one.
    captured: Option<Captured>,
    best: Best,
    /// Files besides those in the run's folder that get a line a step.
    metrics: Vec<PathBuf>,
    stop: Arc<AtomicBool>,
    /// What is done on every rank after every so many steps.
    hooks: Vec<(u64, Arc<Hook>)>,
}

/// What is done on every rank while a run trains.
type Hook = dyn Fn(&Run) -> Result<Option<String>> + Send + Sync;

impl Run {
    /// This rank's part of a model under the configuration's layout, with what it trains on. All ranks call it.
    ///
    /// # Errors
    /// If settings do not fit, or memory is short.
    pub fn new(
        config: &Config,
        place: Place,
        lane: Lane,
        model: impl Part,
        data: Data,
        optimizers: MakeOptimizers<'_>,
    ) -> Result<Run> {
        config.check()?;
        let (layout, line) = (&config.layout, place.groups.along(Axis::Pp).clone());
        let schedule = layout.schedule()?;
        let mut pipeline = Pipeline::new(&schedule, line.clone(), place.device)?;
        if schedule.stages() > 1 {
            pipeline = pipeline.recompute(layout.recompute);
        }
        if config.device.is_meta() {
            pipeline = pipeline.with_slow_receivers()?;
        }
        if let Some(observer) = lane.actions() {
            pipeline = pipeline.observer(observer);
        }
        model.parameters().iter().try_for_each(|p| p.set_grad_dtype(config.grad_dtype()))?;
        let replicas = place.share(&model, config)?;
        let share: Arc<dyn DataParallel> =
            Arc::new(OnMesh::new(&model, replicas, place.groups.clone(), &schedule)?);
        let mut trained = share.parameters();
        if config.asynchronous.is_some()
            && let Some(follower) = TiedTable::new(&model, &schedule, &line)?.filter(TiedTable::is_duplicate)
        {
            // Without flushes the last stage receives the tied table's values.
            trained.retain(|p| !p.is(follower.table()));
        }
        let parameters = count(&model, &place)?;
        let optimizers = Optimizers::new(optimizers(trained, config.lr.peak())?);
        let saver = Saving::new(Saver::new(place.all_ranks())?);
        let validation = match &data.validation {
            Some(validation) => Some(Validation::new(config, &place, validation.clone(), data.counted)?),
            None => None,
        };
        let means = Means { config: config.clone(), pipeline, share, saver, counted: data.counted };
        let mut run = Run {
            place,
            lane,
            model: Arc::new(model),
            means,
            optimizers,
            data,
            validation,
            parameters,
            identity: identity(config),
            done: 0,
            data_ahead: 0,
            captured: None,
            best: Best::default(),
            metrics: Vec::new(),
            stop: Arc::default(),
            hooks: Vec::new(),
        };
        run.captured = run.captures().then(|| Captured::new(run.place.device));
        Ok(run)
    }

    /// Lets somebody hear of this rank's actions.
    #[must_use]
    pub fn with_observer(self, observer: Observer) -> Run {
        let pipeline = self.means.pipeline.observer(observer);
        Run { means: Means { pipeline, ..self.means }, ..self }
    }

    /// Settings that a resumed run has to share with the one that it goes on with, instead of the configuration's batch, seed and
    /// dtypes.
    #[must_use]
    pub fn with_identity(self, identity: BTreeMap<String, String>) -> Run {
        Run { identity, ..self }
    }

    /// Files besides `metrics.jsonl` in the run's folder that get a line a step.
    #[must_use]
    pub fn with_metrics(self, metrics: Vec<PathBuf>) -> Run {
        Run { metrics, ..self }
    }

    /// What ends the run after the step under way, with a checkpoint, when it is set on any rank.
    #[must_use]
    pub fn with_stop(self, stop: Arc<AtomicBool>) -> Run {
        Run { stop, ..self }
    }

    /// Does something on every rank after every so many steps, and after the last: lets a language model write, or measures what a
    /// validation does not. What the first rank returns is told to its callbacks ([`Event::Sample`]). Only after the last, if 0.
    #[must_use]
    pub fn every(
        mut self,
        steps: u64,
        work: impl Fn(&Run) -> Result<Option<String>> + Send + Sync + 'static,
    ) -> Run {
        self.hooks.push((steps, Arc::new(work)));
        self
    }

    /// How the run trains.
    pub fn config(&self) -> &Config {
        &self.means.config
    }

    /// This rank's place among all.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// This rank's part of the model.
    pub fn model(&self) -> &Arc<dyn Part> {
        &self.model
    }

    /// What the ranks share of it.
    pub fn share(&self) -> &Arc<dyn DataParallel> {
        &self.means.share
    }

    /// Elements of the whole model's parameters.
    pub fn parameters(&self) -> usize {
        self.parameters
    }

    pub(crate) fn identity(&self) -> &BTreeMap<String, String> {
        &self.identity
    }

    pub(crate) fn best(&self) -> &Best {
        &self.best
    }

    /// Steps done.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Puts the run where the checkpoint in a run's folder left it, whatever the layout it was saved under. All ranks call it.
    ///
    /// # Errors
    /// If there is none, it is of another run, or damaged.
    pub fn resume(&mut self, folder: &Path) -> Result<()> {
        let saved = checkpoints::latest(folder)?;
        let position = checkpoints::restore(&saved, self, &self.identity.clone())?;
        (self.done, self.data_ahead, self.best) = (position.step, position.data_ahead, position.best);
        if self.done > self.means.config.steps {
            let (steps, done) = (self.means.config.steps, self.done);
            return Err(Error::Config(format!("--steps {steps} is the total, and the run has done {done}")));
        }
        Ok(())
    }

    /// The mean loss over the validation data now. All ranks call it.
    ///
    /// # Errors
    /// If there is none, or what goes wrong in a pass.
    pub fn validate(&mut self) -> Result<f64> {
        let Some(validation) = &self.validation else {
            return Err(Error::Config("train: there is no validation data".into()));
        };
        validation.loss(&self.place, &self.model, &self.means.share)
    }

    /// Trains up to the last step. All ranks call it; callbacks are the first rank's.
    ///
    /// # Errors
    /// What goes wrong in a step, with its number; what a callback or a file says.
    pub fn train(&mut self, callbacks: &mut [Box<dyn Callback>]) -> Result<Summary> {
        let first = self.place.is_first();
        Training::new(self, if first { callbacks } else { &mut [] })?.go()
    }

    /// The rows of each micro-batch of this rank's replica, in order.
    pub(crate) fn pieces(&self) -> Vec<std::ops::Range<usize>> {
        let (config, replicas) = (&self.means.config, self.place.replicas());
        let shares = match replicas.size() {
            1 => cut(config.batch, config.chains),
            ranks => vec![cut(config.batch, ranks).swap_remove(replicas.rank())],
        };
        let of_share = |share: std::ops::Range<usize>| {
            let within = cut(share.len(), config.layout.micro_batches);
            within.into_iter().map(move |r| share.start + r.start..share.start + r.end)
        };
        shares.into_iter().flat_map(of_share).collect()
    }

    /// What reads this rank's rows from a step on.
    pub(crate) fn loader(&self, device: Device, step: u64) -> Result<DataLoader> {
        let position = step + self.data_ahead;
        let config =
            DataLoaderConfig::new(self.means.config.batch).with_pieces(self.pieces()).with_device(device);
        config.with_position(position).with_workers(self.data.workers).stream(self.data.samples.clone())
    }

    /// One step on batches of the caller's own: this rank's micro-batches, in order. Returns this rank's part of the loss and the
    /// gradients' norm before clipping, f64 `[2]`, on the device, which is not waited for. A step of one GPU is captured, if the
    /// configuration does not object; batches are the host's then. All ranks call it.
    ///
    /// # Errors
    /// What goes wrong in the step, with its number.
    pub fn step(&mut self, micros: &[Batch]) -> Result<Tensor> {
        let results = in_step(self.done, self.unguarded(micros))?;
        self.done += 1;
        Ok(results)
    }

    /// A step whose numbers come when they are there.
    fn unguarded(&mut self, micros: &[Batch]) -> Result<Tensor> {
        let (lane, step) = (self.lane.clone(), self.done);
        lane.begin(step);
        // What cannot be written is said by the next span.
        let watch = |phase: &'static str, begin| drop(lane.note(phase, step, begin));
        self.optimizers.set_lr(&self.means.config.lr, step);
        let settings = self.means.settings(&watch);
        if let (Some(captured), Some(optimizer)) = (&mut self.captured, self.optimizers.only()) {
            return Ok(captured.step(&self.model, optimizer, micros, settings, step)?.clone());
        }
        let passed = pass(&self.model, &self.optimizers, micros, settings, step)?;
        update(&mut self.optimizers, &passed, settings)?;
        Ok(passed.results)
    }

    /// Whether steps are to be captured: on one GPU, unless told otherwise. Ranks meet on the host in each step, and a trace wants to
    /// know what a step consists of.
    fn captures(&mut self) -> bool {
        let config = &self.means.config;
        let alone = config.ranks() == 1 && config.zero == 0 && config.asynchronous.is_none();
        let wanted = config.device.is_cuda() && alone && config.trace.is_none() && config.capture;
        wanted && !self.is_guarded() && self.optimizers.only().is_some()
    }

    /// Whether a step's numbers are looked at before its update. On a GPU that would be a wait in each step, so there it is only
    /// done where an update may have to be left out.
    fn is_guarded(&self) -> bool {
        let waits = self.means.config.device.is_cuda()
            && self.means.config.on_divergence == crate::OnDivergence::Stop;
        !waits && !self.means.config.device.is_meta()
    }
}

/// Elements of the whole model's parameters. All ranks call it.
fn count(model: &impl Parameters, place: &Place) -> Result<usize> {
    let size = |p: &phalanx_nn::Parameter| p.global_shape().iter().product::<usize>();
    let own: Vec<(String, usize)> =
        model.parameters().iter().map(|p| (p.name().to_string(), size(p))).collect();
    let line = place.groups.along(Axis::Pp);
    if line.size() == 1 || !line.has_peers() {
        return Ok(own.iter().map(|(_, size)| size).sum());
    }
    let told = serde_json::to_string(&own).map_err(|e| Error::data("parameters", e.to_string()))?;
    let mut all = BTreeMap::new();
    for stage in crate::place::texts(line, &told)? {
        let stage: Vec<(String, usize)> =
            serde_json::from_str(&stage).map_err(|e| Error::data("parameters", e.to_string()))?;
        all.extend(stage);
    }
    Ok(all.values().sum())
}

/// What changes a run's numbers by more than the order of additions, which is the layout's.
fn identity(config: &Config) -> BTreeMap<String, String> {
    let pairs = [
        ("batch", config.batch.to_string()),
        ("seed", config.seed.to_string()),
        ("dtype", config.dtype.to_string()),
        ("grad_dtype", config.grad_dtype().to_string()),
    ];
    pairs.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// A run while it trains.
struct Training<'a> {
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
    fn new(run: &'a mut Run, callbacks: &'a mut [Box<dyn Callback>]) -> Result<Training<'a>> {
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
        let parameters = run.parameters;
        callbacks.iter_mut().try_for_each(|c| c.started(&config, done, parameters))?;
        Ok(Training {
            watch: Watch::new(&config),
            run,
            callbacks,
            metrics,
            fresh,
            checkpoints,
            loader,
            ahead,
            losses: Vec::new(),
            last_validation: None,
            begin: Instant::now(),
        })
    }

    fn go(mut self) -> Result<Summary> {
        let mut stopped = None;
        while self.run.done < self.run.means.config.steps && stopped.is_none() {
            let end = self.next_pause();
            let (told, interrupted) = match self.run.means.config.asynchronous {
                Some(kind) => (self.stretch(kind, end)?, false),
                None => match self.step(end)? {
                    Some(told) => told,
                    None => continue,
                },
            };
            let paused = self.run.done == end || interrupted;
            let validated = if self.is_validated(interrupted) { Some(self.validate()?) } else { None };
            let last = told.last().map(|told| told.step);
            for told in told {
                self.record(&told, validated.filter(|_| Some(told.step) == last))?;
            }
            if interrupted {
                stopped = Some("interrupted".to_string());
            } else if self.run.means.config.patience.is_some_and(|most| self.run.best.since >= most) {
                stopped = Some(format!("{} validations without a lower loss", self.run.best.since));
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
        let due = |every: u64| if every == 0 { steps } else { (self.run.done / every + 1) * every };
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

    fn is_validated(&self, interrupted: bool) -> bool {
        self.run.validation.is_some() && (self.is_due(self.run.means.config.validate_every) || interrupted)
    }

    /// A step, and what was told meanwhile; whether the run is to end. Nothing if it has gone back.
    fn step(&mut self, end: u64) -> Result<Option<(Vec<Told>, bool)>> {
        let (since, step) = (Instant::now(), self.run.done);
        let peak = |run: &Run| -> Result<usize> { Ok(run.place.device.ledger()?.total().peak) };
        if self.run.is_guarded() {
            let (outcome, interrupted, done) = in_step(step, self.guarded(step))?;
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
        lane.span("data", step, || loader.next_step())
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
            checkpoints.save_best(self.run)?;
        }
        Ok(loss)
    }

    fn record(&mut self, told: &Told, validation_loss: Option<f64>) -> Result<()> {
        let Told { step, outcome, seconds, peak } = *told;
        let place = &self.run.place;
        let config = &self.run.means.config;
        let record = Record {
            step,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            lr: config.lr.lr(step),
            step_ms: seconds * 1e3,
            tokens_per_s: (config.batch * self.run.data.counted) as f64 / seconds,
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
        let seconds = self.begin.elapsed().as_secs_f64();
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
    Ok(place.texts(&own)?.into_iter().find(|text| !text.is_empty()).unwrap_or_default())
}

/// Every rank's peak.
fn peaks(place: &Place, own: usize) -> Result<Vec<usize>> {
    Ok(place.all(own as f64)?.into_iter().map(|peak| peak as usize).collect())
}

/// What the first rank writes while a run goes.
fn files(run: &Run, fresh: &mut Outputs) -> Result<Metrics> {
    let config = &run.means.config;
    let own = config.folder().map(|folder| folder.join("metrics.jsonl"));
    if let Some(out) = config.folder() {
        let continued = config.resume.as_deref().is_some_and(|from| checkpoints::same_folder(from, out));
        if !continued && out.join(checkpoints::NAME).exists() {
            let out = out.display();
            return Err(Error::Config(format!(
                "{out} holds a run: continue it with --resume {out}, or choose another --out"
            )));
        }
        fresh.folder(out)?;
        remove_leftovers(out);
    }
    for path in run.metrics.iter().chain(&own).chain(&config.trace) {
        fresh.file(path);
    }
    let metrics = Metrics::create(&run.metrics, own.as_deref(), run.done)?;
    config.trace.as_ref().map_or(Ok(()), |path| run.lane.open(path))?;
    Ok(metrics)
}
