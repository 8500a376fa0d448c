//! Files of adapters as PEFT writes them, and weights with what adapters add to them.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_kernels as kernels;
use phalanx_tensor::io::{SafeTensors, save_safetensors};
use phalanx_tensor::{Device, Tensor};

use super::magnitude::{self, MAGNITUDE};
use super::{Lora, LoraConfig, adapters, is_adapter};
use crate::models::stored::{Layout, Rows};
use crate::models::{Decoder, DecoderStage, ModelConfig};
use crate::{Error, LayerFactory, Mismatch, Parameter, Parameters, Result};

const WEIGHTS: &str = "adapter_model.safetensors";

impl LoraConfig {
    /// Rows of a weight with what an adapter adds to them: the weight `[rows, in]`, `A` `[rank, in]`, these rows of `B` `[rows, rank]`, and
    /// with DoRA of the magnitude `[rows]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or there is a magnitude without DoRA, or none with it.
    pub fn merge(
        &self,
        weight: &Tensor,
        a: &Tensor,
        b: &Tensor,
        magnitude: Option<&Tensor>,
    ) -> Result<Tensor> {
        if magnitude.is_some() != self.dora {
            let got = if self.dora { "no magnitude with DoRA" } else { "a magnitude without DoRA" };
            return Err(Error::invalid("LoRA: merge", format!("got {got}")));
        }
        if let Some(magnitude) = magnitude {
            return magnitude::Adapted { weight, a, b, scale: self.scale() }.merged(magnitude);
        }
        let more = kernels::mul_scalar(&kernels::matmul(b, a)?, self.scale().into())?;
        Ok(kernels::add(weight, &kernels::cast(&more, weight.dtype())?)?)
    }
}

/// A parameter's name in PEFT's files.
pub(super) fn peft_name(config: &ModelConfig, name: &str) -> Result<String> {
    match (&config.stored(name).names[..], config.stored(name).rows) {
        ([stored], Rows::All) => Ok(format!("base_model.model.{stored}")),
        _ => {
            let why = format!(
                "the files of this family join {name} with others, and an adapter of one alone has no name there"
            );
            Err(Error::invalid("LoRA", why))
        }
    }
}

/// Fills a model's adapters, or those of a stage, from a folder as PEFT writes it.
///
/// # Errors
/// If a file cannot be read, or tensors are missing, unknown or of another shape. Then no parameter is changed.
pub fn load_adapter<L: LayerFactory>(
    model: &Decoder<Lora<L>>,
    config: &ModelConfig,
    folder: impl AsRef<Path>,
) -> Result<()> {
    let file = SafeTensors::open(folder.as_ref().join(WEIGHTS))?;
    let (mut problems, mut fitting) = (Mismatch::default(), Vec::new());
    for parameter in adapters(model) {
        let name = peft_name(config, parameter.name())?;
        if !file.contains(&name) {
            problems.missing.push(name);
            continue;
        }
        let (shape, wanted) =
            (file.shape(&name)?.to_vec(), parameter.part().whole_shape(parameter.tensor().rank()));
        match shape == wanted {
            true => fitting.push((parameter, name)),
            false => problems.misshaped.push((name, shape, wanted)),
        }
    }
    if *model.stage() == DecoderStage::whole(config.layers()) {
        let known: Vec<&String> = fitting.iter().map(|(_, name)| name).collect();
        let unknown = |name: &&str| !known.iter().any(|known| known == name);
        problems.unexpected = file.names().filter(unknown).map(str::to_string).collect();
    }
    problems.check(&file.path().display().to_string())?;
    for (parameter, name) in fitting {
        let whole = file.tensor(&name, Device::CPU)?;
        parameter.load(&parameter.part().of(&whole)?.with_shape(parameter.tensor().shape())?)?;
    }
    Ok(())
}

/// Writes a model's adapters as PEFT does: `adapter_model.safetensors` first, `adapter_config.json` last, each atomically.
///
/// # Errors
/// If a file cannot be written, or the model is a stage or a shard of a model.
pub fn save_adapter<L: LayerFactory>(
    model: &Decoder<Lora<L>>,
    config: &ModelConfig,
    lora: &LoraConfig,
    folder: impl AsRef<Path>,
) -> Result<()> {
    let (folder, parameters) = (folder.as_ref(), adapters(model));
    let is_whole = parameters.iter().all(|p| p.part().is_whole());
    if *model.stage() != DecoderStage::whole(config.layers()) || !is_whole {
        return Err(Error::invalid("save_adapter", "got a part of a model, wanted a whole one"));
    }
    std::fs::create_dir_all(folder).map_err(|e| phalanx_tensor::Error::file(folder, e))?;
    let named = |p: &Parameter| Ok((peft_name(config, p.name())?, p.tensor()));
    let tensors: Vec<(String, Tensor)> = parameters.iter().map(named).collect::<Result<_>>()?;
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let named = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    save_safetensors(folder.join(WEIGHTS), named, &metadata)?;
    lora.write(folder)
}

/// The tensors of a whole model by the parameters' names, with what the adapters add in the weights, for
/// [`save_tensors`](crate::models::save_tensors).
///
/// # Errors
/// If a tensor cannot be computed.
pub fn merged<L: LayerFactory>(model: &Decoder<Lora<L>>, lora: &LoraConfig) -> Result<Vec<(String, Tensor)>> {
    let all: BTreeMap<String, Tensor> =
        model.parameters().iter().map(|p| (p.name().to_string(), p.tensor())).collect();
    let merge = |p: &Parameter| {
        let (name, weight) = (p.name().to_string(), p.values()?);
        let beside = |which: &str| all.get(&format!("{}.{which}", name.strip_suffix(".weight")?));
        let (Some(a), Some(b)) = (beside("lora_A.weight"), beside("lora_B.weight")) else {
            return Ok((name, weight));
        };
        let layer = model.layers().layer(name.strip_suffix(".weight").unwrap_or(&name));
        let merged = lora.of_layer(&layer.peft)?.merge(&weight, a, b, beside(MAGNITUDE))?;
        Ok((name, merged))
    };
    model.parameters().iter().filter(|p| !is_adapter(p.name())).map(merge).collect()
}
