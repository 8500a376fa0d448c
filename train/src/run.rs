//! [`Run`]: one rank of a training run, from its first step to its last.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use phalanx_nn::{Batch, LossScaler, Optimizer, Parameters, cut};
use phalanx_parallel::all_gather_object;
use phalanx_parallel::checkpoint::Saver;
use phalanx_parallel::data_parallel::{DataParallel, DistributedSampler, SampleSplit};
use phalanx_parallel::hybrid::{MeshParallel, StagedModel};
use phalanx_parallel::mesh::Axis;
use phalanx_parallel::pipeline::ranks::{Observer, Pipeline, TiedTable};
use phalanx_tensor::{Device, Tensor};

use crate::data::{Data, DataLoader, DataLoaderConfig};
use crate::divergence::WatchState;
use crate::gpu_step::Captured;
use crate::identity::identity;
use crate::optimizers::{AnyRule, Averaged, Optimizers};
use crate::place::Place;
use crate::step::{Saving, TrainingSetup, in_step, pass, update};
use crate::trace::Lane;
use crate::validation::{Best, PlateauState, Validation};
use crate::{Config, Error, Result};

/// Makes the optimizers of a rank's parameters, at the schedule's peak rate.
pub type MakeOptimizers<'a> =
    &'a (dyn Fn(Vec<phalanx_nn::Parameter>, f64) -> Result<Vec<Optimizer<AnyRule>>> + Sync);

/// One rank of a run.
pub struct Run {
    pub(crate) place: Place,
    pub(crate) lane: Lane,
    /// This rank's part of the model. Under ZeRO its parameters may have no values between steps.
    pub(crate) model: Arc<dyn StagedModel>,
    pub(crate) means: TrainingSetup,
    pub(crate) optimizers: Optimizers,
    pub(crate) validation: Option<Validation>,
    pub(crate) parameters: usize,
    pub(crate) identity: BTreeMap<String, String>,
    /// Steps done.
    pub(crate) done: u64,
    /// How many steps the data is ahead of the run, after returns to a checkpoint.
    pub(crate) data_ahead: u64,
    /// The step as a CUDA graph, if steps are captured.
    pub(crate) captured: Option<Captured>,
    pub(crate) best: Best,
    /// The state of the loss watch, for checkpoints.
    pub(crate) watched: WatchState,
    /// How far plateaus have lowered the learning rate.
    pub(crate) rate: PlateauState,
    /// The loss scaler, if losses are scaled.
    pub(crate) scaler: Option<LossScaler>,
    /// Files besides those in the run's folder that get a line a step.
    pub(crate) metrics: Vec<PathBuf>,
    pub(crate) stop: Arc<AtomicBool>,
    /// Floating-point operations of a row (or token), forward and backward; 0 if unknown.
    pub(crate) flops: f64,
    /// Hooks that every rank calls every so many steps.
    pub(crate) hooks: Vec<(u64, Arc<Hook>)>,
    /// Writers of further files into the run's folder before the first step.
    pub(crate) beside: Vec<Arc<Beside>>,
}

/// Writes files into a run's folder, beside its checkpoints.
pub(crate) type Beside = dyn Fn(&Path) -> Result<()> + Send + Sync;

/// A hook that every rank calls while a run trains.
pub(crate) type Hook = dyn Fn(&Run) -> Result<Option<String>> + Send + Sync;

impl Run {
    /// A run of this rank's part of a model under the configuration's layout. All ranks call it.
    ///
    /// # Errors
    /// If settings do not fit, or memory is short.
    pub fn new(
        config: &Config,
        place: Place,
        lane: Lane,
        model: impl StagedModel,
        data: Data,
        optimizers: MakeOptimizers<'_>,
    ) -> Result<Run> {
        config.check()?;
        config.check_validation(data.validation.is_some())?;
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
            Arc::new(MeshParallel::new(&model, replicas, place.groups.clone(), &schedule)?);
        let mut trained = share.parameters();
        if config.asynchronous.is_some()
            && let Some(follower) = TiedTable::new(&model, &schedule, &line)?.filter(TiedTable::is_duplicate)
        {
            // Without flushes the last stage receives the tied table's values.
            trained.retain(|p| !p.is(follower.table()));
        }
        let parameters = count(&model, &place)?;
        let made = optimizers(trained.clone(), config.lr.peak())?;
        let optimizers = Optimizers::new(made, &trained, config.ema)?;
        let saver = Saving::new(Saver::new(place.all_ranks())?);
        let validation = match &data.validation {
            Some(validation) => Some(Validation::new(config, &place, validation.clone(), data.counted)?),
            None => None,
        };
        let means = TrainingSetup { config: config.clone(), pipeline, share, saver, data };
        let mut run = Run {
            place,
            lane,
            model: Arc::new(model),
            means,
            optimizers,
            validation,
            parameters,
            identity: identity(config),
            done: 0,
            data_ahead: 0,
            captured: None,
            best: Best::default(),
            watched: WatchState::default(),
            rate: PlateauState::default(),
            scaler: config.scales_loss().then(LossScaler::default),
            metrics: Vec::new(),
            stop: Arc::default(),
            flops: 0.0,
            hooks: Vec::new(),
            beside: Vec::new(),
        };
        run.captured = run.captures().then(|| Captured::new(run.place.device));
        Ok(run)
    }

    /// Adds an observer of this rank's actions in the pipeline.
    #[must_use]
    pub fn with_observer(self, observer: Observer) -> Run {
        let pipeline = self.means.pipeline.observer(observer);
        Run { means: TrainingSetup { pipeline, ..self.means }, ..self }
    }

    /// The settings that must be equal when a run is resumed, in place of the configuration's batch, seed and dtypes.
    #[must_use]
    pub fn with_identity(self, identity: BTreeMap<String, String>) -> Run {
        Run { identity, ..self }
    }

    /// Files besides `metrics.jsonl` in the run's folder that get a line a step.
    #[must_use]
    pub fn with_metrics(self, metrics: Vec<PathBuf>) -> Run {
        Run { metrics, ..self }
    }

    /// Sets the floating-point operations of a row (or token), forward and backward, so that records have the share of the machine's peak
    /// that is used (MFU).
    #[must_use]
    pub fn with_flops(self, flops: f64) -> Run {
        Run { flops, ..self }
    }

    /// Sets the flag that ends the run. When any rank's flag is true, the run finishes its step, saves a checkpoint, and ends.
    #[must_use]
    pub fn with_stop(self, stop: Arc<AtomicBool>) -> Run {
        Run { stop, ..self }
    }

    /// Calls `work` on every rank every `steps` steps and after the last; with 0 only after the last. It may let a language model write, or
    /// measure an accuracy. The first rank's callbacks get the text that it returns ([`Event::Sample`](crate::Event::Sample)).
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
    pub fn model(&self) -> &Arc<dyn StagedModel> {
        &self.model
    }

    /// The model's data-parallel wrapper.
    pub fn share(&self) -> &Arc<dyn DataParallel> {
        &self.means.share
    }

    /// Elements of the whole model's parameters.
    pub fn parameters(&self) -> usize {
        self.parameters
    }

    /// Steps done.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// The lowest validation loss so far.
    pub fn best_loss(&self) -> Option<f64> {
        self.best.loss
    }

    /// The values of the whole model by name, on the first rank; on others the rank's own part. All ranks call it.
    ///
    /// # Errors
    /// If a rank does not take part.
    pub fn full_state_dict(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(self.means.share.full_state_dict(&*self.model)?)
    }

    /// Replaces the weights by their averages until the result is dropped, if the run keeps averages ([`Config::ema`]) and has begun. All
    /// ranks call it.
    ///
    /// # Errors
    /// If memory is short, or a rank does not take part.
    pub fn averaged(&self) -> Result<Option<Averaged>> {
        let averages = self.optimizers.averages();
        match averages.is_empty() || self.done == 0 {
            true => Ok(None),
            false => Averaged::new(averages, self.means.share.clone()).map(Some),
        }
    }

    /// The mean loss over the validation data now. All ranks call it.
    ///
    /// # Errors
    /// If there is no validation data, or errors of a pass.
    pub fn validate(&self) -> Result<f64> {
        let Some(validation) = &self.validation else {
            return Err(Error::Config("train: there is no validation data".into()));
        };
        let _averages = self.averaged()?;
        validation.loss(&self.place, &self.model, &self.means.share)
    }

    /// The rows of each micro-batch of this rank's replica, in order.
    pub(crate) fn pieces(&self) -> Result<Vec<std::ops::Range<usize>>> {
        let (config, replicas) = (&self.means.config, self.place.replicas());
        let shares = match replicas.size() {
            1 => cut(config.batch, config.chains),
            ranks => {
                let rows = DistributedSampler::new(config.batch, ranks, replicas.rank())?
                    .with_split(SampleSplit::Blocks);
                let rows = rows.indices(0);
                vec![rows.first().map_or(0..0, |&first| first..first + rows.len())]
            }
        };
        let of_share = |share: std::ops::Range<usize>| {
            let within = cut(share.len(), config.layout.micro_batches);
            within.into_iter().map(move |r| share.start + r.start..share.start + r.end)
        };
        Ok(shares.into_iter().flat_map(of_share).collect())
    }

    /// The loader of this rank's rows from a step on.
    pub(crate) fn loader(&self, device: Device, step: u64) -> Result<DataLoader> {
        let position = step + self.data_ahead;
        let config =
            DataLoaderConfig::new(self.means.config.batch).with_pieces(self.pieces()?).with_device(device);
        config
            .with_position(position)
            .with_workers(self.means.config.workers)
            .with_ahead(self.means.config.prefetch)
            .stream(self.means.data.samples.clone())
    }

    /// One step on the caller's batches: this rank's micro-batches, in order. Returns this rank's part of the loss and the gradients' norm
    /// before clipping, f64 `[2]` on the device, without waiting for it. A step of one GPU is captured unless the configuration forbids
    /// it; the batches are then on the host. All ranks call it.
    ///
    /// # Errors
    /// An error of the step, with its number; if losses are scaled, since only [`Run::train`] reads the numbers before the update.
    pub fn step(&mut self, micros: &[Batch]) -> Result<Tensor> {
        if self.scaler.is_some() && !self.place.device.is_meta() {
            let why = "train: got loss scaling (by default in f16), wanted `train`, which leaves out steps that overflow";
            return Err(Error::Config(why.into()));
        }
        let results = in_step(self.done, self.unguarded(micros))?;
        self.done += 1;
        Ok(results)
    }

    /// A step whose loss and norm the host reads later.
    pub(crate) fn unguarded(&mut self, micros: &[Batch]) -> Result<Tensor> {
        let (lane, step) = (self.lane.clone(), self.done);
        lane.begin(step);
        // An error of the trace's file is returned by the next span.
        let watch = |phase: &'static str, begin| drop(lane.note(phase, step, begin));
        self.optimizers.set_lr(&self.means.config.lr, step, self.rate.share);
        let settings = self.means.settings(&watch);
        if let (Some(captured), Some(optimizer)) = (&mut self.captured, self.optimizers.only()) {
            return Ok(captured.step(&self.model, optimizer, micros, settings, step)?.clone());
        }
        let passed = pass(&self.model, &self.optimizers, micros, settings, step)?;
        update(&mut self.optimizers, &passed, settings)?;
        Ok(passed.results)
    }

    /// Whether steps are captured: on a GPU, unless the configuration or the run prevents it.
    pub(crate) fn captures(&mut self) -> bool {
        self.means.config.device.is_cuda() && self.means.config.capture && self.why_uncaptured().is_none()
    }

    /// Why the steps of a run on a GPU cannot be captured although the configuration asks for it. Ranks exchange data through the host in
    /// each step, and a trace needs the parts of a step.
    pub(crate) fn why_uncaptured(&mut self) -> Option<&'static str> {
        let config = &self.means.config;
        if !config.device.is_cuda() || !config.capture {
            return None;
        }
        let several = self.optimizers.only().is_none();
        let config = &self.means.config;
        let reasons = [
            (config.ranks() > 1 || config.zero > 0, "there are several ranks, or ZeRO"),
            (config.asynchronous.is_some(), "the pipeline has no flushes"),
            (config.trace.is_some(), "a trace has what a step consists of"),
            (self.is_guarded(), "the numbers of a step are looked at before its update"),
            (several, "there are several optimizers"),
        ];
        reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
    }

    /// Whether a step's loss and norm are read before its update. On a GPU reading them is a wait in each step, so it is done only if an
    /// update may have to be skipped.
    pub(crate) fn is_guarded(&self) -> bool {
        let Config { device, on_divergence, .. } = self.means.config;
        let waits = device.is_cuda() && on_divergence == crate::OnDivergence::Stop && self.scaler.is_none();
        !waits && !device.is_meta()
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
    let all: BTreeMap<String, usize> = all_gather_object(line, &own)?.into_iter().flatten().collect();
    Ok(all.values().sum())
}
