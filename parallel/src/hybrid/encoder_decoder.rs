//! A rank's stages of a T5 as a [`StagedModel`]: the encoder's stages first, then the decoder's.

use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{RecomputeMode, T5, T5Config};
use phalanx_nn::{Batch, LayerFactory, OneDevice, Scope};

use super::{Layout, StagedModel};
use crate::mesh::{Axis, Groups};
use crate::pipeline::ranks::{Chunks, Spec};
use crate::tensor_parallel::TensorParallel;
use crate::{Error, Result};

/// A batch has the encoder's tokens `[rows, S]`, the decoder's `[rows, T]` and labels `[rows, T]`. Every stage has all of them, so only
/// activations go from stage to stage: the encoder's and the decoder's side by side, `[rows, S + T, width]`.
impl<L: LayerFactory> StagedModel for Chunks<T5<L>> {
    fn run(&self, stage: usize, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var> {
        let model = self.of(stage)?;
        let [source, target, labels] = batch.vars()?;
        let x = model.forward(input, &source, &target)?;
        if !model.stage().last {
            return Ok(x);
        }
        Ok(model.loss(&x, &labels, scale)?)
    }

    fn stream(&self, batch: &Batch) -> Option<Spec> {
        let [source, target, ..] = &batch.tensors[..] else { return None };
        let ([rows, source], [_, target]) = (source.shape(), target.shape()) else { return None };
        let (shape, dtype) = self.iter().next()?.stream(*rows, *source, *target);
        Some(Spec { shape, dtype })
    }
}

/// Builds this rank's stages of a T5 with new weights, of which the first `encoder_stages` are the encoder's
/// ([`T5Config::split`]), with layers split over the tensor-parallel ranks. All ranks call it.
///
/// # Errors
/// If the model cannot be split in this way, or memory is short.
pub fn encoder_decoder(
    config: &T5Config,
    encoder_stages: usize,
    layout: &Layout,
    groups: &Groups,
    scope: &Scope,
) -> Result<Box<dyn StagedModel>> {
    let tp = groups.along(Axis::Tp);
    layout.check_undivided("encoder-decoder")?;
    if layout.sequence_parallel {
        return Err(Error::Config(
            "encoder-decoder: got sequence parallelism, which would cut two sequences as one; wanted it off"
                .into(),
        ));
    }
    if let Some(plan) = &layout.plan {
        let got = format!("got the plan {} of a model of layers in a row", plan.name());
        return Err(Error::Config(format!("encoder-decoder: {got}, wanted none")));
    }
    match tp.size() {
        1 => cut(OneDevice, config, encoder_stages, layout, groups, scope),
        _ => cut(TensorParallel::new(tp), config, encoder_stages, layout, groups, scope),
    }
}

fn cut(
    layers: impl LayerFactory,
    config: &T5Config,
    encoder_stages: usize,
    layout: &Layout,
    groups: &Groups,
    scope: &Scope,
) -> Result<Box<dyn StagedModel>> {
    let schedule = layout.schedule()?;
    let (layers, stages) = (Arc::new(layers), config.split(schedule.stages(), encoder_stages)?);
    let build = |stage: usize| -> Result<_> {
        let mut model = config.init_stage(&layers, scope, stages[stage].clone())?;
        if schedule.stages() == 1 || layout.recompute == RecomputeMode::Attention {
            model.set_recompute(layout.recompute);
        }
        Ok((stage, model))
    };
    let here = schedule.stages_of(groups.along(Axis::Pp).rank());
    Ok(Box::new(Chunks::new(here.map(build).collect::<Result<_>>()?)))
}
