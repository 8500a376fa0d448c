//! What a run of a language model leaves: [`whole_decoder`] on the first rank, and [`save_decoder`], which writes Hugging Face folders.

use std::path::Path;
use std::sync::Arc;

use phalanx_nn::models::{
    BaseWeights, Decoder, DecoderStage, LoraConfig, ModelConfig, merged, save_adapter, save_model,
    save_tensors,
};
use phalanx_nn::{LayerFactory, OneDevice, Scope, load_state_dict};

use crate::{Result, Run};

/// The whole model, on the first rank: of the averages of the weights, if there are such, and with the adapters, if the run trains such,
/// in the weights. All ranks call it.
///
/// # Errors
/// If memory is short, a rank does not take part, or the run trains another model.
pub fn whole_decoder(run: &Run, config: &ModelConfig, lora: Option<&LoraConfig>) -> Result<Option<Decoder>> {
    let Some(lora) = lora else { return whole(run, config, Arc::new(OneDevice)) };
    let Some(adapted) = whole(run, config, in_floats(lora).layers()?)? else { return Ok(None) };
    let tensors = merged(&adapted, lora)?;
    drop(adapted);
    let model = lora.merged_config(config)?.init(&scope(run))?;
    load_state_dict(&model, tensors)?;
    Ok(Some(model))
}

/// Writes the whole model as a Hugging Face folder, and the adapters, if the run trains such, as PEFT does into the folder `adapter` in it.
/// Returns whether this rank, the first, has written it. All ranks call it.
///
/// # Errors
/// As [`whole_decoder`]; if a file cannot be written.
pub fn save_decoder(
    run: &Run,
    config: &ModelConfig,
    lora: Option<&LoraConfig>,
    folder: impl AsRef<Path>,
) -> Result<bool> {
    let folder = folder.as_ref();
    let Some(lora) = lora else {
        let Some(model) = whole(run, config, Arc::new(OneDevice))? else { return Ok(false) };
        save_model(&model, config, folder)?;
        return Ok(true);
    };
    let Some(model) = whole(run, config, in_floats(lora).layers()?)? else { return Ok(false) };
    save_tensors(merged(&model, lora)?, &lora.merged_config(config)?, folder)?;
    save_adapter(&model, config, lora, folder.join("adapter"))?;
    Ok(true)
}

/// The same adapters beside weights in floats. Floats of 8-bit blocks would not have the same blocks.
fn in_floats(lora: &LoraConfig) -> LoraConfig {
    LoraConfig { base: BaseWeights::Float, ..lora.clone() }
}

fn whole<L: LayerFactory>(run: &Run, config: &ModelConfig, layers: Arc<L>) -> Result<Option<Decoder<L>>> {
    let _averages = run.averaged()?;
    let entries = run.full_state_dict()?;
    if !run.mesh_rank().is_first() {
        return Ok(None);
    }
    let model = config.init_stage(&layers, &scope(run), DecoderStage::whole(config.layers()))?;
    load_state_dict(&model, entries)?;
    Ok(Some(model))
}

fn scope(run: &Run) -> Scope {
    Scope::new(0, run.config().dtype, run.mesh_rank().device)
}
