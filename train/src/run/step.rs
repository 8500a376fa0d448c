//! One training step of this rank: [`compute_gradients`] runs forward and backward passes over its micro-batches, and [`update`] clips the
//! gradients and runs the optimizers. [`TrainingSetup`] and [`StepOptions`] say how.
//!
//! The order of additions is the same as in a run over many ranks. Each micro-batch's loss is divided by the rows or tokens of the
//! *global* batch, and gradients are added in ascending order of the micro-batches. With several chains, each group of micro-batches
//! has a sum of its own, and the sums are added in order, as data-parallel ranks add theirs.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{ContextMode, Leaf, SaveOnCpu, Var, saved_hooks};
use phalanx_nn::{Batch, Clip, Parameter, UpdateGuard};
use phalanx_parallel::checkpoint::{self, MemorySaver, Saver};
use phalanx_parallel::data_parallel::DataParallel;
use phalanx_parallel::hybrid::{StagedModel, Step};
use phalanx_parallel::pipeline::ranks::Pipeline;
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_tensor::{Context, DType, RngKey, Tensor, unpoisoned};

use super::optimizers::Optimizers;
use crate::data::Data;
use crate::{Config, Error, Result};

/// What a rank uses in every step: configuration, pipeline, data-parallel wrapper, saver, data.
pub(crate) struct TrainingSetup {
    pub config: Config,
    /// The pipeline schedule of this rank's stages.
    pub pipeline: Pipeline,
    /// The model's data-parallel wrapper.
    pub data_parallel: Arc<dyn DataParallel>,
    /// Keeps saved activations on the host, if it is to.
    pub activations: Option<Arc<SaveOnCpu>>,
    pub saver: BackgroundSaver,
    /// The data of the run.
    pub data: Data,
}

impl TrainingSetup {
    /// How often rows of a global batch, given by its position in the data, count in the mean loss. Every rank computes it from the
    /// numbers of the samples, so that all divide by the same.
    pub fn counted(&self, position: u64, rows: Range<usize>) -> usize {
        let first = position * self.config.batch as u64;
        let of_row = |row: usize| self.data.samples.counted(first + row as u64).unwrap_or(self.data.counted);
        rows.map(of_row).sum()
    }

    /// The options of a step whose loss is not scaled, and in whose mean `counted` rows or tokens count.
    pub fn step_options<'a>(
        &'a self,
        counted: usize,
        on_phase: &'a dyn Fn(&'static str, Instant),
    ) -> StepOptions<'a> {
        let TrainingSetup { config, pipeline, data_parallel, activations, saver, .. } = self;
        let Config { chains, clip, seed, .. } = *config;
        StepOptions {
            chains,
            counted,
            scale: 1.0,
            data_parallel,
            activations: activations.as_ref(),
            pipeline,
            saver,
            clip,
            guard: None,
            seed,
            on_phase,
        }
    }
}

/// How one step is done: the setup, with what may differ from step to step.
#[derive(Clone, Copy)]
pub(crate) struct StepOptions<'a> {
    /// Groups of micro-batches whose gradients have a sum of their own (see above).
    pub chains: usize,
    /// The rows or tokens of the global batch, by which its loss is divided.
    pub counted: usize,
    /// The loss scale: losses are multiplied by it before their backward pass, and gradients divided by it.
    pub scale: f64,
    /// The model's data-parallel wrapper.
    pub data_parallel: &'a Arc<dyn DataParallel>,
    /// Keeps saved activations on the host, if it is to.
    pub activations: Option<&'a Arc<SaveOnCpu>>,
    /// The pipeline schedule of this rank's stages.
    pub pipeline: &'a Pipeline,
    /// The saver. An update waits until a save in progress has copied the tensors.
    pub saver: &'a BackgroundSaver,
    /// Largest global norm.
    pub clip: Option<f64>,
    /// Leaves out updates whose norm is not finite, if the host reads it after the update.
    pub guard: Option<&'a UpdateGuard>,
    pub seed: u64,
    /// Called at the end of each phase with its name and its start.
    pub on_phase: &'a dyn Fn(&'static str, Instant),
}

impl StepOptions<'_> {
    fn phase<T>(&self, name: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let begin = Instant::now();
        let done = work()?;
        (self.on_phase)(name, begin);
        Ok(done)
    }
}

/// The loss and the norm of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// The mean loss over the global batch, or a rank's part of it; NaN on a meta device.
    pub loss: f64,
    /// Norm of the gradients before clipping.
    pub grad_norm: f64,
}

/// The numbers of a finished step on this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepReport {
    pub step: u64,
    pub outcome: Outcome,
    pub seconds: f64,
    /// The most bytes in tensors so far, on this rank.
    pub peak: usize,
}

/// A step after its backward pass and before its update.
pub(crate) struct StepGradients {
    /// This rank's part of the loss and the gradients' norm before clipping, both times the scale: f64 `[2]` on the device, for which the
    /// host has not waited.
    pub results: Tensor,
    norm: Tensor,
}

/// Computes the gradients of this rank's part of a batch, which is given as its micro-batches in order.
pub(crate) fn compute_gradients(
    model: &Arc<dyn StagedModel>,
    optimizers: &Optimizers,
    micros: &[Batch],
    options: StepOptions<'_>,
    step: u64,
) -> Result<StepGradients> {
    let _context = training_context(options.seed, step);
    options.data_parallel.zero_grad()?;
    let loss = accumulate_gradients(model, &optimizers.parameters(), micros, options)?;
    let norm = options.data_parallel.grad_squares()?.norm()?;
    let loss = loss.map_or_else(|| norm.zeros_like(), Ok)?;
    let results = kernels::cat(&[&loss.with_shape(&[1])?, &norm.with_shape(&[1])?], 0)?;
    Ok(StepGradients { results, norm })
}

/// Clips the gradients and updates the parameters.
pub(crate) fn update(
    optimizers: &mut Optimizers,
    gradients: &StepGradients,
    options: StepOptions<'_>,
) -> Result<()> {
    options.phase("optimizer", || {
        let bound = options.clip.map(|max_norm| max_norm * options.scale);
        let factor = match (options.guard, bound) {
            (Some(guard), bound) => Some(guard.factor(&gradients.norm, bound)?),
            (None, Some(bound)) => Some(Clip::factor(&gradients.norm, bound)?),
            (None, None) => None,
        };
        let factor = match factor {
            Some(factor) if options.scale != 1.0 => {
                Some(kernels::mul_scalar(&factor, (1.0 / options.scale).into())?)
            }
            factor => factor,
        };
        options.saver.release()?;
        match factor {
            None if options.scale != 1.0 => optimizers.step_scaled(1.0 / options.scale)?,
            factor => optimizers.step(factor.as_ref())?,
        }
        Ok(options.data_parallel.updated()?)
    })
}

/// The context of a step's passes: training mode, and the step's random draws.
pub(crate) fn training_context(seed: u64, step: u64) -> impl Drop {
    Context::with(|c| {
        c.set_train(true);
        c.rng = RngKey { seed, step };
    })
}

/// Computes the gradients of a step's micro-batches. Returns this rank's part of the loss, f64, if it has the last stage.
pub(crate) fn accumulate_gradients(
    model: &Arc<dyn StagedModel>,
    parameters: &[Parameter],
    micros: &[Batch],
    options: StepOptions<'_>,
) -> Result<Option<Tensor>> {
    let mut loss: Option<Tensor> = None;
    for (number, chain) in micros.chunks(micros.len().div_ceil(options.chains)).enumerate() {
        let earlier = if number == 0 { Vec::new() } else { take_grads(parameters) };
        let own = forward_backward(model, chain, options)?;
        let own = own.iter().try_fold(None, |all, loss| sum(all, Some(kernels::cast(loss, DType::F64)?)))?;
        loss = sum(loss, own)?;
        add_to(parameters, earlier)?;
    }
    Ok(loss)
}

/// Adds the gradients of micro-batches to the parameters', and returns the micro-batches' parts of the loss, if this rank has the last stage.
pub(crate) fn forward_backward(
    model: &Arc<dyn StagedModel>,
    micros: &[Batch],
    options: StepOptions<'_>,
) -> Result<Vec<Tensor>> {
    let scale = options.scale / options.counted as f64;
    let (model, replicas, micro_batches) = (model.clone(), options.data_parallel.clone(), micros.to_vec());
    let work = Arc::new(Step { model, replicas, micro_batches, scale });
    options.data_parallel.begin()?;
    let saved = options.activations.map(|hooks| saved_hooks(hooks.clone()));
    let losses = options.pipeline.train(&work)?;
    drop(saved);
    // Waits for reductions that are still in progress after backward.
    options.phase("wait", || Ok(options.data_parallel.finish()?))?;
    Ok(losses)
}

/// The sum of two losses, of which this rank may have none.
fn sum(a: Option<Tensor>, b: Option<Tensor>) -> Result<Option<Tensor>> {
    Ok(match (a, b) {
        (Some(a), Some(b)) => Some(kernels::add(&a, &b)?),
        (a, b) => a.or(b),
    })
}

/// A loss as a number; NaN on a meta device.
pub(crate) fn loss_value(loss: &Tensor) -> Result<f64> {
    let loss = kernels::cast(loss, DType::F64)?;
    Ok(if loss.device().is_meta() { f64::NAN } else { loss.item()? })
}

/// Removes the gradients and returns them, one for each site of each parameter.
fn take_grads(parameters: &[Parameter]) -> Vec<Option<Var>> {
    let take = |leaf: &Leaf| {
        let grad = leaf.grad();
        leaf.set_grad(None);
        grad
    };
    parameters.iter().flat_map(|p| p.leaves().iter().map(take).collect::<Vec<_>>()).collect()
}

/// Adds the gradients to earlier ones, site by site. The sums become the parameters' gradients.
fn add_to(parameters: &[Parameter], earlier: Vec<Option<Var>>) -> Result<()> {
    for (leaf, earlier) in parameters.iter().flat_map(|p| p.leaves()).zip(earlier) {
        let Some(mut sum) = earlier.map(Var::into_tensor) else { continue };
        if let Some(grad) = leaf.grad() {
            kernels::accumulate_(&mut sum, grad.tensor())?;
        }
        leaf.set_grad(Some(Var::new(sum)));
    }
    Ok(())
}

/// The batch with its floating-point tensors in the model's dtype.
pub(crate) fn in_model_dtype(batch: Batch, dtype: DType) -> Result<Batch> {
    let fits = |tensor: &Tensor| !tensor.dtype().is_float() || tensor.dtype() == dtype;
    let convert = |tensor: Tensor| if fits(&tensor) { Ok(tensor) } else { kernels::cast(&tensor, dtype) };
    let tensors = batch.tensors.into_iter().map(convert).collect::<phalanx_tensor::Result<_>>()?;
    Ok(Batch { tensors, ..batch })
}

/// Adds the step's number to an error.
pub(crate) fn in_step<T>(step: u64, done: Result<T>) -> Result<T> {
    done.map_err(|error: Error| error.in_step(step))
}

/// Saves the run's checkpoints in the background: on disk, and in memory if the run holds copies there.
pub(crate) struct BackgroundSaver {
    disk: Mutex<Saver>,
    memory: Mutex<Option<MemorySaver>>,
}

impl BackgroundSaver {
    pub fn new(saver: Saver) -> BackgroundSaver {
        BackgroundSaver { disk: Mutex::new(saver), memory: Mutex::new(None) }
    }

    /// Holds copies in memory from now on.
    pub fn hold_by(&mut self, saver: MemorySaver) {
        self.memory = Mutex::new(Some(saver));
    }

    /// Begins to copy parts in memory, after the copies before are complete.
    pub fn hold(&self, parts: Vec<ShardedTensor>, settings: checkpoint::Settings) -> Result<()> {
        match &mut *unpoisoned(self.memory.lock()) {
            Some(memory) => Ok(memory.save(parts, settings)?),
            None => Ok(()),
        }
    }

    /// Begins a save, after the one before is complete.
    pub fn save(
        &self,
        folder: &Path,
        parts: Vec<ShardedTensor>,
        settings: &checkpoint::Settings,
    ) -> Result<()> {
        Ok(self.disk().save(folder, parts, settings)?)
    }

    /// Files that the next save puts on disk before it is complete.
    pub fn sync_first(&self, logs: Vec<(PathBuf, File)>) {
        self.disk().sync_first(logs);
    }

    /// Waits until the saves in progress do not read tensors any more.
    pub fn release(&self) -> Result<()> {
        self.disk().release()?;
        self.copied()
    }

    /// Waits until the saves in progress are complete.
    pub fn wait(&self) -> Result<()> {
        self.disk().wait()?;
        self.copied()
    }

    /// Waits until the copies in memory are complete.
    fn copied(&self) -> Result<()> {
        match &mut *unpoisoned(self.memory.lock()) {
            Some(memory) => Ok(memory.wait()?),
            None => Ok(()),
        }
    }

    fn disk(&self) -> MutexGuard<'_, Saver> {
        unpoisoned(self.disk.lock())
    }
}
