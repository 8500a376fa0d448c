//! [`Run`]: one rank of a training run, from its first step to its last.
//!
//! ```text
//! Run::train
//!    v
//! training_loop               steps, validations, checkpoints, hooks; output_files opens the files
//!    |-- checked_step         the loss and the norm are read before the update, which divergence may skip
//!    |-- Run::unchecked_step  they are read later (pending_steps); on one GPU the step is a CUDA graph (captured_step)
//!    |-- asynchronous_steps   steps of a pipeline without flushes
//!    v
//! step, optimizers            forward and backward passes over micro-batches, clipping, update
//! ```
//! `waits` finds slow ranks. `saving` has the checkpoints of the loop.
//! `profile` and `inspect` measure steps: the time of each operation, and one step's timeline and memory.

mod asynchronous_steps;
mod captured_step;
mod change;
mod checked_step;
mod digests;
pub(crate) mod divergence;
pub(crate) mod inspect;
pub(crate) mod optimizers;
mod output_files;
mod pauses;
mod pending_steps;
mod profile;
pub(crate) mod replay;
mod saving;
mod second_look;
mod step;
mod training_loop;
pub(crate) mod validation;
pub(crate) mod waits;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use phalanx_nn::autograd::SaveOnCpu;
use phalanx_nn::models::FlopsPerToken;
use phalanx_nn::{Batch, LossScaler, Optimizer, Parameters, UpdateGuard, cut};
use phalanx_parallel::all_gather_object;
use phalanx_parallel::checkpoint::Saver;
use phalanx_parallel::data_parallel::{DataParallel, DistributedSampler, SampleSplit};
use phalanx_parallel::hybrid::StagedModel;
use phalanx_parallel::launch::Rank;
use phalanx_parallel::mesh::Axis;
use phalanx_parallel::pipeline::ranks::{Observer, Pipeline, TiedTable};
use phalanx_tensor::io::MappedFile;
use phalanx_tensor::{Context, Device, Tensor};

use self::captured_step::CapturedTrainingStep;
use self::divergence::LossWatchState;
use self::optimizers::{AnyRule, Averaged, Optimizers};
use self::step::{
    BackgroundSaver, StepOptions, TrainingSetup, compute_gradients, in_model_dtype, in_step, update,
};
use self::validation::{BestLoss, PlateauState, Validation};
use crate::checkpoints::FrozenParameters;
use crate::data::{Data, DataLoader, DataLoaderConfig};
use crate::identity::identity;
use crate::mesh_rank::MeshRank;
use crate::trace::RankTrace;
use crate::{Config, Error, Offload, Result};

/// Makes the optimizers of a rank's parameters, at the schedule's peak rate.
pub type MakeOptimizers<'a> =
    &'a (dyn Fn(Vec<phalanx_nn::Parameter>, f64) -> Result<Vec<Optimizer<AnyRule>>> + Sync);

/// One rank of a run.
pub struct Run {
    pub(crate) mesh_rank: MeshRank,
    pub(crate) trace: RankTrace,
    /// This rank's part of the model. Under ZeRO its parameters may have no values between steps.
    pub(crate) model: Arc<dyn StagedModel>,
    pub(crate) setup: TrainingSetup,
    pub(crate) optimizers: Optimizers,
    pub(crate) validation: Option<Validation>,
    pub(crate) parameters: usize,
    pub(crate) identity: BTreeMap<String, String>,
    /// Steps done.
    pub(crate) done: u64,
    /// How many steps the data is ahead of the run, after returns to a checkpoint.
    pub(crate) data_ahead: u64,
    /// The step as a CUDA graph, if steps are captured.
    pub(crate) captured: Option<CapturedTrainingStep>,
    /// Leaves out the updates of steps whose numbers are read later.
    pub(crate) guard: UpdateGuard,
    pub(crate) best: BestLoss,
    /// The state of the loss watch, for checkpoints.
    pub(crate) loss_watch: LossWatchState,
    /// How far plateaus have lowered the learning rate.
    pub(crate) plateau: PlateauState,
    /// The loss scaler, if losses are scaled.
    pub(crate) scaler: Option<LossScaler>,
    /// Files besides those in the run's folder that get a line a step.
    pub(crate) metrics: Vec<PathBuf>,
    pub(crate) stop: Arc<AtomicBool>,
    /// Floating-point operations of a row (or token), forward and backward; 0 if unknown.
    pub(crate) flops: Option<FlopsPerToken>,
    /// Hooks that every rank calls every so many steps.
    pub(crate) hooks: Vec<(u64, Arc<Hook>)>,
    /// Functions that write further files into the run's folder before the first step.
    pub(crate) extra_files: Vec<Arc<WriteFiles>>,
    /// The parameters that are not trained, if they are in no checkpoint.
    pub(crate) frozen: Option<FrozenParameters>,
    /// If processes were replaced: which, and from where the run goes on.
    pub(crate) recovered: Option<String>,
    /// The number of data-parallel ranks that the restored checkpoint was saved by.
    pub(crate) dp_before: Option<usize>,
    /// This process in its epoch, if ranks that wait are let in.
    pub(crate) process: Option<Rank>,
    /// Whether the run has ended in this epoch, to go on in the next one.
    pub(crate) meets_again: bool,
}

/// Writes further files into a run's folder.
pub(crate) type WriteFiles = dyn Fn(&Path) -> Result<()> + Send + Sync;

/// A hook that every rank calls while a run trains.
pub(crate) type Hook = dyn Fn(&Run) -> Result<Option<String>> + Send + Sync;

impl Run {
    /// A run of this rank's part of a model under the configuration's layout. All ranks call it.
    ///
    /// # Errors
    /// If settings do not fit, or memory is short.
    pub fn new(
        config: &Config,
        mesh_rank: MeshRank,
        trace: RankTrace,
        model: impl StagedModel,
        data: Data,
        optimizers: MakeOptimizers<'_>,
    ) -> Result<Run> {
        config.check()?;
        config.check_validation(data.validation.is_some())?;
        let trace = trace.recorded(mesh_rank.all_ranks().flight_recorder());
        let (layout, line) = (&config.layout, mesh_rank.groups.along(Axis::Pp).clone());
        let schedule = layout.schedule()?;
        let mut pipeline = Pipeline::new(&schedule, line.clone(), mesh_rank.device)?;
        if schedule.stages() > 1 {
            pipeline = pipeline.recompute(layout.recompute);
        }
        if layout.scatter_gather {
            pipeline = pipeline.scatter_gather(mesh_rank.groups.along(Axis::Tp));
        }
        if config.device.is_meta() {
            pipeline = pipeline.with_slow_receivers()?;
        }
        if let Some(observer) = trace.actions() {
            pipeline = pipeline.observer(observer);
        }
        if config.asynchronous.is_some() && !model.router_biases().is_empty() {
            let why =
                "train: biases of routers go with a `schedule` that flushes between steps, got pipedream";
            return Err(Error::Config(why.into()));
        }
        model.parameters().iter().try_for_each(|p| p.set_grad_dtype(config.grad_dtype()))?;
        let data_parallel: Arc<dyn DataParallel> = Arc::new(mesh_rank.mesh_parallel(&model, config)?);
        let mut trained = data_parallel.parameters();
        if config.asynchronous.is_some()
            && let Some(follower) = TiedTable::new(&model, &schedule, &line)?.filter(TiedTable::is_duplicate)
        {
            // Without flushes the last stage receives the tied table's values.
            trained.retain(|p| !p.is(follower.table()));
        }
        let parameters = count(&model, &mesh_rank)?;
        let optimizers = {
            // The file lives as long as the state in it.
            let state_file = state_file(config, &mesh_rank)?;
            let _memory = state_file.as_ref().map(|file| Context::with(|c| c.host_memory = file.memory()));
            let made = optimizers(trained.clone(), config.lr.peak())?;
            Optimizers::new(made, &trained, config.ema, data_parallel.peers())?
        };
        let saver = Saver::new(mesh_rank.all_ranks())?
            .require_finite(!config.allow_not_finite)
            .with_memory(config.save_memory_mib.saturating_mul(1 << 20));
        let validation = match &data.validation {
            Some(validation) => Some(Validation::new(config, &mesh_rank, validation.clone(), data.counted)?),
            None => None,
        };
        let activations = match config.offload_activations {
            true => Some(Arc::new(SaveOnCpu::new(mesh_rank.offload_device(config)?))),
            false => None,
        };
        let saver = BackgroundSaver::new(saver);
        let setup =
            TrainingSetup { config: config.clone(), pipeline, data_parallel, activations, saver, data };
        let mut run = Run {
            mesh_rank,
            trace,
            model: Arc::new(model),
            setup,
            optimizers,
            validation,
            parameters,
            identity: identity(config),
            done: 0,
            data_ahead: 0,
            captured: None,
            guard: UpdateGuard::once(),
            best: BestLoss::default(),
            loss_watch: LossWatchState::default(),
            plateau: PlateauState::default(),
            scaler: config.scales_loss().then(LossScaler::default),
            metrics: Vec::new(),
            stop: Arc::default(),
            flops: None,
            hooks: Vec::new(),
            extra_files: Vec::new(),
            frozen: None,
            recovered: None,
            dp_before: None,
            process: None,
            meets_again: false,
        };
        run.guard_updates(UpdateGuard::once());
        Ok(run)
    }

    /// Adds an observer of this rank's actions in the pipeline.
    #[must_use]
    pub fn with_observer(self, observer: Observer) -> Run {
        let pipeline = self.setup.pipeline.observer(observer);
        Run { setup: TrainingSetup { pipeline, ..self.setup }, ..self }
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
    /// that is used (MFU), and with Megatron-LM's formula the rate of FLOP/s.
    #[must_use]
    pub fn with_flops(self, flops: impl Into<FlopsPerToken>) -> Run {
        Run { flops: Some(flops.into()), ..self }
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
        &self.setup.config
    }

    /// This rank of the mesh: its device and its communicators.
    pub fn mesh_rank(&self) -> &MeshRank {
        &self.mesh_rank
    }

    /// This rank's part of the model.
    pub fn model(&self) -> &Arc<dyn StagedModel> {
        &self.model
    }

    /// The model's data-parallel wrapper.
    pub fn data_parallel(&self) -> &Arc<dyn DataParallel> {
        &self.setup.data_parallel
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
        Ok(self.setup.data_parallel.full_state_dict(&*self.model)?)
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
            false => {
                // A checkpoint that is being saved reads the weights.
                self.setup.saver.release()?;
                Averaged::new(averages, self.setup.data_parallel.clone()).map(Some)
            }
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
        validation.loss(&self.mesh_rank, &self.model, &self.setup.data_parallel)
    }

    /// The rows of each micro-batch of this rank's replica, in order.
    pub(crate) fn micro_batch_rows(&self) -> Result<Vec<std::ops::Range<usize>>> {
        let (config, replicas) = (&self.setup.config, self.mesh_rank.replicas());
        let pieces = match replicas.size() {
            1 => cut(config.batch, config.chains),
            ranks => {
                let rows = DistributedSampler::new(config.batch, ranks, replicas.rank())?
                    .with_split(SampleSplit::Blocks);
                let rows = rows.indices(0);
                vec![rows.first().map_or(0..0, |&first| first..first + rows.len())]
            }
        };
        let micro_batches = |piece: std::ops::Range<usize>| {
            let within = cut(piece.len(), config.layout.micro_batches);
            within.into_iter().map(move |r| piece.start + r.start..piece.start + r.end)
        };
        Ok(pieces.into_iter().flat_map(micro_batches).collect())
    }

    /// How often rows of a step's global batch count in its mean loss.
    pub(crate) fn counted(&self, step: u64, rows: std::ops::Range<usize>) -> usize {
        self.setup.counted(step + self.data_ahead, rows)
    }

    /// How often the global batch of a step counts.
    pub(crate) fn counted_in(&self, step: u64) -> usize {
        self.counted(step, 0..self.setup.config.batch)
    }

    /// The loader of this rank's rows from a step on.
    pub(crate) fn loader(&self, device: Device, step: u64) -> Result<DataLoader> {
        let position = step + self.data_ahead;
        let config = DataLoaderConfig::new(self.setup.config.batch)
            .with_pieces(self.micro_batch_rows()?)
            .with_device(device);
        config
            .with_position(position)
            .with_workers(self.setup.config.workers)
            .with_ahead(self.setup.config.prefetch)
            .stream(self.setup.data.samples.clone())
    }

    /// This rank's micro-batches of a step that was done, on its device.
    pub(crate) fn batches_of(&self, step: u64) -> Result<Vec<Batch>> {
        let batches = self.loader(self.mesh_rank.device, step)?.next_step()?;
        batches.into_iter().map(|batch| in_model_dtype(batch, self.setup.config.dtype)).collect()
    }

    /// One step on the caller's batches: this rank's micro-batches, in order. Returns this rank's part of the loss and the gradients' norm
    /// before clipping, f64 `[2]` on the device, without waiting for it. If the norm is not finite, no parameter changes; on a GPU rules of
    /// whole parameters (Muon, LAMB, Adafactor) then take a gradient of 0. A step of one GPU is captured unless the configuration forbids it;
    /// the batches are then on the host. Where samples count unlike often ([`Samples::counted`](crate::data::Samples::counted)), the loss is
    /// divided by the number of the run's own batch of this step. All ranks call it.
    ///
    /// # Errors
    /// An error of the step, with its number; if losses are scaled, since only [`Run::train`] reads the numbers before the update.
    pub fn step(&mut self, micros: &[Batch]) -> Result<Tensor> {
        if self.scaler.is_some() && !self.mesh_rank.device.is_meta() {
            let why = "train: got loss scaling (by default in f16), wanted `train`, which leaves out steps that overflow";
            return Err(Error::Config(why.into()));
        }
        let results = in_step(self.done, self.unchecked_step(micros))?;
        self.done += 1;
        Ok(results)
    }

    /// A step whose loss and norm the host reads after the update, if at all.
    pub(crate) fn unchecked_step(&mut self, micros: &[Batch]) -> Result<Tensor> {
        let (trace, step) = (self.trace.clone(), self.done);
        trace.begin(step);
        // An error of the trace's file is returned by the next span.
        let watch = |phase: &'static str, begin| drop(trace.note(phase, step, begin));
        self.optimizers.set_lr(&self.setup.config.lr, step, self.plateau.lr_factor);
        let counted = self.counted_in(step);
        let options = StepOptions { guard: Some(&self.guard), ..self.setup.step_options(counted, &watch) };
        if let (Some(captured), Some(optimizer)) = (&mut self.captured, self.optimizers.only()) {
            return Ok(captured.step(&self.model, optimizer, micros, options, step)?.clone());
        }
        let gradients = compute_gradients(&self.model, &self.optimizers, micros, options, step)?;
        update(&mut self.optimizers, &gradients, options)?;
        Ok(gradients.results)
    }

    /// Guards the updates of later steps in another way.
    pub(crate) fn guard_updates(&mut self, guard: UpdateGuard) {
        self.guard = guard;
        self.captured = self.captures().then(|| CapturedTrainingStep::new(self.mesh_rank.device));
    }

    /// Whether steps are captured: on a GPU, unless the configuration or the run prevents it.
    pub(crate) fn captures(&mut self) -> bool {
        self.setup.config.device.is_cuda() && self.setup.config.capture && self.why_uncaptured().is_none()
    }

    /// Why the driver has refused to capture this run's steps, if it has. They run one by one then, with the same numbers.
    pub fn why_not_captured(&self) -> Option<&str> {
        self.captured.as_ref()?.refusal()
    }

    /// Why the steps of a run on a GPU cannot be captured although the configuration asks for it. Ranks exchange data through the host in
    /// each step, and a trace needs the parts of a step.
    pub(crate) fn why_uncaptured(&mut self) -> Option<&'static str> {
        let config = &self.setup.config;
        if !config.device.is_cuda() || !config.capture {
            return None;
        }
        let only = self.optimizers.only().map(|optimizer| optimizer.can_be_captured());
        let config = &self.setup.config;
        let reasons = [
            (config.ranks() > 1 || config.zero > 0, "there are several ranks, or ZeRO"),
            (config.offload != Offload::None, "the host updates the parameters"),
            (config.offload_activations, "activations are copied to the host"),
            (config.asynchronous.is_some(), "the pipeline has no flushes"),
            (config.trace.is_some(), "a trace has what a step consists of"),
            (
                self.setup.data.samples.counted(0).is_some(),
                "each step's loss is divided by another count of tokens",
            ),
            (self.checks_steps(), "the numbers of a step are looked at before its update"),
            (only.is_none(), "there are several optimizers"),
            (only == Some(false), "the optimizer's updates depend on whole parameters"),
        ];
        reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
    }

    /// Whether a step's loss and norm are read before its update. On a GPU reading them is a wait in each step, so it is done only if an
    /// update may have to be skipped, or digests are taken before and after it.
    pub(crate) fn checks_steps(&self) -> bool {
        let Config { device, on_divergence, digests, check_replicas, .. } = self.setup.config;
        let skips = matches!(on_divergence, crate::OnDivergence::Skip { .. }) || self.scaler.is_some();
        !device.is_meta() && (skips || digests + check_replicas > 0 || !device.is_cuda())
    }
}

/// The file for this rank's optimizer state, if it is to be in one.
fn state_file(config: &Config, mesh_rank: &MeshRank) -> Result<Option<MappedFile>> {
    let Some(folder) = &config.offload_dir else { return Ok(None) };
    std::fs::create_dir_all(folder)
        .map_err(|error| Error::Config(format!("train: `offload-dir` {}: {error}", folder.display())))?;
    Ok(Some(MappedFile::create(folder.join(format!("optimizer-state-rank{}.bin", mesh_rank.rank())))?))
}

/// Elements of the whole model's parameters. All ranks call it.
fn count(model: &impl Parameters, mesh_rank: &MeshRank) -> Result<usize> {
    let size = |p: &phalanx_nn::Parameter| p.global_shape().iter().product::<usize>();
    let own: Vec<(String, usize)> =
        model.parameters().iter().map(|p| (p.name().to_string(), size(p))).collect();
    let line = mesh_rank.groups.line();
    if line.size() == 1 || !line.has_peers() {
        return Ok(own.iter().map(|(_, size)| size).sum());
    }
    let all: BTreeMap<String, usize> = all_gather_object(line, &own)?.into_iter().flatten().collect();
    Ok(all.values().sum())
}
