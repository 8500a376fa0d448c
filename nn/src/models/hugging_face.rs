//! Folders as Hugging Face's `save_pretrained` writes them: `config.json` and safetensors.
//!
//! Parameters have the names of the files, without the family's prefix (`transformer.`, `model.`). GPT-2's linear weights are
//! stored `[in, out]` in files; here they are `[out, in]`. A tied head is in no file.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_tensor::io::{SafeTensors, atomic, save_safetensors};
use phalanx_tensor::{Device, Tensor};

use super::lora::is_adapter;
use super::transformer::{Rows, Stored};
use super::{Decoder, DecoderStage, ModelConfig};
use crate::{Error, LayerFactory, Mismatch, OneDevice, Parameters, Result, Scope};

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// Reads a folder's `config.json`.
///
/// # Errors
/// If it cannot be read, is not valid, or a setting is not supported.
pub fn read_config(folder: impl AsRef<Path>) -> Result<ModelConfig> {
    let path = folder.as_ref().join(CONFIG);
    ModelConfig::parse(&read_text(&path)?, &path)
}

/// Builds the model of a folder, with its weights in the scope's dtype. As after transformers' `from_pretrained`, it is in
/// evaluation mode, without dropout. Call [`Decoder::train`] to train it with the config's dropout.
///
/// # Errors
/// As [`read_config`] and [`load_weights`].
pub fn load_model(folder: impl AsRef<Path>, scope: &Scope) -> Result<(ModelConfig, Decoder)> {
    let config = read_config(&folder)?;
    let model = load_configured(&config, folder, scope)?;
    model.eval();
    Ok((config, model))
}

/// Builds the model of a folder by a config that may differ from the folder's in settings without weights, such as dropout. It is in
/// training mode, as a new model is.
///
/// # Errors
/// As [`load_weights`].
pub fn load_configured(config: &ModelConfig, folder: impl AsRef<Path>, scope: &Scope) -> Result<Decoder> {
    load_stage(config, folder, &Arc::new(OneDevice), scope, DecoderStage::whole(config.layers()))
}

/// Builds a stage of a folder's model from these layers. Each parameter loads its part of the weights.
///
/// # Errors
/// As [`load_weights`], or if the layers cannot be cut.
pub fn load_stage<L: LayerFactory>(
    config: &ModelConfig,
    folder: impl AsRef<Path>,
    layers: &Arc<L>,
    scope: &Scope,
    stage: DecoderStage,
) -> Result<Decoder<L>> {
    check_size(config, &folder)?;
    let model = config.init_stage(layers, scope, stage)?;
    load_weights(&model, config, folder)?;
    Ok(model)
}

/// Refuses a config of a model that is far larger than the weights beside it, before memory is allocated, since a damaged config may
/// ask for any amount. [`load_weights`] names weights that are missing.
///
/// # Errors
/// If it is, or the files cannot be read.
pub fn check_size(config: &ModelConfig, folder: impl AsRef<Path>) -> Result<()> {
    let (wanted, stored) = (config.matrix_elements(), Files::open(folder.as_ref())?.elements()?);
    if wanted > 2.0 * stored + 1e6 {
        let why = format!("a model of at least {wanted} parameters, and the weights beside it are {stored}");
        return Err(Error::invalid(folder.as_ref().join(CONFIG).display().to_string(), why));
    }
    Ok(())
}

/// Fills a model, or a stage of one, from a folder's safetensors: each parameter takes the part of the file's tensor
/// at its window.
///
/// # Errors
/// If a file cannot be read, or tensors are missing, unknown or of another shape. Then no parameter is changed.
pub fn load_weights<L: LayerFactory>(
    model: &Decoder<L>,
    config: &ModelConfig,
    folder: impl AsRef<Path>,
) -> Result<()> {
    let folder = folder.as_ref();
    let files = Files::open(folder)?;
    let (mut problems, mut fitting) = (Mismatch::default(), Vec::new());
    // Adapters have a file of their own.
    for parameter in model.parameters().into_iter().filter(|parameter| !is_adapter(parameter.name())) {
        let name = parameter.name().to_string();
        let Stored { name: stored, rows } = config.stored(&name);
        let Some(file) = files.find(&stored).or_else(|| files.find(&name)) else {
            problems.missing.push(stored);
            continue;
        };
        let (stored, rows) = if file.contains(&stored) { (stored, rows) } else { (name.clone(), Rows::All) };
        let dtype = file.dtype(&stored)?;
        if !dtype.is_float() {
            let why = format!("tensor {stored:?} has dtype {dtype}, wanted a floating-point one");
            return Err(phalanx_tensor::Error::file(file.path(), why).into());
        }
        let whole = file.shape(&stored)?.to_vec();
        let mut shape = rows.shape(&whole).unwrap_or(whole);
        let transposed = is_transposed(config, &name);
        if transposed {
            shape.reverse();
        }
        let wanted = parameter.part().whole_shape(parameter.tensor().rank());
        match shape == wanted {
            true => fitting.push((parameter, file, stored, rows, transposed)),
            false => problems.misshaped.push((stored, shape, wanted)),
        }
    }
    if model.stage().first && model.stage().last && model.stage().layers.len() == config.layers() {
        problems.unexpected = unexpected(model, config, &files);
    }
    problems.check(&files.what(folder).display().to_string())?;
    // Tensors are read to the CPU one by one, so that only one is in memory twice.
    for (parameter, file, stored, rows, transposed) in fitting {
        let tensor = rows.of(&file.tensor(&stored, stored_on(parameter.device()))?)?;
        let whole = if transposed { tensor.transpose(0, 1)? } else { tensor };
        parameter.load(&parameter.part().of(&whole)?.with_shape(parameter.tensor().shape())?)?;
    }
    Ok(())
}

/// Writes a folder: `model.safetensors` first, `config.json` last, each atomically.
///
/// # Errors
/// If a file cannot be written, the model has no elements (`meta`), or it is a stage or a shard of a model.
pub fn save_model<L: LayerFactory>(
    model: &Decoder<L>,
    config: &ModelConfig,
    folder: impl AsRef<Path>,
) -> Result<()> {
    let parameters = model.parameters();
    if *model.stage() != DecoderStage::whole(config.layers())
        || !parameters.iter().all(|p| p.part().is_whole())
    {
        return Err(Error::invalid("save_model", "got a part of a model, wanted a whole one"));
    }
    let tensors = parameters.iter().map(|p| (p.name().to_string(), p.tensor())).collect();
    save_tensors(tensors, config, folder)
}

/// [`save_model`] of whole tensors by the parameters' names.
///
/// # Errors
/// If a file cannot be written, or tensors have no elements (`meta`).
pub fn save_tensors(
    tensors: Vec<(String, Tensor)>,
    config: &ModelConfig,
    folder: impl AsRef<Path>,
) -> Result<()> {
    let folder = folder.as_ref();
    std::fs::create_dir_all(folder).map_err(|e| phalanx_tensor::Error::file(folder, e))?;
    let dtype = tensors.first().map_or(phalanx_tensor::DType::F32, |(_, tensor)| tensor.dtype());
    let tensors = file_tensors(tensors, config)?;
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let named = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    save_safetensors(folder.join(WEIGHTS), named, &metadata)?;
    let json = serde_json::to_string_pretty(&config.to_json(dtype))
        .map_err(|e| Error::invalid(CONFIG, e.to_string()))?;
    atomic::write(folder.join(CONFIG), |file| {
        file.write_all(json.as_bytes()).and_then(|()| file.write_all(b"\n"))
    })?;
    Ok(())
}

/// Whole tensors by the parameters' names, such as their gradients, as a file has them: under its names, transposed and joined as there.
///
/// # Errors
/// If a tensor has not the shape of its parameter.
pub fn file_tensors(tensors: Vec<(String, Tensor)>, config: &ModelConfig) -> Result<Vec<(String, Tensor)>> {
    let mut order: Vec<String> = Vec::new();
    let mut parts: BTreeMap<String, Vec<(Rows, Tensor)>> = BTreeMap::new();
    for (name, tensor) in tensors {
        let tensor = if is_transposed(config, &name) { tensor.transpose(0, 1)? } else { tensor };
        let Stored { name, rows } = config.stored(&name);
        if !parts.contains_key(&name) {
            order.push(name.clone());
        }
        parts.entry(name).or_default().push((rows, tensor));
    }
    let joined = |name: String| {
        let mut of = parts.remove(&name).unwrap_or_default();
        of.sort_by_key(|(rows, _)| rows.place());
        let rows = of.first().map_or(Rows::All, |(rows, _)| *rows);
        let tensors: Vec<Tensor> = of.into_iter().map(|(_, tensor)| tensor).collect();
        Ok((name, rows.join(&tensors)?))
    };
    order.into_iter().map(joined).collect()
}

/// Whether a parameter is stored transposed.
fn is_transposed(config: &ModelConfig, name: &str) -> bool {
    let maps = ["c_attn.weight", "c_proj.weight", "c_fc.weight"];
    matches!(config, ModelConfig::Gpt(_)) && maps.iter().any(|map| name.ends_with(map))
}

/// Tensors of the files without a parameter, except those that old files are known to have.
fn unexpected<L: LayerFactory>(model: &Decoder<L>, config: &ModelConfig, files: &Files) -> Vec<String> {
    let names = model.named_parameters();
    let stored: Vec<String> = names.iter().map(|(_, p)| config.stored(p.name()).name).collect();
    let wanted = |name: &str| names.iter().any(|(_, p)| name == p.name()) || stored.iter().any(|n| n == name);
    let masks = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"];
    let known = |stored: &str| masks.iter().any(|mask| stored.ends_with(mask)) || stored == "lm_head.weight";
    files.names().filter(|stored| !wanted(stored) && !known(stored)).map(str::to_string).collect()
}

/// The device that a file's tensor is read to: `meta` for a model without elements, else the CPU.
fn stored_on(device: Device) -> Device {
    if device.is_meta() { device } else { Device::CPU }
}

/// The open safetensors of a folder.
struct Files(Vec<SafeTensors>);

impl Files {
    fn open(folder: &Path) -> Result<Files> {
        let index = folder.join(INDEX);
        if folder.join(WEIGHTS).exists() || !index.exists() {
            return Ok(Files(vec![SafeTensors::open(folder.join(WEIGHTS))?]));
        }
        let wrong = |why: String| Error::invalid(index.display().to_string(), why);
        let value: serde_json::Value =
            serde_json::from_str(&read_text(&index)?).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
        let map = value["weight_map"].as_object().ok_or_else(|| wrong("there is no weight_map".into()))?;
        let file = |v: &serde_json::Value| v.as_str().map(PathBuf::from);
        let names: Option<Vec<PathBuf>> = map.values().map(file).collect();
        let mut names = names.ok_or_else(|| wrong("weight_map has a value that is no file's name".into()))?;
        names.sort();
        names.dedup();
        if names.iter().any(|name| name.components().count() != 1 || name.is_absolute()) {
            return Err(wrong("weight_map names a file outside the folder".into()));
        }
        Ok(Files(
            names
                .iter()
                .map(|name| SafeTensors::open(folder.join(name)))
                .collect::<std::result::Result<_, _>>()?,
        ))
    }

    /// Elements of all tensors.
    fn elements(&self) -> Result<f64> {
        let mut sum = 0.0;
        for file in &self.0 {
            for name in file.names() {
                sum += file.shape(name)?.iter().map(|&n| n as f64).product::<f64>();
            }
        }
        Ok(sum)
    }

    /// The path in errors about the tensors: the file, or the folder of several files.
    fn what<'a>(&'a self, folder: &'a Path) -> &'a Path {
        if let [file] = &self.0[..] { file.path() } else { folder }
    }

    fn find(&self, name: &str) -> Option<&SafeTensors> {
        self.0.iter().find(|file| file.contains(name))
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(|file| file.names())
    }
}

fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e: io::Error| phalanx_tensor::Error::file(path, e).into())
}
