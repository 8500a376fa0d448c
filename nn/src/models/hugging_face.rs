//! Folders as Hugging Face's `save_pretrained` writes them: `config.json` and safetensors.
//!
//! Parameters of decoders have the names of the files, without the family's prefix (`transformer.`, `model.`). GPT-2's linear weights are
//! stored `[in, out]` in files; here they are `[out, in]`. A tied head is in no file. Models of every kind are read and written by
//! [`load_tensors`] and [`write_folder`](super::save::write_folder); a [`Layout`] says where files have their tensors.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::io::{SafeTensors, TensorEntry};
use phalanx_tensor::{DType, Device, Tensor};
use serde_json::{Map, Value};

use super::fields::parse_fields;
use super::lora::is_adapter;
use super::router_bias::ROUTER_BIAS;
use super::save::{SaveOptions, TensorSource, save_from};
use super::stored::{Layout, Stored};
use super::{Decoder, DecoderStage, ModelConfig};
use crate::{
    Buffer, Entry, Error, LayerFactory, LoadOptions, Mismatch, OneDevice, Parameter, Parameters, Result,
    Scope,
};

pub(super) const WEIGHTS: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
pub(super) const CONFIG: &str = "config.json";
/// The table of a head that has its own.
pub(super) const HEAD_TABLE: &str = "lm_head.weight";

/// Reads a folder's `config.json`.
///
/// # Errors
/// If it cannot be read, is not valid, or a setting is not supported.
pub fn read_config(folder: impl AsRef<Path>) -> Result<ModelConfig> {
    let path = folder.as_ref().join(CONFIG);
    ModelConfig::parse(&read_text(&path)?, &path)
}

/// The fields of a folder's `config.json`, and its path for errors.
pub(super) fn read_fields(folder: &Path) -> Result<(Map<String, Value>, PathBuf)> {
    let path = folder.join(CONFIG);
    Ok((parse_fields(&read_text(&path)?, &path)?, path))
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
    check_elements(config.matrix_elements(), folder.as_ref())
}

/// [`check_size`] of a model with so many elements in matrices.
pub(super) fn check_elements(wanted: f64, folder: &Path) -> Result<()> {
    let stored = Files::open(folder)?.elements()?;
    if wanted > 2.0 * stored + 1e6 {
        let why = format!("a model of at least {wanted} parameters, and the weights beside it are {stored}");
        return Err(Error::invalid(folder.join(CONFIG).display().to_string(), why));
    }
    Ok(())
}

/// Fills a model, or a stage of one, from a folder's safetensors: each parameter takes the part of the file's tensor
/// at its window. A head with a table of its own gets the embedding's where the folder's model ties them.
///
/// # Errors
/// If a file cannot be read, or tensors are missing, unknown or of another shape. Then no parameter is changed.
pub fn load_weights<L: LayerFactory>(
    model: &Decoder<L>,
    config: &ModelConfig,
    folder: impl AsRef<Path>,
) -> Result<()> {
    let stage = model.stage();
    // Other ranks may have some of the experts.
    let has_all = !model.parameters().iter().any(Parameter::has_replica_sites);
    let is_whole = has_all && stage.first && stage.last && stage.layers.len() == config.layers();
    let (folder, options) = (folder.as_ref(), LoadOptions::default());
    load_tensors(model, &OfFolder::new(config, folder), folder, is_whole, options).map(drop)?;
    model.layers().loaded(&model.parameters())
}

/// Fills a model's parameters and buffers from a folder's safetensors, and returns what does not fit. Of a model that is not whole,
/// files may have more tensors.
pub(super) fn load_tensors(
    model: &impl Parameters,
    layout: &dyn Layout,
    folder: &Path,
    is_whole: bool,
    options: LoadOptions,
) -> Result<Mismatch> {
    load_entries(entries(model), layout, folder, is_whole, options)
}

fn load_entries(
    entries: Vec<(String, Held)>,
    layout: &dyn Layout,
    folder: &Path,
    is_whole: bool,
    options: LoadOptions,
) -> Result<Mismatch> {
    let files = Files::open(folder)?;
    let (mut problems, mut fitting, mut used) = (Mismatch::default(), Vec::new(), HashSet::new());
    for (name, entry) in entries {
        let stored = layout.stored(&name);
        used.extend(stored.names.iter().cloned().chain([name.clone()]));
        let Some((stored, tensors)) = find(&files, layout, &name) else {
            // Biases of routers are in files of models that were trained with them; else they begin with 0.
            let is_missing = |name: &String| files.find(name).is_none() && !name.ends_with(ROUTER_BIAS);
            problems.missing.extend(stored.names.into_iter().filter(is_missing));
            continue;
        };
        let misshaped = problems.misshaped.len();
        for (file, stored_name) in &tensors {
            let dtype = file.dtype(stored_name)?;
            if entry.tensor().dtype().is_float() && !dtype.is_float() {
                let why = format!("tensor {stored_name:?} has dtype {dtype}, wanted a floating-point one");
                return Err(phalanx_tensor::Error::file(file.path(), why).into());
            }
            let whole = file.shape(stored_name)?.to_vec();
            let mut shape = stored.rows.shape(&whole).unwrap_or(whole);
            if stored.transposed {
                shape.reverse();
            }
            let mut wanted = entry.whole_shape();
            wanted.iter_mut().take(1).for_each(|rows| *rows /= tensors.len());
            if shape != wanted {
                problems.misshaped.push((stored_name.clone(), shape, wanted));
            }
        }
        if problems.misshaped.len() == misshaped {
            fitting.push((entry, tensors, stored));
        }
    }
    if is_whole {
        let unexpected = files.names().filter(|name| !used.contains(&today(name)) && !layout.is_known(name));
        problems.unexpected = unexpected.map(str::to_string).collect();
    }
    let what = files.what(folder).display().to_string();
    if options.strict {
        problems.clone().check(&what)?;
    } else if fitting.is_empty() {
        problems.clone().check(&format!("{what}: nothing fits"))?;
    }
    // Tensors are read to the CPU one by one, so that only one is in memory twice.
    for (entry, tensors, stored) in fitting {
        let on = stored_on(entry.tensor().device());
        let read = |(file, name): &(&SafeTensors, String)| stored.rows.of(&file.tensor(name, on)?);
        let mut tensors = tensors.iter().map(read).collect::<Result<Vec<_>>>()?;
        let tensor = match tensors.len() {
            1 => tensors.remove(0),
            _ => kernels::cat(&tensors.iter().collect::<Vec<_>>(), 0)?,
        };
        entry.load(&if stored.transposed { tensor.transpose(0, 1)? } else { tensor })?;
    }
    Ok(problems)
}

/// The layout of a folder by a config that may untie what the folder's model ties.
struct OfFolder {
    config: ModelConfig,
    /// The table that the head shares in the folder's model.
    tied: Option<&'static str>,
}

impl OfFolder {
    fn new(config: &ModelConfig, folder: &Path) -> OfFolder {
        // A folder of weights alone ties nothing.
        let tied = read_config(folder).ok().and_then(|of_folder| of_folder.tied_table());
        OfFolder { config: config.clone(), tied }
    }
}

impl Layout for OfFolder {
    fn stored(&self, name: &str) -> Stored {
        let table = self.tied.filter(|_| name == HEAD_TABLE);
        self.config.stored(table.unwrap_or(name))
    }

    fn is_known(&self, stored: &str) -> bool {
        self.config.is_known(stored)
    }
}

/// The parameters of a folder's model, read when they are asked for.
pub struct FolderTensors {
    folder: PathBuf,
    files: Files,
    layout: OfFolder,
    entries: Vec<TensorEntry>,
}

impl FolderTensors {
    /// Opens a folder. Its parameters are given in `dtype`.
    ///
    /// # Errors
    /// If it cannot be read, or has no model of this configuration.
    pub fn open(folder: impl AsRef<Path>, config: &ModelConfig, dtype: DType) -> Result<FolderTensors> {
        let folder = folder.as_ref();
        check_size(config, folder)?;
        let model = config.init(&Scope::new(0, dtype, Device::Meta(0)))?;
        load_weights(&model, config, folder)?;
        let entry = |p: &Parameter| TensorEntry::new(p.name(), dtype, p.tensor().shape());
        let entries = model.parameters().iter().map(entry).collect();
        Ok(FolderTensors {
            folder: folder.into(),
            files: Files::open(folder)?,
            layout: OfFolder::new(config, folder),
            entries,
        })
    }
}

impl TensorSource for FolderTensors {
    fn entries(&self) -> Vec<TensorEntry> {
        self.entries.clone()
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor> {
        let missing = || Error::invalid(self.folder.display().to_string(), format!("{name} is missing"));
        let entry = self.entries.iter().find(|entry| entry.name == name).ok_or_else(missing)?;
        let (stored, files) = find(&self.files, &self.layout, name).ok_or_else(missing)?;
        let each = entry.shape.first().map_or(1, |all| all / files.len());
        let (mut found, first) = (Vec::new(), rows.start / each.max(1));
        for (file, name) in files.iter().take(rows.end.div_ceil(each.max(1))).skip(first) {
            let tensor = stored.rows.of(&file.tensor(name, Device::CPU)?)?;
            let tensor = if stored.transposed { tensor.transpose(0, 1)? } else { tensor };
            found.push(kernels::cast(&tensor, entry.dtype)?);
        }
        let tensor = kernels::cat(&found.iter().collect::<Vec<_>>(), 0)?;
        Ok(tensor.narrow(0, rows.start - first * each, rows.len())?)
    }
}

/// Where files have a tensor of a model, and these files.
fn find<'a>(
    files: &'a Files,
    layout: &dyn Layout,
    name: &str,
) -> Option<(Stored, Vec<(&'a SafeTensors, String)>)> {
    let stored = layout.stored(name);
    // Some files have no prefix.
    let plain = Stored { transposed: stored.transposed, ..Stored::whole(name) };
    [stored, plain].into_iter().find_map(|place| {
        let files = files.all(&place)?;
        Some((place, files))
    })
}

/// A tensor of a model.
enum Held {
    Parameter(Parameter),
    Buffer(Buffer),
}

impl Held {
    fn tensor(&self) -> Tensor {
        match self {
            Held::Parameter(parameter) => parameter.tensor(),
            Held::Buffer(buffer) => buffer.tensor(),
        }
    }

    fn values(&self) -> Result<Tensor> {
        match self {
            Held::Parameter(parameter) => parameter.values(),
            Held::Buffer(buffer) => Ok(buffer.tensor()),
        }
    }

    fn whole_shape(&self) -> Vec<usize> {
        match self {
            Held::Parameter(parameter) => parameter.part().whole_shape(parameter.tensor().rank()),
            Held::Buffer(buffer) => buffer.tensor().shape().to_vec(),
        }
    }

    /// Takes its part of the whole tensor.
    fn load(&self, whole: &Tensor) -> Result<()> {
        match self {
            Held::Parameter(parameter) => {
                parameter.load(&parameter.part().of(whole)?.with_shape(parameter.tensor().shape())?)
            }
            Held::Buffer(buffer) => buffer.load(whole),
        }
    }
}

/// The parameters and buffers of a model, each once. Adapters have a file of their own.
fn entries(model: &impl Parameters) -> Vec<(String, Held)> {
    let (mut found, mut names) = (Vec::new(), HashSet::new());
    model.visit("", &mut |path, entry| match entry {
        Entry::Parameter(parameter) => {
            if !is_adapter(parameter.name()) && names.insert(parameter.name().to_string()) {
                found.push((parameter.name().to_string(), Held::Parameter(parameter.clone())));
            }
        }
        Entry::Buffer(buffer) => found.push((path.to_string(), Held::Buffer(buffer.clone()))),
    });
    found
}

/// Writes a folder as [`save_from`] does, with the usual [`SaveOptions`].
///
/// # Errors
/// If a file cannot be written, the model has no elements (`meta`), or it is a stage or a shard of a model.
pub fn save_model<L: LayerFactory>(
    model: &Decoder<L>,
    config: &ModelConfig,
    folder: impl AsRef<Path>,
) -> Result<()> {
    if *model.stage() != DecoderStage::whole(config.layers()) {
        return Err(Error::invalid("save_model", PART));
    }
    save_tensors(whole_tensors(model)?, config, folder)
}

const PART: &str = "got a part of a model, wanted a whole one";

/// The tensors of a model that is whole on this rank.
pub(super) fn whole_tensors(model: &impl Parameters) -> Result<Vec<(String, Tensor)>> {
    if !model.parameters().iter().all(|p| p.part().is_whole() && !p.has_replica_sites()) {
        return Err(Error::invalid("save_model", PART));
    }
    entries(model).into_iter().map(|(name, entry)| Ok((name, entry.values()?))).collect()
}

/// [`save_model`] of whole tensors by the parameters' names.
///
/// # Errors
/// As [`save_from`].
pub fn save_tensors(
    tensors: Vec<(String, Tensor)>,
    config: &ModelConfig,
    folder: impl AsRef<Path>,
) -> Result<()> {
    save_from(&tensors[..], config, folder, &SaveOptions::default())
}

/// The device that a file's tensor is read to: `meta` for a model without elements, else the CPU.
fn stored_on(device: Device) -> Device {
    if device.is_meta() { device } else { Device::CPU }
}

/// How norms' parameters end, now and in old files.
const FORMER: [(&str, &str); 2] =
    [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")];

/// Today's name of a tensor of a file.
fn today(name: &str) -> String {
    let renamed = |(now, then): (&str, &str)| Some(format!("{}{now}", name.strip_suffix(then)?));
    FORMER.into_iter().find_map(renamed).unwrap_or_else(|| name.to_string())
}

/// The open safetensors of a folder.
pub(super) struct Files(pub(super) Vec<SafeTensors>);

impl Files {
    pub(super) fn open(folder: &Path) -> Result<Files> {
        let index = folder.join(INDEX);
        if folder.join(WEIGHTS).exists() || !index.exists() {
            return Ok(Files(vec![SafeTensors::open(folder.join(WEIGHTS))?]));
        }
        let wrong = |why: String| Error::invalid(index.display().to_string(), why);
        let value: Value =
            serde_json::from_str(&read_text(&index)?).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
        let map = value["weight_map"].as_object().ok_or_else(|| wrong("there is no weight_map".into()))?;
        let file = |v: &Value| v.as_str().map(PathBuf::from);
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

    /// The tensor of that name, or of the name that it has in old files.
    fn find(&self, name: &str) -> Option<(&SafeTensors, String)> {
        let [weight, bias] = FORMER.map(|(now, then)| Some(format!("{}{then}", name.strip_suffix(now)?)));
        let mut names = [Some(name.to_string()), weight, bias].into_iter().flatten();
        names.find_map(|name| Some((self.0.iter().find(|file| file.contains(&name))?, name)))
    }

    /// All tensors that a tensor of the model is stored in.
    fn all(&self, stored: &Stored) -> Option<Vec<(&SafeTensors, String)>> {
        stored.names.iter().map(|name| self.find(name)).collect()
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(|file| file.names())
    }
}

pub(super) fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e: io::Error| phalanx_tensor::Error::file(path, e).into())
}
