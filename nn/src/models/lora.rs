//! Low-rank adapters (LoRA): a [`LayerFactory`] that puts one beside each linear layer of some names, and trains nothing else.
//!
//! ```text
//! y = W x + scale B A x,   A: [rank, in], at first random;   B: [out, rank], at first 0;   scale = alpha / rank
//! ```
//! Beside a column layer B is cut as its weight is, and A is whole; beside a row layer A is cut, and B is whole. So an adapter works under
//! every layout under which the model does.
//! Sources: Hu et al.: LoRA (2021); Kalajdzievski: A rank stabilization scaling factor for fine-tuning with LoRA (2023).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use phalanx_autograd::Var;
use phalanx_kernels as kernels;
use phalanx_tensor::io::{SafeTensors, save_safetensors};
use phalanx_tensor::{DType, Device, Tensor};
use serde_json::{Value, json};

use super::fields::{Fields, Parsed};
use super::save::write_json;
use super::stored::{Layout, Rows};
use super::{Decoder, DecoderStage, ModelConfig};
use crate::layer_factory::{EmbeddingSpec, LinearSpec};
use crate::modules::{Dropout, Linear};
use crate::{
    Error, ExpertExchange, Init, LayerFactory, Mismatch, Module, OneDevice, Parameter, Parameters, Result,
    Scope, parameters,
};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// How adapters are made.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank of what an adapter adds to a weight.
    pub rank: usize,
    /// What is added is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// The linear layers that have one: those whose name, or its end after a dot, is one of these.
    pub targets: Vec<String>,
    /// Dropout of what goes into adapters. Tensor-parallel layers want none.
    pub dropout: f64,
    /// Whether the factor is `alpha / sqrt(rank)` (rsLoRA).
    pub rank_stabilized: bool,
}

impl LoraConfig {
    /// Adapters of a rank for layers of these names, with an alpha of twice the rank.
    pub fn new(rank: usize, targets: &[&str]) -> LoraConfig {
        let targets = targets.iter().map(ToString::to_string).collect();
        LoraConfig { rank, alpha: 2.0 * rank as f64, targets, dropout: 0.0, rank_stabilized: false }
    }

    /// What an adapter's output is multiplied with.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rank_stabilized { rank.sqrt() } else { rank }
    }

    /// Rows of a weight with what an adapter adds to them: the weight `[rows, in]`, `A` `[rank, in]`, these rows of `B` `[rows, rank]`.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn merge(&self, weight: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let more = kernels::mul_scalar(&kernels::matmul(b, a)?, self.scale().into())?;
        Ok(kernels::add(weight, &kernels::cast(&more, weight.dtype())?)?)
    }

    /// The layers of one device with these adapters.
    ///
    /// # Errors
    /// As [`Lora::new`].
    pub fn layers(&self) -> Result<Arc<Lora>> {
        Ok(Arc::new(Lora::new(OneDevice, self.clone())?))
    }

    /// Refuses targets that are not the names of linear layers of the model, and adapters that have no names in PEFT's files.
    ///
    /// # Errors
    /// If there is one of these, or the model's sizes do not fit each other.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        let scope = Scope::new(0, DType::F32, Device::Meta(0));
        let model = config.init_stage(&self.layers()?, &scope, DecoderStage::whole(config.layers()))?;
        let layers: BTreeSet<String> = adapters(&model)
            .iter()
            .filter_map(|p| p.name().strip_suffix(".lora_A.weight").map(String::from))
            .collect();
        let is_unused = |target: &&String| !layers.iter().any(|layer| has_end(layer, target));
        if let Some(target) = self.targets.iter().find(is_unused) {
            return Err(no_layer(target, &model.parameters()));
        }
        adapters(&model).iter().try_for_each(|p| peft_name(config, p.name()).map(drop))
    }

    fn is_target(&self, path: &str) -> bool {
        self.targets.iter().any(|target| has_end(path, target))
    }

    /// Reads a folder's `adapter_config.json`, as PEFT writes it.
    ///
    /// # Errors
    /// If it cannot be read, is not valid, or a setting is not supported.
    pub fn read(folder: impl AsRef<Path>) -> Result<LoraConfig> {
        let path = folder.as_ref().join(CONFIG);
        let text = std::fs::read_to_string(&path).map_err(|e| phalanx_tensor::Error::file(&path, e))?;
        let wrong = |why: String| Error::invalid(path.display().to_string(), why);
        let value: Value = serde_json::from_str(&text).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
        let fields = value.as_object().ok_or_else(|| wrong("not a JSON object".into()))?;
        LoraConfig::of(&Fields::new(fields)).map_err(wrong)
    }

    fn of(f: &Fields<'_>) -> Parsed<LoraConfig> {
        if let Some(kind) = f.text("peft_type")?.filter(|kind| *kind != "LORA") {
            return Err(format!("peft_type {kind:?} is not supported, wanted LORA"));
        }
        if let Some(bias) = f.text("bias")?.filter(|bias| *bias != "none") {
            return Err(format!("bias {bias:?} is not supported, wanted none"));
        }
        for name in ["use_dora", "lora_bias", "use_qalora", "ensure_weight_tying"] {
            f.must_be(name, false)?;
        }
        let rank = f.needed("r")?;
        if rank == 0 {
            return Err("r is 0, wanted at least 1".into());
        }
        let targets = f.list("target_modules")?.ok_or("target_modules is missing")?;
        let targets = targets.iter().map(|v| v.as_str().map(str::to_string)).collect::<Option<_>>();
        let config = LoraConfig {
            rank,
            alpha: f.number("lora_alpha", 8.0)?,
            targets: targets.ok_or("target_modules has something else than names")?,
            dropout: f.number("lora_dropout", 0.0)?,
            rank_stabilized: f.flag("use_rslora", false)?,
        };
        f.all_used(&[
            "auto_mapping",
            "base_model_name_or_path",
            "fan_in_fan_out",
            "inference_mode",
            "init_lora_weights",
            "megatron_core",
            "peft_version",
            "qalora_group_size",
            "revision",
            "task_type",
        ])?;
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.rank, "lora_alpha": self.alpha,
            "lora_dropout": self.dropout, "target_modules": self.targets, "use_rslora": self.rank_stabilized,
            "use_dora": false, "bias": "none", "fan_in_fan_out": false, "init_lora_weights": true,
            "inference_mode": true, "base_model_name_or_path": null, "modules_to_save": null,
        })
    }
}

/// `r=8,alpha=16,targets=q_proj,v_proj`, perhaps with `dropout=0.1` and `rslora=true`.
impl std::fmt::Display for LoraConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let LoraConfig { rank, alpha, targets, dropout, rank_stabilized } = self;
        write!(f, "r={rank},alpha={alpha}")?;
        if *dropout > 0.0 {
            write!(f, ",dropout={dropout}")?;
        }
        if *rank_stabilized {
            write!(f, ",rslora=true")?;
        }
        write!(f, ",targets={}", targets.join(","))
    }
}

/// What `Display` writes, in any order. `r` and `targets` are needed; `alpha` is twice the rank if it is not given.
impl std::str::FromStr for LoraConfig {
    type Err = Error;

    fn from_str(text: &str) -> Result<LoraConfig> {
        let wrong = |part: &str| {
            let wanted =
                "wanted r, alpha, dropout, rslora and targets, as r=8,alpha=16,targets=q_proj,v_proj";
            Error::invalid("LoRA", format!("got {part:?} in {text:?}, {wanted}"))
        };
        let (mut config, mut alpha, mut in_targets) = (LoraConfig::new(0, &[]), None, false);
        for part in text.split(',') {
            let Some((key, value)) = part.split_once('=') else {
                if !in_targets || part.is_empty() {
                    return Err(wrong(part));
                }
                config.targets.push(part.into());
                continue;
            };
            in_targets = key == "targets" && !value.is_empty();
            let number = || value.parse().ok().filter(|x: &f64| x.is_finite()).ok_or_else(|| wrong(part));
            match key {
                "r" => config.rank = value.parse().map_err(|_| wrong(part))?,
                "alpha" => alpha = Some(number()?),
                "dropout" => config.dropout = number()?,
                "rslora" => config.rank_stabilized = value.parse().map_err(|_| wrong(part))?,
                "targets" if in_targets => config.targets.push(value.into()),
                _ => return Err(wrong(part)),
            }
        }
        if config.rank == 0 || config.targets.is_empty() || !(0.0..1.0).contains(&config.dropout) {
            return Err(wrong(text));
        }
        config.alpha = alpha.unwrap_or(2.0 * config.rank as f64);
        Ok(config)
    }
}

/// Makes the layers of a model with adapters beside some, all of whose other parameters are frozen.
#[derive(Debug)]
pub struct Lora<L: LayerFactory = OneDevice> {
    layers: L,
    config: LoraConfig,
    /// Whether a linear layer was made since parameters were last handed out.
    has_linear: AtomicBool,
}

impl<L: LayerFactory> Lora<L> {
    /// Adapters beside layers that `layers` makes.
    ///
    /// # Errors
    /// If the rank is 0.
    pub fn new(layers: L, config: LoraConfig) -> Result<Lora<L>> {
        if config.rank == 0 {
            return Err(Error::invalid("LoRA", "got a rank of 0, wanted at least 1"));
        }
        Ok(Lora { layers, config, has_linear: AtomicBool::new(false) })
    }

    /// How the adapters are made.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    fn adapter<A, B>(
        &self,
        scope: &Scope,
        down: impl FnOnce(&Scope) -> Result<A>,
        up: impl FnOnce(&Scope) -> Result<B>,
    ) -> Result<Option<Adapter<A, B>>> {
        self.has_linear.store(true, Relaxed);
        if !self.config.is_target(scope.path()) {
            return Ok(None);
        }
        // A single head cannot be cut, so this is an error where layers are.
        if self.config.dropout > 0.0 && self.layers.heads(1).is_err() {
            let why = format!("got dropout {} with layers that are cut, wanted 0", self.config.dropout);
            return Err(Error::invalid("LoRA", why));
        }
        Ok(Some(Adapter {
            lora_a: down(&scope.child("lora_A"))?,
            lora_b: up(&scope.child("lora_B"))?,
            dropout: Dropout::new(self.config.dropout, &scope.child("lora_dropout"))?,
            scale: self.config.scale(),
        }))
    }
}

/// A layer, and the adapter beside it, if it has one.
pub struct Adapted<C, A, B> {
    base: C,
    adapter: Option<Adapter<A, B>>,
}

parameters!([C: Parameters, A: Parameters, B: Parameters] Adapted<C, A, B> { base = "", adapter = "" });

struct Adapter<A, B> {
    lora_a: A,
    lora_b: B,
    dropout: Dropout,
    scale: f64,
}

parameters!([A: Parameters, B: Parameters] Adapter<A, B> { lora_a = "lora_A", lora_b = "lora_B" });

impl<C: Module, A: Module, B: Module> Adapted<C, A, B> {
    /// The layer's output and what the adapter adds.
    fn adapted(&self, x: &Var, y: Var) -> Result<Var> {
        let Some(adapter) = &self.adapter else { return Ok(y) };
        let x = if adapter.dropout.is_active() { adapter.dropout.forward(x)? } else { x.clone() };
        let more = adapter.lora_b.forward(&adapter.lora_a.forward(&x)?)?;
        Ok(y.add(&more.mul_scalar(adapter.scale)?)?)
    }
}

impl<C: Module, A: Module, B: Module> Module for Adapted<C, A, B> {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.adapted(x, self.base.forward(x)?)
    }
}

impl<L: LayerFactory> LayerFactory for Lora<L> {
    type Column = Adapted<L::Column, Linear, L::Column>;
    type Row = Adapted<L::Row, L::Row, Linear>;
    type Embedding = L::Embedding;
    type Head = L::Head;

    fn column(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<Self::Column> {
        let (rank, init) = ([self.config.rank], Init::layer(spec.inputs));
        let down = LinearSpec { outputs: &rank, bias: false, init, whole: true, ..spec };
        let up = LinearSpec { inputs: self.config.rank, bias: false, init: Init::ZEROS, ..spec };
        let adapter = self.adapter(
            scope,
            |scope| OneDevice.column(scope, down),
            |scope| self.layers.column(scope, up),
        )?;
        Ok(Adapted { base: self.layers.column(scope, spec)?, adapter })
    }

    fn row(&self, scope: &Scope, spec: LinearSpec<'_>) -> Result<Self::Row> {
        let (rank, init) = ([self.config.rank], Init::layer(spec.inputs));
        let down = LinearSpec { outputs: &rank, bias: false, init, ..spec };
        let up = LinearSpec { inputs: self.config.rank, bias: false, init: Init::ZEROS, ..spec };
        let adapter =
            self.adapter(scope, |scope| self.layers.row(scope, down), |scope| OneDevice.row(scope, up))?;
        Ok(Adapted { base: self.layers.row(scope, spec)?, adapter })
    }

    fn columns(&self, layers: &[&Self::Column], x: &Var) -> Result<Vec<Var>> {
        let bases: Vec<&L::Column> = layers.iter().map(|layer| &layer.base).collect();
        let outputs = self.layers.columns(&bases, x)?;
        layers.iter().zip(outputs).map(|(layer, y)| layer.adapted(x, y)).collect()
    }

    fn embedding(&self, scope: &Scope, spec: EmbeddingSpec) -> Result<Self::Embedding> {
        self.layers.embedding(scope, spec)
    }

    fn head(&self, scope: &Scope, spec: EmbeddingSpec, tied: Option<&Self::Embedding>) -> Result<Self::Head> {
        self.layers.head(scope, spec, tied)
    }

    fn heads(&self, heads: usize) -> Result<Range<usize>> {
        self.layers.heads(heads)
    }

    fn key_heads(&self, queries: usize, keys: usize) -> Result<Range<usize>> {
        self.layers.key_heads(queries, keys)
    }

    fn features(&self, features: usize) -> Result<Range<usize>> {
        self.layers.features(features)
    }

    fn stream(&self, positions: usize) -> Result<Range<usize>> {
        self.layers.stream(positions)
    }

    fn set_whole_stream(&self, whole: bool) {
        self.layers.set_whole_stream(whole);
    }

    fn on_whole_stream(&self, x: &Var, work: &mut dyn FnMut(&Var) -> Result<Var>) -> Result<Var> {
        self.layers.on_whole_stream(x, work)
    }

    fn experts(&self) -> Option<&dyn ExpertExchange> {
        self.layers.experts()
    }

    fn partial(&self, parameters: &[Parameter]) -> Result<()> {
        self.layers.partial(parameters)
    }

    fn built(&self, parameters: &[Parameter]) -> Result<()> {
        self.layers.built(parameters)?;
        // A pipeline's stage may have no blocks.
        let wanted = self.has_linear.swap(false, Relaxed);
        if wanted && !parameters.iter().any(|parameter| is_adapter(parameter.name())) {
            return Err(no_layer(&self.config.targets.join(","), parameters));
        }
        parameters.iter().filter(|parameter| !is_adapter(parameter.name())).for_each(Parameter::freeze);
        Ok(())
    }
}

pub(super) fn is_adapter(name: &str) -> bool {
    name.contains(".lora_A.") || name.contains(".lora_B.")
}

/// The error for a target that is not the name of a linear layer.
fn no_layer(target: &str, parameters: &[Parameter]) -> Error {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let name = |p: &Parameter| {
        let layer = p.name().strip_suffix(".weight")?;
        let in_block = p.tensor().rank() == 2 && layer.split('.').any(is_number) && !is_adapter(p.name());
        Some(layer.rsplit('.').next()?.to_string()).filter(|_| in_block)
    };
    let names: BTreeSet<String> = parameters.iter().filter_map(name).collect();
    let names = names.into_iter().collect::<Vec<_>>().join(", ");
    Error::invalid("LoRA", format!("no linear layer is called {target:?}; those of this model are {names}"))
}

/// Whether a path, or its end after a dot, is that name.
fn has_end(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The parameters of adapters, for an optimizer or a checkpoint.
pub fn adapters(model: &impl Parameters) -> Vec<Parameter> {
    model.parameters().into_iter().filter(|parameter| is_adapter(parameter.name())).collect()
}

/// A parameter's name in PEFT's files.
fn peft_name(config: &ModelConfig, name: &str) -> Result<String> {
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
        let unknown = |name: &&str| !fitting.iter().any(|(_, known)| known == name);
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
    write_json(&folder.join(CONFIG), &lora.json())
}

/// The tensors of a whole model by the parameters' names, with what the adapters add in the weights, for
/// [`save_tensors`](super::save_tensors).
///
/// # Errors
/// If a tensor cannot be computed.
pub fn merged<L: LayerFactory>(model: &Decoder<Lora<L>>, lora: &LoraConfig) -> Result<Vec<(String, Tensor)>> {
    let all: BTreeMap<String, Tensor> =
        model.parameters().iter().map(|p| (p.name().to_string(), p.tensor())).collect();
    let merge = |p: &Parameter| {
        let (name, weight) = (p.name().to_string(), p.tensor());
        let adapter = |which: &str| all.get(&format!("{}.{which}.weight", name.strip_suffix(".weight")?));
        let (Some(a), Some(b)) = (adapter("lora_A"), adapter("lora_B")) else { return Ok((name, weight)) };
        Ok((name, lora.merge(&weight, a, b)?))
    };
    model.parameters().iter().filter(|p| !is_adapter(p.name())).map(merge).collect()
}
