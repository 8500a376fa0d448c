//! One training step: forward and backward over micro-batches, clipping, the optimizer.
//!
//! The order of additions is the same as in a run over many ranks. Each micro-batch's loss is divided by the rows or tokens of the
//! *global* batch, and gradients are added in ascending order of the micro-batches. With several chains, each group of micro-batches
//! has a sum of its own, and the sums are added in order, as data-parallel ranks add theirs.

use phalanx_nn::autograd::ContextMode;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{Leaf, Var};
use phalanx_nn::{Batch, Clip, Parameter, Squares};
use phalanx_parallel::checkpoint::{self, Saver};
use phalanx_parallel::data_parallel::DataParallel;
use phalanx_parallel::hybrid::{StagedModel, Step};
use phalanx_parallel::pipeline::ranks::Pipeline;
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_tensor::{Context, DType, RngKey, Tensor, unpoisoned};

use crate::data::Data;
use crate::optimizers::Optimizers;
use crate::{Config, Error, Result};

/// How a step is done.
#[derive(Clone, Copy)]
pub(crate) struct Settings<'a> {
    /// Chains that gradients are added in.
    pub chains: usize,
    /// Rows or tokens that count in the global batch.
    pub counted: usize,
    /// The loss scale: losses are multiplied by it before their backward pass, and gradients divided by it.
    pub scale: f64,
    /// The ranks that share the batch and the model.
    pub ranks: &'a Arc<dyn DataParallel>,
    /// The pipeline schedule of this rank's stages.
    pub pipeline: &'a Pipeline,
    /// The saver. An update waits for a save in progress.
    pub saver: &'a Saving,
    /// Largest global norm.
    pub clip: Option<f64>,
    pub seed: u64,
    /// Is called at the end of each phase with its name and its start.
    pub watch: &'a dyn Fn(&'static str, Instant),
}

/// Saves the run's checkpoints in the background.
pub(crate) struct Saving(Mutex<Saver>);

impl Saving {
    pub fn new(saver: Saver) -> Saving {
        Saving(Mutex::new(saver))
    }

    /// Begins a save, after the one before is complete.
    pub fn save(
        &self,
        folder: &Path,
        parts: Vec<ShardedTensor>,
        settings: &checkpoint::Settings,
    ) -> Result<()> {
        Ok(self.lock().save(folder, parts, settings)?)
    }

    /// Waits until the save in progress is complete.
    pub fn wait(&self) -> Result<()> {
        Ok(self.lock().wait()?)
    }

    fn lock(&self) -> MutexGuard<'_, Saver> {
        unpoisoned(self.0.lock())
    }
}

impl Settings<'_> {
    fn phase<T>(&self, name: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let begin = Instant::now();
        let done = work()?;
        (self.watch)(name, begin);
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

/// The context of a step's passes: training mode, and the step's random draws.
pub(crate) fn context(seed: u64, step: u64) -> impl Drop {
    Context::with(|c| {
        c.set_train(true);
        c.rng = RngKey { seed, step };
    })
}

/// A step after its backward pass and before its update.
pub(crate) struct Passed {
    /// This rank's part of the loss and the gradients' norm before clipping, both times the scale: f64 `[2]` on the device, for which the
    /// host has not waited.
    pub results: Tensor,
    pub squares: Squares,
    norm: Tensor,
}

/// Computes the gradients of this rank's part of a batch, which is given as its micro-batches in order.
pub(crate) fn pass(
    model: &Arc<dyn StagedModel>,
    optimizers: &Optimizers,
    micros: &[Batch],
    settings: Settings<'_>,
    step: u64,
) -> Result<Passed> {
    let _context = context(settings.seed, step);
    settings.ranks.zero_grad()?;
    let loss = gradients(model, &optimizers.parameters(), micros, settings)?;
    let squares = settings.ranks.grad_squares()?;
    let norm = squares.norm()?;
    let loss = loss.map_or_else(|| norm.zeros_like(), Ok)?;
    let results = kernels::cat(&[&loss.with_shape(&[1])?, &norm.with_shape(&[1])?], 0)?;
    Ok(Passed { results, squares, norm })
}

/// Clips the gradients and updates the parameters.
pub(crate) fn update(optimizers: &mut Optimizers, passed: &Passed, settings: Settings<'_>) -> Result<()> {
    settings.phase("optimizer", || {
        let clip = settings.clip.map(|max_norm| Clip::factor(&passed.norm, max_norm * settings.scale));
        let factor = match clip.transpose()? {
            Some(factor) if settings.scale != 1.0 => {
                Some(kernels::mul_scalar(&factor, (1.0 / settings.scale).into())?)
            }
            factor => factor,
        };
        settings.saver.wait()?;
        match factor {
            None if settings.scale != 1.0 => optimizers.step_scaled(1.0 / settings.scale)?,
            factor => optimizers.step(factor.as_ref())?,
        }
        Ok(settings.ranks.updated()?)
    })
}

/// Computes the gradients of a step's micro-batches. Returns this rank's part of the loss, f64, if it has the last stage.
pub(crate) fn gradients(
    model: &Arc<dyn StagedModel>,
    parameters: &[Parameter],
    micros: &[Batch],
    settings: Settings<'_>,
) -> Result<Option<Tensor>> {
    let scale = settings.scale / settings.counted as f64;
    let mut loss: Option<Tensor> = None;
    for (number, chain) in micros.chunks(micros.len().div_ceil(settings.chains)).enumerate() {
        let earlier = if number == 0 { Vec::new() } else { take_grads(parameters) };
        loss = sum(loss, forward_backward(model, chain, scale, settings)?)?;
        add_to(parameters, earlier)?;
    }
    Ok(loss)
}

/// Adds the gradients of micro-batches to the parameters', and returns their part of the loss.
fn forward_backward(
    model: &Arc<dyn StagedModel>,
    micros: &[Batch],
    scale: f64,
    settings: Settings<'_>,
) -> Result<Option<Tensor>> {
    let (model, replicas, micro_batches) = (model.clone(), settings.ranks.clone(), micros.to_vec());
    let work = Arc::new(Step { model, replicas, micro_batches, scale });
    settings.ranks.begin()?;
    let losses = settings.pipeline.train(&work)?;
    // Waits for reductions that are still in progress after backward.
    settings.phase("wait", || Ok(settings.ranks.finish()?))?;
    losses.iter().try_fold(None, |all, loss| sum(all, Some(kernels::cast(loss, DType::F64)?)))
}

/// The sum of two losses, of which this rank may have none.
fn sum(a: Option<Tensor>, b: Option<Tensor>) -> Result<Option<Tensor>> {
    Ok(match (a, b) {
        (Some(a), Some(b)) => Some(kernels::add(&a, &b)?),
        (a, b) => a.or(b),
    })
}

/// A loss as a number; NaN on a meta device.
pub(crate) fn number(loss: &Tensor) -> Result<f64> {
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
pub(crate) fn converted(batch: Batch, dtype: DType) -> Result<Batch> {
    let fits = |tensor: &Tensor| !tensor.dtype().is_float() || tensor.dtype() == dtype;
    let convert = |tensor: Tensor| if fits(&tensor) { Ok(tensor) } else { kernels::cast(&tensor, dtype) };
    let tensors = batch.tensors.into_iter().map(convert).collect::<phalanx_tensor::Result<_>>()?;
    Ok(Batch { tensors, ..batch })
}

/// Adds the step's number to an error.
pub(crate) fn in_step<T>(step: u64, done: Result<T>) -> Result<T> {
    done.map_err(|error: Error| error.in_step(step))
}

/// A rank's fixed setup of training: configuration, pipeline, data-parallel wrapper, saver, data.
pub(crate) struct TrainingSetup {
    pub config: Config,
    /// The pipeline schedule of this rank's stages.
    pub pipeline: Pipeline,
    /// The model's data-parallel wrapper.
    pub share: Arc<dyn DataParallel>,
    pub saver: Saving,
    /// The data of the run.
    pub data: Data,
}

impl TrainingSetup {
    pub fn settings<'a>(&'a self, watch: &'a dyn Fn(&'static str, Instant)) -> Settings<'a> {
        let TrainingSetup { config, pipeline, share: ranks, saver, data } = self;
        let Config { chains, clip, seed, batch, .. } = *config;
        Settings {
            chains,
            counted: batch * data.counted,
            scale: 1.0,
            ranks,
            pipeline,
            saver,
            clip,
            seed,
            watch,
        }
    }
}
