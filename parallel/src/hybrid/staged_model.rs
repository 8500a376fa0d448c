//! [`StagedModel`]: a rank's stages of any model; [`decoder`] and [`adapted_decoder`] build those of a language model; [`Step`] is a
//! training step as the computation of a pipeline's stages.

use std::path::Path;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{
    Decoder, Documents, Lora, LoraConfig, ModelConfig, RecomputeMode, RouterBias, check_size, load_weights,
};
use phalanx_nn::{Batch, LayerFactory, OneDevice, Parameter, Parameters, Scope};
use phalanx_tensor::Context;

use super::{CausalStage, Layout};
use crate::agreement::same_weights;
use crate::data_parallel::{DataParallel, NoSync};
use crate::expert_parallel::ExpertParallel;
use crate::mesh::{Axis, Groups};
use crate::pipeline::ranks::{Chunks, SkipRoute, Spec, Stages, split_blocks};
use crate::tensor_parallel::TensorParallel;
use crate::{Error, Result};

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

    /// [`StagedModel::run`] with any number of values between stages, as
    /// [`Stages::forward_values`]. A model that has one value leaves it as it is.
    ///
    /// # Errors
    /// As [`StagedModel::run`].
    fn run_values(&self, stage: usize, inputs: &[Var], batch: &Batch, scale: f64) -> Result<Vec<Var>> {
        if inputs.len() > 1 {
            let got = inputs.len();
            return Err(Error::Config(format!(
                "stage {stage}: got {got} inputs for `StagedModel::run`, which takes one; wanted `StagedModel::run_values`"
            )));
        }
        Ok(vec![self.run(stage, inputs.first(), batch, scale)?])
    }

    /// [`StagedModel::stream`] of a stage with any number of inputs.
    fn streams(&self, _stage: usize, batch: &Batch) -> Option<Vec<Spec>> {
        self.stream(batch).map(|spec| vec![spec])
    }

    /// The skips between stages, as [`Stages::skips`].
    fn skips(&self) -> &[SkipRoute] {
        &[]
    }

    /// A stage of this rank as [`generate_rows`](super::generate_rows) uses it; `None` if the model is no decoder.
    fn causal_stage(&self, _stage: usize) -> Option<&dyn CausalStage> {
        None
    }

    /// The biases of routers that move with their loads, for [`MeshParallel::with_router_biases`](super::MeshParallel::with_router_biases).
    fn router_biases(&self) -> Vec<RouterBias> {
        Vec::new()
    }
}

/// A language model's batch has inputs and targets `[rows, positions]`, and perhaps the [`Documents`] of packed rows: for each
/// position the one at which its document begins. Every stage has all of these, so only activations go from stage to stage; and, in training
/// with losses of routers, the sums of the routers so far ([`Decoder::forward_stage`]).
impl<L: LayerFactory> StagedModel for Chunks<Decoder<L>> {
    fn run(&self, stage: usize, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var> {
        let mut values =
            self.run_values(stage, input.map(std::slice::from_ref).unwrap_or_default(), batch, scale)?;
        if values.len() > 1 {
            let why = format!(
                "stage {stage}: got losses of routers for `StagedModel::run`, wanted `StagedModel::run_values`"
            );
            return Err(Error::Config(why));
        }
        Ok(values.swap_remove(0))
    }

    fn run_values(&self, stage: usize, inputs: &[Var], batch: &Batch, scale: f64) -> Result<Vec<Var>> {
        let model = self.of(stage)?;
        let (tokens, targets, documents) = tokens(batch)?;
        let (x, sums) =
            model.forward_stage(inputs.first().unwrap_or(&tokens), documents.as_ref(), inputs.get(1))?;
        if model.stage().last {
            return Ok(vec![model.loss(&x, &targets, scale)?]);
        }
        Ok([x].into_iter().chain(sums).collect())
    }

    /// Of a stage of this rank, or of the one after it.
    fn streams(&self, stage: usize, batch: &Batch) -> Option<Vec<Spec>> {
        let own = self.of(stage).map(|model| (model, model.stage().layers.start));
        let before = || self.of(stage.checked_sub(1)?).ok().map(|model| (model, model.stage().layers.end));
        let (model, blocks) = own.ok().or_else(before)?;
        let sums = model.router_sums(blocks).map(|(shape, dtype)| Spec { shape, dtype });
        Some([self.stream(batch)?].into_iter().chain(sums).collect())
    }

    fn stream(&self, batch: &Batch) -> Option<Spec> {
        let [rows, positions] = *batch.tensors.first()?.shape() else { return None };
        let (shape, dtype) = self.iter().next()?.stream(rows, positions).ok()?;
        Some(Spec { shape, dtype })
    }

    fn causal_stage(&self, stage: usize) -> Option<&dyn CausalStage> {
        self.of(stage).ok().map(|model| model as &dyn CausalStage)
    }

    fn router_biases(&self) -> Vec<RouterBias> {
        self.iter().flat_map(Decoder::router_biases).collect()
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
    fn forward_values(&self, stage: usize, micro_batch: usize, inputs: &[Var]) -> Result<Vec<Var>> {
        let batch = &self.micro_batches[micro_batch];
        let _context = Context::with(|c| c.batch_offset = batch.first_row as u64);
        self.model.run_values(stage, inputs, batch, self.scale)
    }

    fn input_specs(&self, stage: usize, micro_batch: usize) -> Option<Vec<Spec>> {
        self.model.streams(stage, &self.micro_batches[micro_batch])
    }

    fn skips(&self) -> &[SkipRoute] {
        self.model.skips()
    }

    /// Those of the rank, which has no other stage if this one has replicas.
    fn parameters(&self, _stage: usize) -> Result<Vec<Parameter>> {
        Ok(self.model.parameters())
    }

    fn no_sync(&self) -> Option<NoSync> {
        Some(self.replicas.no_sync())
    }
}

/// Builds this rank's stages of a language model, with layers split over the tensor-parallel ranks and experts divided over the expert
/// groups: with new weights, or those of a Hugging Face folder. All ranks call it.
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
    layout.check_experts(config)?;
    match (split_layers(layout, groups), groups.experts()) {
        (None, None) => cut(OneDevice, config, layout, groups, scope, weights),
        (Some(layers), None) => cut(layers, config, layout, groups, scope, weights),
        (None, Some(experts)) => {
            cut(ExpertParallel::new(OneDevice, experts), config, layout, groups, scope, weights)
        }
        (Some(layers), Some(experts)) => {
            cut(ExpertParallel::new(layers, experts), config, layout, groups, scope, weights)
        }
    }
}

/// As [`decoder`], with adapters beside some layers, which alone are trained.
///
/// # Errors
/// As [`decoder`] and [`LoraConfig::check`].
pub fn adapted_decoder(
    config: &ModelConfig,
    lora: &LoraConfig,
    layout: &Layout,
    groups: &Groups,
    scope: &Scope,
    weights: Option<&Path>,
) -> Result<Box<dyn StagedModel>> {
    lora.check(config)?;
    layout.check_experts(config)?;
    let lora = lora.clone();
    match (split_layers(layout, groups), groups.experts()) {
        (None, None) => cut(Lora::new(OneDevice, lora)?, config, layout, groups, scope, weights),
        (Some(layers), None) => cut(Lora::new(layers, lora)?, config, layout, groups, scope, weights),
        (None, Some(experts)) => {
            let layers = ExpertParallel::new(OneDevice, experts);
            cut(Lora::new(layers, lora)?, config, layout, groups, scope, weights)
        }
        (Some(layers), Some(experts)) => {
            let layers = ExpertParallel::new(layers, experts);
            cut(Lora::new(layers, lora)?, config, layout, groups, scope, weights)
        }
    }
}

/// The layers of several tensor-parallel ranks, if there are such.
fn split_layers(layout: &Layout, groups: &Groups) -> Option<TensorParallel> {
    let tp = groups.along(Axis::Tp);
    (tp.size() > 1).then(|| TensorParallel::new(tp).with_sequence_parallel(layout.sequence_parallel))
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
    let rank = groups.along(Axis::Pp).rank();
    let placed = match &layout.plan {
        Some(plan) => plan.decoder_stages(config.layers())?,
        None => split_blocks(config.layers(), schedule.stages())?,
    };
    let mut model =
        Chunks::build_stages(config, &Arc::new(layers), scope, &placed, schedule.stages_of(rank))?;
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

    fn run_values(&self, stage: usize, inputs: &[Var], batch: &Batch, scale: f64) -> Result<Vec<Var>> {
        (**self).run_values(stage, inputs, batch, scale)
    }

    fn streams(&self, stage: usize, batch: &Batch) -> Option<Vec<Spec>> {
        (**self).streams(stage, batch)
    }

    fn skips(&self) -> &[SkipRoute] {
        (**self).skips()
    }
    fn causal_stage(&self, stage: usize) -> Option<&dyn CausalStage> {
        (**self).causal_stage(stage)
    }

    fn router_biases(&self) -> Vec<RouterBias> {
        (**self).router_biases()
    }
}
