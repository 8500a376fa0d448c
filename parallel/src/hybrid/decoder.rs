//! [`decoder`]: a rank's part of a language model under any layout.

use std::path::Path;
use std::sync::Arc;

use phalanx_nn::autograd::Var;
use phalanx_nn::models::{ModelConfig, check_size, load_weights};
use phalanx_nn::{Batch, Layers, OneDevice, Scope};

use super::{Layout, Part};
use crate::Result;
use crate::mesh::{Axis, Groups};
use crate::pipeline::ranks::{Chunks, Spec};
use crate::tensor_parallel::TensorParallel;

/// The stages of a model that this rank has, its layers cut over the tensor-parallel ranks: new, or with weights from a Hugging Face
/// folder. All ranks call it.
///
/// # Errors
/// If the model cannot be cut so, memory is short, or the folder does not fit the model.
pub fn decoder(
    config: &ModelConfig,
    layout: &Layout,
    groups: &Groups,
    scope: &Scope,
    weights: Option<&Path>,
) -> Result<Box<dyn Part>> {
    let tp = groups.along(Axis::Tp);
    if tp.size() == 1 {
        return cut(OneDevice, config, layout, groups, scope, weights);
    }
    let layers = TensorParallel::new(tp).with_sequence_parallel(layout.sequence_parallel);
    cut(layers, config, layout, groups, scope, weights)
}

fn cut(
    layers: impl Layers,
    config: &ModelConfig,
    layout: &Layout,
    groups: &Groups,
    scope: &Scope,
    weights: Option<&Path>,
) -> Result<Box<dyn Part>> {
    let schedule = layout.schedule()?;
    weights.map_or(Ok(()), |folder| check_size(config, folder))?;
    let mut model =
        Chunks::build(config, &Arc::new(layers), scope, &schedule, groups.along(Axis::Pp).rank())?;
    if let Some(folder) = weights {
        model.iter().try_for_each(|stage| load_weights(stage, config, folder))?;
    }
    if schedule.stages() == 1 {
        model.iter_mut().for_each(|stage| stage.set_recompute(layout.recompute));
    }
    Ok(Box::new(model))
}

impl Part for Box<dyn Part> {
    fn run(&self, stage: usize, input: Option<&Var>, batch: &Batch, scale: f64) -> Result<Var> {
        (**self).run(stage, input, batch, scale)
    }

    fn stream(&self, batch: &Batch) -> Option<Spec> {
        (**self).stream(batch)
    }
}
