//! The [`StagedModel`]s that [`Trainer`](crate::Trainer) makes: [`Plain`] of a module that is whole on every rank, and [`StagedLayers`] of a
//! sequence of layers, which it cuts into pipeline stages.

use std::ops::Range;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{Batch, Module, Parameters, Scope, Sequential, SequentialConfig, cut};
use phalanx_parallel as parallel;
use phalanx_parallel::hybrid::{Layout, StagedModel};
use phalanx_parallel::pipeline::ranks::{Chunks, Spec};
use phalanx_tensor::DType;

use crate::data::Data;
use crate::{Config, Error, Result};

/// A module that is whole on every rank, with its loss: the mean over a batch's rows.
pub(crate) struct Plain<M, F> {
    pub model: M,
    pub loss: F,
    /// How many times a row counts in the mean loss.
    pub counted: usize,
}

phalanx_nn::parameters!([M: Parameters, F] Plain<M, F> { model = "" });

impl<M, F> StagedModel for Plain<M, F>
where
    M: Parameters + Send + Sync + 'static,
    F: Fn(&M, &Batch) -> Result<Var> + Send + Sync + 'static,
{
    fn run(&self, _: usize, _: Option<&Var>, batch: &Batch, scale: f64) -> parallel::Result<Var> {
        let loss = (self.loss)(&self.model, batch).map_err(passed_on)?;
        weighted(loss, batch, scale * self.counted as f64)
    }

    fn stream(&self, _: &Batch) -> Option<Spec> {
        None
    }
}

/// A rank's stages of a sequence of layers, with the loss of the last layer's output: the mean over a batch's rows.
pub(crate) struct StagedLayers<F> {
    stages: Chunks<Sequential>,
    last: usize,
    loss: F,
    /// How many times a row counts in the mean loss.
    counted: usize,
}

impl<F> StagedLayers<F> {
    /// The stages that the layout gives to a pipeline's `rank`. The layers are cut as its plan says, or evenly; if they cannot be,
    /// earlier stages have one more. Every layer is a unit, which ZeRO gathers and frees by itself.
    pub fn build(
        config: impl Fn() -> SequentialConfig,
        scope: &Scope,
        layout: &Layout,
        rank: usize,
        loss: F,
        counted: usize,
    ) -> Result<StagedLayers<F>> {
        let schedule = layout.schedule()?;
        let stages = schedule.stages();
        let layers_of = match &layout.plan {
            Some(plan) => {
                plan.check_layers(config().len(), "the layers in a row")?;
                plan.stages().iter().map(|stage| stage.layers.clone()).collect()
            }
            None => cut(config().len(), stages),
        };
        if layers_of.iter().any(Range::is_empty) {
            let layers = config().len();
            return Err(Error::Config(format!(
                "train: got {layers} layers for {stages} stages, wanted one a stage"
            )));
        }
        let stage = |stage: usize| {
            let layers = config().slice(layers_of[stage].clone())?.init(scope)?;
            Ok((stage, layers.into_units(&phalanx_nn::WrapPolicy::EachLayer)))
        };
        let stages = schedule.stages_of(rank).map(stage).collect::<Result<Vec<_>>>()?;
        Ok(StagedLayers { stages: Chunks::new(stages), last: layers_of.len() - 1, loss, counted })
    }
}

phalanx_nn::parameters!([F] StagedLayers<F> { stages = "" });

impl<F> StagedModel for StagedLayers<F>
where
    F: Fn(&Var, &Batch) -> Result<Var> + Send + Sync + 'static,
{
    fn run(&self, stage: usize, input: Option<&Var>, batch: &Batch, scale: f64) -> parallel::Result<Var> {
        let layers = self.stages.of(stage)?;
        let output = match (input, batch.tensors.first()) {
            (Some(input), _) => layers.forward(input)?,
            (None, Some(first)) => layers.forward(&Var::new(first.clone()))?,
            (None, None) => return Err(parallel::Error::Config("train: got a batch without tensors".into())),
        };
        if stage < self.last {
            return Ok(output);
        }
        weighted((self.loss)(&output, batch).map_err(passed_on)?, batch, scale * self.counted as f64)
    }

    fn stream(&self, _: &Batch) -> Option<Spec> {
        None
    }
}

/// Refuses to recompute the attention of modules, which do not say what of them is attention; and data whose rows count unlike often, since a
/// loss that is a mean does not say over how many.
pub(crate) fn check_module(config: &Config, data: &Data) -> Result<()> {
    if data.samples.counted(0).is_some() {
        let why =
            "got samples that count unlike often, such as conversations, and a loss that is a mean over rows";
        return Err(Error::Config(format!("train: {why}; `run_parts` trains on them")));
    }
    if config.layout.recompute != RecomputeMode::Attention {
        return Ok(());
    }
    let wanted = "which is a mode of transformer models; wanted never, except-last or always";
    Err(Error::Config(format!("train: got recomputation of attention, {wanted}")))
}

/// The contribution of a mean over rows to the global batch's mean.
fn weighted(loss: Var, batch: &Batch, scale: f64) -> parallel::Result<Var> {
    if loss.tensor().numel() != 1 {
        let why = format!("train: got a loss of shape {:?}, wanted one number", loss.shape());
        return Err(parallel::Error::Config(why));
    }
    // A scaled loss may exceed the range of f16.
    let wide = if loss.dtype().size() < 4 { loss.to(DType::F32)? } else { loss };
    Ok((wide * (batch.rows() as f64 * scale))?)
}

/// An error for code that runs inside a pipeline.
pub(crate) fn passed_on(error: Error) -> parallel::Error {
    match error {
        Error::Parallel(error) => error,
        other => parallel::Error::Config(other.to_string()),
    }
}
