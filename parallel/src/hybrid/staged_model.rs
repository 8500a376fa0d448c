//! [`StagedModel`]: a rank's stages of any model; [`decoder`] builds those of a language model; [`Step`] is a training step as the
//! computation of a pipeline's stages.

use std::path::Path;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Decoder, Documents, ModelConfig, RecomputeMode, check_size, load_weights};
use phalanx_nn::{Batch, LayerFactory, OneDevice, Parameters, Scope};
use phalanx_tensor::Context;

use super::Layout;
use crate::Result;
use crate::agreement::same_weights;
use crate::data_parallel::{DataParallel, NoSync};
use crate::mesh::{Axis, Groups};
use crate::pipeline::ranks::{Chunks, Spec, Stages};
use crate::tensor_parallel::TensorParallel;

/// A rank's stages of a model, under any kind of parallel layers.
pub trait StagedModel: Parameters + Send + Sync + 'static {
    /// The output of a stage: its activations (of a language model `[B, T, width]`), or of the last stage the sum of the losses
    /// of all rows or tokens that count, times `scale`. `input` is the output of the stage before, `None` for the first stage.
    ///
    /// # Errors
    /// If the stage is not on this rank, or the batch does not fit.
    fn run(&self, stage: usize, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var>;

    /// The shape and dtype of a batch's activations between two stages; `None` if only the stage before knows them.
    fn stream(&self, batch: &Batch) -> Option<Spec>;
}

/// A language model's batch has inputs and targets `[rows, positions]`, and perhaps the [`Documents`] of packed rows: for each
/// position the one at which its document begins. Every stage has all of these, so only activations go from stage to stage.
impl<L: LayerFactory> StagedModel for Chunks<Decoder<L>> {
    fn run(&self, stage: usize, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var> {
        let model = self.of(stage)?;
        let (inputs, targets, documents) = tokens(batch)?;
        let x = match &documents {
            None => model.forward(input.unwrap_or(&inputs))?,
            Some(documents) => model.forward_packed(input.unwrap_or(&inputs), documents)?,
        };
        if !model.stage().last {
            return Ok(x);
        }
        Ok(model.loss(&x, &targets, scale)?)
    }

    fn stream(&self, batch: &Batch) -> Option<Spec> {
        let [rows, positions] = *batch.tensors.first()?.shape() else { return None };
        let (shape, dtype) = self.iter().next()?.stream(rows, positions).ok()?;
        Some(Spec { shape, dtype })
    }
}

/// Inputs, targets, and the documents of packed rows.
fn tokens(batch: &Batch) -> Result<(Var, Var, Option<Documents>)> {
    if batch.tensors.len() < 3 {
        let [inputs, targets] = batch.vars()?;
        return Ok((inputs, targets, None));
    }
    let [inputs, targets, starts] = batch.vars()?;
    Ok((inputs, targets, Some(Documents::new(&starts)?)))
}

/// A training step as the computation of a pipeline's stages. Every rank of a pipeline has the same micro-batches.
pub struct Step {
    /// The stages of this rank.
    pub model: Arc<dyn StagedModel>,
    /// The data parallelism that adds the gradients.
    pub replicas: Arc<dyn DataParallel>,
    /// The micro-batches, in order of their rows.
    pub micro_batches: Vec<Batch>,
    /// The factor of losses, 1 / (counted rows or tokens of the global batch). So each micro-batch's gradients have their weight in
    /// the mean, however many tokens it has.
    pub scale: f64,
}

impl Stages for Step {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<&Var>) -> Result<Var> {
        let batch = &self.micro_batches[micro_batch];
        let _context = Context::with(|c| c.batch_offset = batch.first_row as u64);
        self.model.run(stage, input, batch, self.scale)
    }

    fn input_spec(&self, _stage: usize, micro_batch: usize) -> Option<Spec> {
        self.model.stream(&self.micro_batches[micro_batch])
    }

    fn no_sync(&self) -> Option<NoSync> {
        Some(self.replicas.no_sync())
    }
}

/// Builds this rank's stages of a language model, with layers split over the tensor-parallel ranks: with new weights, or those of
/// a Hugging Face folder. All ranks call it.
///
/// # Errors
/// If the model cannot be split in this way, memory is short, or the folder does not fit the model.
pub fn decoder(
    config: &ModelConfig,
    layout: &Layout,
    groups: &Groups,
    scope: &Scope,
    weights: Option<&Path>,
) -> Result<Box<dyn StagedModel>> {
    let tp = groups.along(Axis::Tp);
    if tp.size() == 1 {
        return cut(OneDevice, config, layout, groups, scope, weights);
    }
    let layers = TensorParallel::new(tp).with_sequence_parallel(layout.sequence_parallel);
    cut(layers, config, layout, groups, scope, weights)
}

fn cut(
    layers: impl LayerFactory,
    config: &ModelConfig,
    layout: &Layout,
    groups: &Groups,
    scope: &Scope,
    weights: Option<&Path>,
) -> Result<Box<dyn StagedModel>> {
    let schedule = layout.schedule()?;
    if let Some(folder) = weights {
        check_size(config, folder)?;
        // Parts of different models would fit together. Replicas get the first one's weights, but all should hear of it.
        same_weights(&[groups.model(), groups.along(Axis::Dp)], folder)?;
    }
    let mut model =
        Chunks::build(config, &Arc::new(layers), scope, &schedule, groups.along(Axis::Pp).rank())?;
    if let Some(folder) = weights {
        model.iter().try_for_each(|stage| load_weights(stage, config, folder))?;
    }
    if schedule.stages() == 1 || layout.recompute == RecomputeMode::Attention {
        model.iter_mut().for_each(|stage| stage.set_recompute(layout.recompute));
    }
    if let Some(most) = layout.logits_max {
        model.iter_mut().for_each(|stage| stage.set_logits_max(most));
    }
    Ok(Box::new(model))
}

impl StagedModel for Box<dyn StagedModel> {
    fn run(&self, stage: usize, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var> {
        (**self).run(stage, input, batch, scale)
    }

    fn stream(&self, batch: &Batch) -> Option<Spec> {
        (**self).stream(batch)
    }
}
