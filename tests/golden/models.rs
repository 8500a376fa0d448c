//! Folders of whole models, as transformers' `save_pretrained` writes them, with their logits, loss and gradients, and of decoders their
//! greedy continuation.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx::nn::models::{
    BertConfig, Decoder, DecoderStage, LoraConfig, ModelConfig, ResNetConfig, SaveOptions, VitConfig,
    convert_folder, file_tensors, load_adapter, load_model, load_weights, merged, next_token_targets,
    read_config, save_adapter, save_model, save_tensors,
};
use phalanx::nn::{LayerFactory, Parameters, Scope};
use phalanx::tensor::io::SafeTensors;
use phalanx::{DType, Device, Tensor, Var, kernels};
use serde::Deserialize;

use crate::Outcome;
use crate::case::compare;
use crate::encoders;
use crate::read_back::Saved;

/// A set of models.
pub struct Models {
    folder: std::path::PathBuf,
    device: Device,
    pub cases: Vec<Model>,
    saved: Saved,
}

/// A model's folder.
#[derive(Deserialize)]
pub struct Model {
    pub name: String,
    pub task: String,
    model_type: String,
    #[serde(default)]
    least_gap_of_greedy: f64,
}

#[derive(Deserialize)]
struct Index {
    cases: Vec<Model>,
}

/// Greedy tokens are compared where no two logits were so close that rounding decides.
const GAP_MIN: f64 = 1e-3;
/// A gradient that is smaller everywhere is 0 but for rounding, such as that of keys' biases, which move all scores of a query alike.
const ROUNDING: f64 = 1e-6;
/// What one of several files of a tiny model's weights has at most.
const SHARD_BYTES: usize = 4096;
/// Tokens of the prompt in `greedy`.
const PROMPT: usize = 5;

/// The gradients of experts, which transformers holds in two tensors for all of a block.
fn experts(grads: &[(String, Tensor)]) -> Result<Vec<(String, Tensor)>, String> {
    let find = |name: String| grads.iter().find(|(known, _)| *known == name).map(|(_, grad)| grad);
    let mut joined = Vec::new();
    for prefix in grads.iter().filter_map(|(name, _)| name.strip_suffix("experts.0.down_proj.weight")) {
        let (mut gates_and_ups, mut downs) = (Vec::new(), Vec::new());
        for expert in 0.. {
            let map = |name: &str| find(format!("{prefix}experts.{expert}.{name}.weight"));
            let (Some(gate), Some(up), Some(down)) = (map("gate_proj"), map("up_proj"), map("down_proj"))
            else {
                break;
            };
            let both = kernels::cat(&[gate, up], 0).map_err(|e| e.to_string())?;
            gates_and_ups.push(both.unsqueeze(0).map_err(|e| e.to_string())?);
            downs.push(down.unsqueeze(0).map_err(|e| e.to_string())?);
        }
        for (name, parts) in [("gate_up_proj", gates_and_ups), ("down_proj", downs)] {
            let whole = kernels::cat(&parts.iter().collect::<Vec<_>>(), 0).map_err(|e| e.to_string())?;
            joined.push((format!("model.{prefix}experts.{name}"), whole));
        }
    }
    Ok(joined)
}

impl Models {
    /// The set in a folder; `None` if its index has no models.
    pub fn open(folder: &Path, device: Device) -> Option<Models> {
        let text = std::fs::read_to_string(folder.join("index.json")).ok()?;
        let Index { cases } = serde_json::from_str(&text).ok()?;
        Some(Models { folder: folder.into(), device, cases, saved: Saved::new() })
    }

    /// Runs a case.
    pub fn run(&self, case: &Model) -> Outcome {
        let (folder, saved) = (self.folder.join(&case.name), self.saved.of(&case.name));
        match (case.task.as_str(), case.model_type.as_str()) {
            ("causal-lm", _) => {}
            ("masked-lm" | "text-classification", "bert") => {
                return encoders::run::<BertConfig>(&folder, self.device, &saved);
            }
            ("image-classification", "vit") => {
                return encoders::run::<VitConfig>(&folder, self.device, &saved);
            }
            ("image-classification", "resnet") => {
                return encoders::run::<ResNetConfig>(&folder, self.device, &saved);
            }
            (task, family) => return Outcome::Unsupported(format!("task {task} of {family}")),
        }
        let config = match read_config(&folder) {
            Ok(config) => config,
            Err(error) => return Outcome::Unsupported(error.to_string()),
        };
        let done = match folder.join("adapter").exists() {
            true => self.check_adapted(case, &folder, &config),
            false => self.check_plain(case, &folder, &config),
        };
        done.map_or_else(Outcome::Failed, |()| Outcome::Passed)
    }

    /// Lets transformers read what the cases have saved, if it is there.
    pub fn read_back(&self) -> Result<(), String> {
        self.saved.read_back(&self.folder)
    }

    fn check_plain(&self, case: &Model, folder: &Path, config: &ModelConfig) -> Result<(), String> {
        let model = config.init(&Scope::new(1, DType::F32, self.device)).map_err(|e| e.to_string())?;
        load_weights(&model, config, folder).map_err(|e| e.to_string())?;
        self.check(case, folder, config, &model, |_| Ok(Vec::new()))?;
        way_back(folder, &model, config, &self.saved.of(&case.name))
    }

    /// A model with an adapter, which has gradients alone, is saved, and is merged into the weights without another answer.
    fn check_adapted(&self, case: &Model, folder: &Path, config: &ModelConfig) -> Result<(), String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let read = LoraConfig::read(folder.join("adapter")).map_err(|e| text(&e))?;
        let layers = read.layers().map_err(|e| text(&e))?;
        let (scope, whole) = (Scope::new(1, DType::F32, self.device), DecoderStage::whole(config.layers()));
        let model = config.init_stage(&layers, &scope, whole).map_err(|e| text(&e))?;
        load_weights(&model, config, folder).map_err(|e| text(&e))?;
        load_adapter(&model, config, folder.join("adapter")).map_err(|e| text(&e))?;
        let saved = self.saved.of(&case.name);
        let adapter = saved.join("adapter");
        // As the file would have adapters that have these values.
        self.check(case, folder, config, &model, |grads| {
            let twin = config.init_stage(&layers, &scope, DecoderStage::whole(config.layers()));
            let twin = twin.map_err(|e| text(&e))?;
            for (name, grad) in grads {
                let of = twin.parameters().into_iter().find(|parameter| parameter.name() == name);
                of.map_or(Ok(()), |parameter| parameter.load(grad)).map_err(|e| text(&e))?;
            }
            save_adapter(&twin, config, &read, &adapter).map_err(|e| text(&e))?;
            let file = SafeTensors::open(adapter.join("adapter_model.safetensors")).map_err(|e| text(&e))?;
            let named =
                |name| Ok((String::from(name), file.tensor(name, self.device).map_err(|e| text(&e))?));
            file.names().map(named).collect()
        })?;
        save_adapter(&model, config, &read, &adapter).map_err(|e| text(&e))?;
        let again = LoraConfig::read(&adapter).map_err(|e| text(&e));
        let open = |folder: &Path| {
            let file =
                SafeTensors::open(folder.join("adapter_model.safetensors")).map_err(|e| e.to_string())?;
            tensors(&[file])
        };
        let same = same_tensors(&open(&folder.join("adapter"))?, &open(&adapter)?);
        let of_merged = read.merged_config(config).map_err(|e| text(&e))?;
        save_tensors(merged(&model, &read).map_err(|e| text(&e))?, &of_merged, &saved)
            .map_err(|e| text(&e))?;
        let (_, merged) = load_model(&saved, &scope).map_err(|e| text(&e))?;
        same?;
        if again? != read {
            return Err("the adapter's settings are not read back".into());
        }
        let io = SafeTensors::open(folder.join("io.safetensors")).map_err(|e| text(&e))?;
        let stored = |name: &str| io.tensor(name, self.device).map_err(|e| e.to_string());
        let x = merged.forward(&Var::new(stored("input_ids")?)).map_err(|e| text(&e))?;
        let logits = merged.logits(&x).map_err(|e| text(&e))?;
        compare("merged logits", logits.tensor(), &stored("logits")?, 1e-4, 1e-5)
    }

    fn check<L: LayerFactory>(
        &self,
        case: &Model,
        folder: &Path,
        config: &ModelConfig,
        model: &Decoder<L>,
        in_adapter: impl Fn(&[(String, Tensor)]) -> Result<Vec<(String, Tensor)>, String>,
    ) -> Result<(), String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let io = SafeTensors::open(folder.join("io.safetensors")).map_err(|e| text(&e))?;
        let stored = |name: &str| io.tensor(name, self.device).map_err(|e| e.to_string());
        model.eval();
        let tokens = Var::new(stored("input_ids")?);
        let x = model.forward(&tokens).map_err(|e| text(&e))?;
        let logits = model.logits(&x).map_err(|e| text(&e))?;
        compare("logits", logits.tensor(), &stored("logits")?, 1e-4, 1e-5)?;
        let (targets, counted) = next_token_targets(&stored("labels")?).map_err(|e| text(&e))?;
        let loss = model.loss(&x, &Var::new(targets), 1.0 / counted as f64).map_err(|e| text(&e))?;
        compare("loss", &loss.tensor().with_shape(&[]).map_err(|e| text(&e))?, &stored("loss")?, 1e-4, 1e-5)?;
        loss.backward().map_err(|e| text(&e))?;
        let grads = gradients(model)?;
        let (joined, in_adapter) = (experts(&grads)?, in_adapter(&grads)?);
        let grads = [file_tensors(grads, config).map_err(|e| text(&e))?, joined, in_adapter].concat();
        check_gradients(&io, self.device, &grads, |name| {
            let own = name.replace(".modules_to_save.default.", ".").replace(".default.weight", ".weight");
            let own = own.strip_suffix(".default").unwrap_or(&own).to_string();
            let plain = own.replace("_vector.weight", "_vector").replace(".base_layer.", ".");
            let plain = plain.strip_prefix("base_model.model.").unwrap_or(name);
            // Mixtral's gate and GPT-NeoX's head have other names in files than in a model.
            let file = plain.replace(".mlp.gate.", ".block_sparse_moe.gate.");
            let file = file.replace("lm_head.", "embed_out.");
            vec![name.to_string(), file, plain.to_string(), own]
        })?;
        if case.least_gap_of_greedy > GAP_MIN {
            let greedy = stored("greedy")?;
            let by_cache =
                if io.contains("greedy_cached") { stored("greedy_cached")? } else { greedy.clone() };
            let plain = self.greedy(model, &greedy, false);
            let cached = self.greedy(model, &by_cache, true);
            // Beyond the former context of dynamic positions there are two texts, in transformers too, as the keys in a cache keep the rotation
            // that they got. Some files have one of the two.
            match is_dynamic_beyond(folder, greedy.shape()[1])? && !io.contains("greedy_cached") {
                true => plain.or(cached)?,
                false => plain.and(cached)?,
            }
        }
        Ok(())
    }

    /// Continues the prompts, with a cache of keys and values or by whole passes.
    fn greedy<L: LayerFactory>(
        &self,
        model: &Decoder<L>,
        wanted: &Tensor,
        cached: bool,
    ) -> Result<(), String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let _inference = phalanx::nn::inference();
        let (rows, length) = (wanted.shape()[0], wanted.shape()[1]);
        let wanted = wanted.to_vec::<i64>().map_err(|e| text(&e))?;
        let mut all: Vec<Vec<i64>> = wanted.chunks(length).map(|row| row[..PROMPT].to_vec()).collect();
        let mut caches = model.caches(rows, length).map_err(|e| text(&e))?;
        for at in PROMPT..length {
            // Beyond its former context, long rope rotates earlier keys otherwise.
            let turns = model.turning_point().is_some_and(|former| at == former + 1);
            let from = if cached && at > PROMPT && !turns { at - 1 } else { 0 };
            let new: Vec<i64> = all.iter().flat_map(|row| row[from..].iter().copied()).collect();
            let new = Var::from_slice(&new, &[rows, at - from], self.device).map_err(|e| text(&e))?;
            if from == 0 {
                caches.iter_mut().for_each(|cache| cache.clear());
            }
            let logits = match cached {
                true => model.extend(&new, &mut caches),
                false => model
                    .forward(&new)
                    .and_then(|x| model.logits(&x))
                    .and_then(|logits| Ok(logits.narrow(1, at - 1, 1)?.squeeze(&[1])?)),
            };
            let logits =
                kernels::cast(logits.map_err(|e| text(&e))?.tensor(), DType::F64).map_err(|e| text(&e))?;
            let count = logits.shape()[1];
            for (row, scores) in
                all.iter_mut().zip(logits.to_vec::<f64>().map_err(|e| text(&e))?.chunks(count))
            {
                let best = (0..count).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap_or(0);
                row.push(best as i64);
            }
        }
        if all.concat() != wanted {
            return Err(format!("greedy tokens {all:?}, wanted {wanted:?}, with a cache: {cached}"));
        }
        Ok(())
    }
}

/// A model's gradients by the parameters' names; zeros where there is none.
pub fn gradients(model: &impl Parameters) -> Result<Vec<(String, Tensor)>, String> {
    let gradient = |parameter: &phalanx::nn::Parameter| {
        let grad = parameter.finish_grad()?.map_or_else(|| parameter.tensor().zeros_like(), Ok)?;
        Ok::<_, phalanx::nn::Error>((parameter.name().to_string(), grad))
    };
    let trained = model.parameters().into_iter().filter(|parameter| parameter.is_trained());
    trained.map(|parameter| gradient(&parameter).map_err(|e| e.to_string())).collect()
}

/// Compares gradients, by files' names, with those of a set. `names` has the names under which one of the set may be found.
pub fn check_gradients(
    io: &SafeTensors,
    device: Device,
    grads: &[(String, Tensor)],
    names: impl Fn(&str) -> Vec<String>,
) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    for name in io.names().filter_map(|name| name.strip_prefix("grad/")) {
        let Some((_, grad)) = grads.iter().find(|(known, _)| names(name).contains(known)) else {
            return Err(format!("{name} has no gradient"));
        };
        let wanted = io.tensor(&format!("grad/{name}"), device).map_err(|e| text(&e))?;
        let largest = kernels::cast(&wanted, DType::F64).map_err(|e| text(&e))?;
        let largest = largest.to_vec::<f64>().map_err(|e| text(&e))?;
        let largest = largest.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        compare(name, grad, &wanted, 0.0, if largest < ROUNDING { ROUNDING } else { 1e-3 * largest })?;
    }
    Ok(())
}

/// A folder that is saved again has the tensors that were read, under their names, and the settings; in one file, and in several.
fn way_back(folder: &Path, model: &Decoder, config: &ModelConfig, saved: &Path) -> Result<(), String> {
    save_model(model, config, saved).map_err(|e| e.to_string())?;
    let same_config = read_config(saved).map_err(|e| e.to_string())? == *config;
    let options = SaveOptions { shard_bytes: SHARD_BYTES, ..SaveOptions::default() };
    convert_folder(saved, saved.join("shards"), &options).map_err(|e| e.to_string())?;
    same_folder(folder, saved, same_config)?;
    same_folder(folder, &saved.join("shards"), same_config)
}

/// Refuses a folder `saved` that has not the tensors of another.
pub fn same_folder(folder: &Path, saved: &Path, same_config: bool) -> Result<(), String> {
    same_tensors(&tensors(&weights(folder)?)?, &tensors(&weights(saved)?)?)?;
    if same_config { Ok(()) } else { Err("the settings are not read back".into()) }
}

/// The files of a folder's weights, of which there may be several.
fn weights(folder: &Path) -> Result<Vec<SafeTensors>, String> {
    let is_weights = |name: &str| name.starts_with("model") && name.ends_with(".safetensors");
    let files = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let paths = files.filter_map(|file| Some(file.ok()?.path()));
    let paths = paths.filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_weights));
    paths.map(|path| SafeTensors::open(path).map_err(|e| e.to_string())).collect()
}

/// Shapes and values of tensors, in f32 if they are halves.
type Stored = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn tensors(files: &[SafeTensors]) -> Result<Stored, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let mut all = Stored::new();
    for file in files {
        for name in file.names() {
            let mut tensor = file.tensor(name, Device::CPU).map_err(|e| text(&e))?;
            if [DType::BF16, DType::F16].contains(&tensor.dtype()) {
                tensor = kernels::cast(&tensor, DType::F32).map_err(|e| text(&e))?;
            }
            all.insert(name.into(), (tensor.shape().to_vec(), tensor.to_bytes().map_err(|e| text(&e))?));
        }
    }
    Ok(all)
}

/// Whether sequences of this length are longer than what a folder's model with dynamic positions was first trained for.
fn is_dynamic_beyond(folder: &Path, length: usize) -> Result<bool, String> {
    let text = std::fs::read_to_string(folder.join("config.json")).map_err(|e| e.to_string())?;
    let config: serde_json::Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    let former = config["max_position_embeddings"].as_u64().unwrap_or(0);
    Ok(text.contains("\"dynamic\"") && length as u64 > former)
}

/// What old files have beside a model's parameters: masks and frequencies.
const MASKS: [&str; 4] = ["rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "position_ids"];

/// Refuses files that have not the same tensors, a head that is the embedding's table aside.
fn same_tensors(before: &Stored, after: &Stored) -> Result<(), String> {
    let is_mask = |name: &str| MASKS.iter().any(|mask| name.ends_with(mask));
    let table = before.get("model.embed_tokens.weight");
    let is_tied = |name: &str| name == "lm_head.weight" && before.get(name) == table;
    // Beside an adapter of the head or of the embedding PEFT writes the table, too.
    let tables = ["lm_head", "embed_tokens", "embed_in"].map(|table| format!(".{table}.base_layer.weight"));
    let is_base = |name: &str| tables.iter().any(|table| name.ends_with(&**table));
    let is_left_out = |name: &str| is_mask(name) || is_tied(name) || is_base(name);
    let kept = |name: &&String| after.contains_key(*name) || !is_left_out(name);
    let wanted: Vec<&String> = before.keys().filter(kept).collect();
    let got: Vec<&String> = after.keys().collect();
    if got != wanted {
        return Err(format!("saved again: {got:?}, wanted {wanted:?}"));
    }
    match got.into_iter().find(|name| before[*name] != after[*name]) {
        Some(name) => Err(format!("saved again: {name} is another tensor")),
        None => Ok(()),
    }
}
