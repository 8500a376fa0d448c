//! A rank's stages of a BERT or a ViT as a [`StagedModel`].

use std::path::Path;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{Encoder, EncoderConfig, RecomputeMode};
use phalanx_nn::{AnyUnit, Batch, Entry, LayerFactory, OneDevice, Parameter, Parameters, Scope};

use super::{Layout, StagedModel};
use crate::agreement::same_weights;
use crate::mesh::{Axis, Groups};
use crate::pipeline::ranks::{Chunks, Spec, split_blocks};
use crate::tensor_parallel::TensorParallel;
use crate::{Error, Result};

/// The stages of a rank. Every stage has a batch's tensors, so only activations go from stage to stage: `[rows, positions, width]`.
struct EncoderStages<M>(Chunks<M>);

impl<M: Parameters> Parameters for EncoderStages<M> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.0.visit(path, visitor);
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.0.visit_units(visitor);
    }

    fn borrowed(&self) -> Vec<Parameter> {
        self.0.borrowed()
    }
}

impl<M: Encoder> StagedModel for EncoderStages<M> {
    fn run(&self, stage: usize, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var> {
        Ok(self.0.of(stage)?.run(input, batch, scale)?)
    }

    fn stream(&self, batch: &Batch) -> Option<Spec> {
        let (shape, dtype) = self.0.iter().next()?.stream(batch)?;
        Some(Spec { shape, dtype })
    }
}

/// Builds this rank's stages of an encoder with a head, a BERT ([`BertConfig`](phalanx_nn::models::BertConfig)) or a ViT
/// ([`VitConfig`](phalanx_nn::models::VitConfig)), with layers split over the tensor-parallel ranks: with new weights, or those of a Hugging
/// Face folder. Batches are those of [`Encoder::run`]. All ranks call it. [`save_encoder`](crate::tensor_parallel::save_encoder) writes a
/// folder.
///
/// # Errors
/// If the model cannot be split in this way, memory is short, or the folder does not fit the model.
pub fn encoder<C: EncoderConfig>(
    config: &C,
    layout: &Layout,
    groups: &Groups,
    scope: &Scope,
    weights: Option<&Path>,
) -> Result<Box<dyn StagedModel>> {
    let tp = groups.along(Axis::Tp);
    layout.check_undivided("encoder")?;
    if layout.sequence_parallel {
        return Err(Error::Config(
            "encoder: got sequence parallelism, which would cut what attention and the head see as one; wanted it off"
                .into(),
        ));
    }
    if let Some(plan) = &layout.plan {
        let got = format!("got the plan {} of a model of layers in a row", plan.name());
        return Err(Error::Config(format!("encoder: {got}, wanted none")));
    }
    match tp.size() {
        1 => cut(OneDevice, config, layout, groups, scope, weights),
        _ => cut(TensorParallel::new(tp), config, layout, groups, scope, weights),
    }
}

fn cut<C: EncoderConfig>(
    layers: impl LayerFactory,
    config: &C,
    layout: &Layout,
    groups: &Groups,
    scope: &Scope,
    weights: Option<&Path>,
) -> Result<Box<dyn StagedModel>> {
    let schedule = layout.schedule()?;
    let (layers, placed) = (Arc::new(layers), split_blocks(config.blocks(), schedule.stages())?);
    if let Some(folder) = weights {
        // Parts of different models would fit together.
        same_weights(&[groups.model(), groups.along(Axis::Dp)], folder)?;
    }
    let mut stages = Vec::new();
    for stage in schedule.stages_of(groups.along(Axis::Pp).rank()) {
        let first = stages.first().map(|(_, first)| first);
        let mut model = config.init_stage_beside(&layers, scope, placed[stage].clone(), first)?;
        if let Some(folder) = weights {
            config.load_part(&model, folder)?;
        }
        if schedule.stages() == 1 || layout.recompute == RecomputeMode::Attention {
            model.set_recompute(layout.recompute);
        }
        stages.push((stage, model));
    }
    Ok(Box::new(EncoderStages(Chunks::new(stages))))
}
