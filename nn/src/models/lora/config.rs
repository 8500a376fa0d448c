//! [`LoraConfig`]: how adapters are made, as a value, as a text, and as PEFT's `adapter_config.json`.

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use serde_json::{Value, json};

use super::Modules;
use super::modules::{EMBEDDINGS, Layer, block, expression, first_match};
use crate::models::fields::{Fields, Parsed, as_size};
use crate::models::save::write_json;
use crate::{Error, Result};

const CONFIG: &str = "adapter_config.json";
const MODULES: &str = "a list of names or a regular expression";

/// How adapters are made.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank of what an adapter adds to a weight.
    pub rank: usize,
    /// A layer with an adapter gives `W x + (alpha / rank) B A x`.
    pub alpha: f64,
    /// The linear layers that have one, and the embedding.
    pub targets: Modules,
    /// Weights that have one beside these, by their paths in transformers' model or the ends of these after a dot: those of experts, which
    /// that model joins (`gate_up_proj`, `down_proj`), of gates (`gate.weight`), or of linear layers (PEFT: `target_parameters`). An expert's gate
    /// and up map share `A` then.
    pub weights: Vec<String>,
    /// Those layers of the targets that have none.
    pub excluded: Modules,
    /// The blocks whose layers have one, if targets are names and no whole paths: all of them, if this is empty.
    pub blocks: Vec<usize>,
    /// Regular expressions for the name in front of a block's number in a path, such as `layers`. If there are none, any name may stand there.
    pub blocks_after: Vec<String>,
    /// Modules that are trained as they are, such as the head or the embedding of new tokens: those whose path in transformers' model ends
    /// with one of these texts, and all in them (PEFT: `modules_to_save`). None of them has an adapter.
    pub trained: Vec<String>,
    /// Whether a table that is trained so and that the head shares stays shared (PEFT: `ensure_weight_tying`). If it does not, the embedding and
    /// the head have a table each ([`LoraConfig::model_config`]).
    pub keeps_tie: bool,
    /// Which biases of the model are trained.
    pub biases: TrainedBiases,
    /// Whether `B` has a bias, which is 0 at first and is scaled as `B A x` is (PEFT: `lora_bias`).
    pub biased: bool,
    /// Ranks of some layers: of those whose path in transformers' model, or its end after a dot, is the first in this map that matches, as a
    /// regular expression.
    pub ranks: BTreeMap<String, usize>,
    /// Alphas of some layers, as with ranks.
    pub alphas: BTreeMap<String, f64>,
    /// Dropout of what goes into adapters. Tensor-parallel layers want none.
    pub dropout: f64,
    /// Whether the factor is `alpha / sqrt(rank)` (rsLoRA).
    pub rank_stabilized: bool,
    /// Whether each row of a weight keeps its length, which is trained by itself, whatever an adapter adds to it (DoRA). With dropout what
    /// is dropped goes into the weight's part of this too, as in PEFT.
    pub dora: bool,
    /// How the weights of the model's linear layers are held.
    pub base: BaseWeights,
}

/// Which of a model's biases are trained beside adapters (PEFT: `bias`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainedBiases {
    /// None of them.
    #[default]
    None,
    /// All of them, those of norms too.
    All,
    /// Those of layers that have an adapter.
    OfAdapted,
}

impl TrainedBiases {
    const NAMES: [(TrainedBiases, &str); 3] =
        [(TrainedBiases::None, "none"), (TrainedBiases::All, "all"), (TrainedBiases::OfAdapted, "lora_only")];

    /// PEFT's name.
    fn name(self) -> &'static str {
        TrainedBiases::NAMES.into_iter().find(|(biases, _)| *biases == self).map_or("", |(_, name)| name)
    }

    fn of(text: &str) -> Option<TrainedBiases> {
        TrainedBiases::NAMES.into_iter().find(|(_, name)| *name == text).map(|(biases, _)| biases)
    }
}

/// How the frozen weights of linear layers are held while adapters are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BaseWeights {
    /// In the model's dtype.
    #[default]
    Float,
    /// In 8-bit blocks: those of all linear layers, beside which there are adapters or not. Embeddings, norms, biases and the head stay
    /// as they are. See [`Parameter::hold_in_int8`](crate::Parameter::hold_in_int8).
    Int8,
}

impl LoraConfig {
    /// Adapters of a rank for layers of these names, with an alpha of twice the rank.
    pub fn new(rank: usize, targets: &[&str]) -> LoraConfig {
        let targets = Modules::Names(targets.iter().map(ToString::to_string).collect());
        LoraConfig {
            rank,
            alpha: 2.0 * rank as f64,
            targets,
            weights: Vec::new(),
            excluded: Modules::default(),
            blocks: Vec::new(),
            blocks_after: Vec::new(),
            trained: Vec::new(),
            keeps_tie: true,
            biases: TrainedBiases::None,
            biased: false,
            ranks: BTreeMap::new(),
            alphas: BTreeMap::new(),
            dropout: 0.0,
            rank_stabilized: false,
            dora: false,
            base: BaseWeights::Float,
        }
    }

    /// The settings of one layer's adapter: those of all, with this layer's rank and alpha. `path` is its path in transformers' model, such
    /// as `model.layers.0.self_attn.q_proj`.
    ///
    /// # Errors
    /// If an expression is not supported.
    pub fn of_layer(&self, path: &str) -> Result<LoraConfig> {
        let wrong = |why| Error::invalid("LoRA", why);
        Ok(LoraConfig {
            rank: first_match(&self.ranks, path).map_err(wrong)?.unwrap_or(self.rank),
            alpha: first_match(&self.alphas, path).map_err(wrong)?.unwrap_or(self.alpha),
            ranks: BTreeMap::new(),
            alphas: BTreeMap::new(),
            ..self.clone()
        })
    }

    /// [`LoraConfig::of_layer`] of a layer, or of its weight where that is what has an adapter.
    pub(super) fn of_target(&self, layer: &Layer) -> Result<LoraConfig> {
        self.of_layer(if layer.has_weight(&self.weights) { &layer.parameter } else { &layer.peft })
    }

    /// Whether a layer has an adapter.
    pub(super) fn is_target(&self, layer: &Layer) -> Parsed<bool> {
        if layer.has_weight(&self.weights) {
            return Ok(true);
        }
        if self.excluded.has(layer)? || !self.targets.has(layer)? {
            return Ok(false);
        }
        // As in PEFT, a whole path is that layer, in whichever block it is.
        let is_path = matches!(&self.targets, Modules::Names(names) if names.contains(&layer.peft));
        let all = self.blocks.is_empty() || is_path;
        Ok(all || block(&layer.peft, &self.blocks_after)?.is_some_and(|block| self.blocks.contains(&block)))
    }

    /// Whether the embedding of some family has one.
    fn may_adapt_embedding(&self) -> Parsed<bool> {
        let of = |path: &str| Layer::new(path, path);
        EMBEDDINGS.into_iter().try_fold(false, |any, path| Ok(any || self.is_target(&of(path))?))
    }

    /// Which layers have an adapter, for errors.
    pub(super) fn chosen(&self) -> String {
        let is_choice = |field: &str| !["rank_pattern", "alpha_pattern"].contains(&field);
        let some = self.of_some_layers().into_iter().filter(|(field, _)| is_choice(field));
        let some = some.map(|(field, value)| format!(", {field} = {value}"));
        format!("{:?}{}", self.targets.to_string(), some.collect::<String>())
    }

    /// Refuses settings that do not fit each other.
    pub(super) fn check_settings(&self) -> Parsed<()> {
        if let Some((name, _)) = self.ranks.iter().find(|(_, rank)| **rank == 0) {
            return Err(format!("rank_pattern has a rank of 0 for {name:?}, wanted at least 1"));
        }
        if self.trained.contains(&String::new()) {
            return Err("modules_to_save has a name without letters, which would be every module's".into());
        }
        if self.rank == 0 {
            return Err("got a rank of 0, wanted at least 1".into());
        }
        let unfit =
            [(self.dora, "use_dora"), (self.biased, "lora_bias"), (self.dropout > 0.0, "lora_dropout")];
        if let Some((_, name)) = unfit.into_iter().find(|(unfit, _)| *unfit && !self.weights.is_empty()) {
            return Err(format!("target_parameters is {:?} beside {name}, wanted one of them", self.weights));
        }
        if self.biased && self.dora {
            return Err("lora_bias is true beside use_dora, wanted one of them".into());
        }
        let is_pattern = matches!(self.targets, Modules::Pattern(_));
        if is_pattern && !(self.blocks.is_empty() && self.blocks_after.is_empty()) {
            return Err(format!(
                "layers_to_transform is {:?} and target_modules an expression, wanted names",
                self.blocks
            ));
        }
        if self.blocks.is_empty() && !self.blocks_after.is_empty() {
            return Err(format!(
                "layers_pattern is {:?}, wanted layers_to_transform, too",
                self.blocks_after
            ));
        }
        let of = |field: &'static str| move |why: String| format!("{field}: {why}");
        let check = |pattern: &String| expression(pattern).map(drop);
        self.targets.check().map_err(of("target_modules"))?;
        self.excluded.check().map_err(of("exclude_modules"))?;
        self.blocks_after.iter().try_for_each(check).map_err(of("layers_pattern"))?;
        self.ranks.keys().try_for_each(check).map_err(of("rank_pattern"))?;
        self.alphas.keys().try_for_each(check).map_err(of("alpha_pattern"))
    }

    /// What an adapter's output is multiplied with, if its layer has no rank or alpha of its own.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rank_stabilized { rank.sqrt() } else { rank }
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
        let biases = f.get("bias", "none, all or lora_only", |value| TrainedBiases::of(value.as_str()?))?;
        f.must_be("use_qalora", false)?;
        let is_empty = |value: &Value| match value {
            Value::Array(all) => all.is_empty(),
            Value::Object(all) => all.is_empty(),
            _ => false,
        };
        let wanted = "null, as it is not supported";
        f.get("trainable_token_indices", wanted, |value| is_empty(value).then_some(()))?;
        let names =
            |value: &Value| value.as_array()?.iter().map(|name| name.as_str().map(str::to_string)).collect();
        let weights: Vec<String> = f.get("target_parameters", "a list of names", names)?.unwrap_or_default();
        let targets = f.get("target_modules", MODULES, Modules::of)?;
        let blocks = f.get("layers_to_transform", "a number or a list of numbers", |value| match value {
            Value::Array(all) => all.iter().map(as_size).collect(),
            one => as_size(one).map(|one| vec![one]),
        })?;
        let text = |value: &Value| value.as_str().map(str::to_string);
        let blocks_after = f.get("layers_pattern", "a name or a list of names", |value| match value {
            Value::Array(all) => all.iter().map(text).collect(),
            one => text(one).map(|one| vec![one]),
        })?;
        let trained: Vec<String> = f.get("modules_to_save", "a list of names", names)?.unwrap_or_default();
        let ties = f.flag("ensure_weight_tying", false)?;
        let keeps_tie = ties || trained.is_empty();
        let is_unused = blocks.as_ref().is_some_and(Vec::is_empty);
        let config = LoraConfig {
            rank: f.needed("r")?,
            alpha: f.number("lora_alpha", 8.0)?,
            targets: match weights.is_empty() {
                true => targets.ok_or("target_modules is missing")?,
                false => targets.unwrap_or_default(),
            },
            weights,
            excluded: f.get("exclude_modules", MODULES, Modules::of)?.unwrap_or_default(),
            blocks: blocks.unwrap_or_default(),
            blocks_after: blocks_after.filter(|all| !is_unused && *all != [""]).unwrap_or_default(),
            trained,
            keeps_tie,
            biases: biases.unwrap_or_default(),
            biased: f.flag("lora_bias", false)?,
            ranks: f
                .get("rank_pattern", "ranks by name", |value| by_name(value, as_size))?
                .unwrap_or_default(),
            alphas: f
                .get("alpha_pattern", "numbers by name", |value| by_name(value, Value::as_f64))?
                .unwrap_or_default(),
            dropout: f.number("lora_dropout", 0.0)?,
            rank_stabilized: f.flag("use_rslora", false)?,
            dora: f.flag("use_dora", false)?,
            base: BaseWeights::Float,
        };
        config.check_settings()?;
        if ties && config.trained.is_empty() && config.may_adapt_embedding()? {
            return Err("ensure_weight_tying is true, and an adapter that the embedding and the head share is not supported".into());
        }
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

    /// Writes `adapter_config.json` into a folder.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        write_json(&folder.join(CONFIG), &self.json())
    }

    fn json(&self) -> Value {
        let mut json = json!({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.rank, "lora_alpha": self.alpha,
            "lora_dropout": self.dropout, "target_modules": self.targets.json(),
            "use_rslora": self.rank_stabilized, "use_dora": self.dora, "bias": self.biases.name(),
            "lora_bias": self.biased,
            "fan_in_fan_out": false, "init_lora_weights": true, "inference_mode": true, "base_model_name_or_path": null,
            "modules_to_save": (!self.trained.is_empty()).then_some(&self.trained),
            "ensure_weight_tying": !self.trained.is_empty() && self.keeps_tie,
        });
        for (field, value) in self.of_some_layers() {
            json[field] = value;
        }
        json
    }

    /// The settings that say of some layers that they are unlike others, under PEFT's names.
    fn of_some_layers(&self) -> Vec<(&'static str, Value)> {
        let mut some = Vec::new();
        let mut add = |field, is_empty: bool, value| (!is_empty).then(|| some.push((field, value)));
        add("target_parameters", self.weights.is_empty(), json!(self.weights));
        add("exclude_modules", self.excluded == Modules::default(), self.excluded.json());
        add("layers_to_transform", self.blocks.is_empty(), json!(self.blocks));
        add("layers_pattern", self.blocks_after.is_empty(), json!(self.blocks_after));
        add("rank_pattern", self.ranks.is_empty(), json!(self.ranks));
        add("alpha_pattern", self.alphas.is_empty(), json!(self.alphas));
        some
    }
}

/// The values of a map.
fn by_name<T>(value: &Value, of: impl Fn(&Value) -> Option<T>) -> Option<BTreeMap<String, T>> {
    value.as_object()?.iter().map(|(name, value)| Some((name.clone(), of(value)?))).collect()
}

/// `r=8,alpha=16,targets=q_proj,v_proj`, perhaps with `dropout=0.1`, `rslora=true`, `dora=true`, `base=int8`, `bias=all`, `lora_bias=true`
/// and `modules_to_save=embed_tokens,lm_head,ensure_weight_tying=false`. Other settings follow under PEFT's names, and are not read back.
impl std::fmt::Display for LoraConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let LoraConfig {
            rank,
            alpha,
            targets,
            trained,
            keeps_tie,
            biases,
            biased,
            dropout,
            rank_stabilized,
            dora,
            base,
            ..
        } = self;
        write!(f, "r={rank},alpha={alpha}")?;
        if *dropout > 0.0 {
            write!(f, ",dropout={dropout}")?;
        }
        if *rank_stabilized {
            write!(f, ",rslora=true")?;
        }
        if *dora {
            write!(f, ",dora=true")?;
        }
        if *base == BaseWeights::Int8 {
            write!(f, ",base=int8")?;
        }
        if *biases != TrainedBiases::None {
            write!(f, ",bias={}", biases.name())?;
        }
        if *biased {
            write!(f, ",lora_bias=true")?;
        }
        match targets {
            Modules::Names(_) => write!(f, ",targets={targets}")?,
            Modules::Pattern(pattern) => write!(f, ",target_modules={pattern:?}")?,
        }
        if !trained.is_empty() {
            write!(f, ",modules_to_save={}", trained.join(","))?;
        }
        if !keeps_tie {
            write!(f, ",ensure_weight_tying=false")?;
        }
        self.of_some_layers().iter().try_for_each(|(field, value)| write!(f, ",{field}={value}"))
    }
}

/// What `Display` writes, in any order. `r` and `targets` are needed; `alpha` is twice the rank if it is not given.
impl FromStr for LoraConfig {
    type Err = Error;

    fn from_str(text: &str) -> Result<LoraConfig> {
        let wrong = |part: &str| {
            let wanted = "wanted r, alpha, dropout, rslora, dora, base=int8, bias, lora_bias, modules_to_save and targets, as r=8,alpha=16,targets=q_proj,v_proj";
            Error::invalid("LoRA", format!("got {part:?} in {text:?}, {wanted}"))
        };
        let (mut config, mut targets, mut alpha) = (LoraConfig::new(0, &[]), Vec::new(), None);
        let mut list: Option<&mut Vec<String>> = None;
        for part in text.split(',') {
            let Some((key, value)) = part.split_once('=') else {
                match &mut list {
                    Some(list) if !part.is_empty() => list.push(part.to_string()),
                    _ => return Err(wrong(part)),
                }
                continue;
            };
            list = match key {
                "targets" => Some(&mut targets),
                "modules_to_save" => Some(&mut config.trained),
                _ => None,
            };
            if let Some(list) = &mut list {
                if value.is_empty() {
                    return Err(wrong(part));
                }
                list.push(value.to_string());
                continue;
            }
            let number = || value.parse().ok().filter(|x: &f64| x.is_finite()).ok_or_else(|| wrong(part));
            match key {
                "r" => config.rank = value.parse().map_err(|_| wrong(part))?,
                "alpha" => alpha = Some(number()?),
                "dropout" => config.dropout = number()?,
                "rslora" => config.rank_stabilized = value.parse().map_err(|_| wrong(part))?,
                "base" if value == "int8" => config.base = BaseWeights::Int8,
                "base" if value == "float" => config.base = BaseWeights::Float,
                "ensure_weight_tying" => config.keeps_tie = value.parse().map_err(|_| wrong(part))?,
                "bias" => config.biases = TrainedBiases::of(value).ok_or_else(|| wrong(part))?,
                "lora_bias" => config.biased = value.parse().map_err(|_| wrong(part))?,
                "dora" => config.dora = value.parse().map_err(|_| wrong(part))?,
                _ => return Err(wrong(part)),
            }
        }
        if config.rank == 0 || targets.is_empty() || !(0.0..1.0).contains(&config.dropout) {
            return Err(wrong(text));
        }
        config.targets = Modules::Names(targets);
        config.alpha = alpha.unwrap_or(2.0 * config.rank as f64);
        Ok(config)
    }
}
