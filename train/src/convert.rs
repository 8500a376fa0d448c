//! [`ConvertConfig`]: a model's folder from another folder or from a run's checkpoint, with a tensor at a time in memory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use phalanx_kernels as kernels;
use phalanx_nn::autograd::Int8Blocks;
use phalanx_nn::models::{
    DecoderStage, FolderTensors, LoraConfig, ModelConfig, SaveOptions, TensorSource, convert_folder,
    has_weights, read_config, save_from,
};
use phalanx_nn::{EMA, Entry, Parameter, Parameters, Scope, Shard};
use phalanx_parallel::checkpoint::Checkpoint;
use phalanx_parallel::comm;
use phalanx_parallel::digest::whole_digests;
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_tensor::io::TensorEntry;
use phalanx_tensor::{DType, Device, Tensor};

use crate::checkpoints::{FROZEN, FROZEN_DIGEST, frozen_digest};
use crate::text::{Codec, TOKENIZER};
use crate::{Error, Result, checkpoints, keyed};

/// The setting by which a checkpoint has its model's configuration, if the model came from a folder. Other runs have it as `config.json`
/// in their folder.
pub const MODEL: &str = "model";

keyed! {
    /// The model that is converted, and the form of its new folder.
    pub struct ConvertConfig {
        /// Hugging Face folder, folder of a training run, or a checkpoint in it.
        "from" from: Option<PathBuf> = None,
        /// Take the run's checkpoint with the lowest validation loss.
        "best" best: bool = false,
        /// New Hugging Face folder.
        "out" out: Option<PathBuf> = None,
        /// Type of the weights there [default: as they are].
        "dtype" dtype: Option<DType> = None,
        /// The most MB (10^6 bytes) of a file; a larger tensor has a file of its own.
        "file-mb" file_mb: usize = 5000,
    }
}

impl ConvertConfig {
    /// Writes the folder: the weights, `config.json` and the tokenizer. Of a run it is the model that the end of the run writes: with the
    /// averages of the weights, if it keeps such, and with what adapters add.
    ///
    /// # Errors
    /// If there is no model, or a file cannot be read or written.
    pub fn run(&self) -> Result<()> {
        let (Some(from), Some(out)) = (&self.from, &self.out) else {
            return Err(Error::Config("wanted `from`, a model or a run, and `out`, a new folder".into()));
        };
        let options = SaveOptions { dtype: self.dtype, shard_bytes: self.file_mb.saturating_mul(1_000_000) };
        if has_weights(from) {
            if self.best {
                return Err(Error::file(from, "`best` is of a run, and this is a model"));
            }
            return Ok(convert_folder(from, out, &options)?);
        }
        let saved = if self.best { checkpoints::best(from)? } else { checkpoints::latest(from)? };
        let (config, folder) = model_of(&saved)?;
        let saved = Saved::new(saved, &config)?;
        save_from(&saved, &saved.config, out, &options)?;
        if folder.join(TOKENIZER).exists() {
            Codec::of(&folder)?.save(out)?;
        }
        Ok(())
    }
}

/// The table of a head that is not tied.
const HEAD: &str = "lm_head.weight";

/// The configuration of a checkpoint's model, and the run's folder.
fn model_of(saved: &Checkpoint) -> Result<(ModelConfig, PathBuf)> {
    let folder = saved.path().parent().map_or_else(PathBuf::new, Path::to_path_buf);
    let config = match saved.settings().get(MODEL) {
        Some(text) => ModelConfig::parse(text, saved.path())?,
        None => read_config(&folder)?,
    };
    Ok((config, folder))
}

/// The names of the weights that a run with these adapters holds in 8-bit blocks.
fn in_int8(config: &ModelConfig, lora: &LoraConfig, dtype: DType) -> Result<HashSet<String>> {
    let scope = Scope::new(0, dtype, Device::Meta(0));
    let model = config.init_stage(&lora.layers()?, &scope, DecoderStage::whole(config.layers()))?;
    let held = |p: &Parameter| p.is_in_int8().then(|| p.name().to_string());
    Ok(model.parameters().iter().filter_map(held).collect())
}

/// The parameters of a checkpoint.
struct Saved {
    checkpoint: Checkpoint,
    /// Of the model with what adapters add.
    config: ModelConfig,
    /// The table of a head that is no longer tied to it, as an adapter changes the embedding alone.
    untied: Option<&'static str>,
    entries: Vec<TensorEntry>,
    lora: Option<LoraConfig>,
    /// Those that the run does not train, if the checkpoint lacks them.
    frozen: Option<FolderTensors>,
    /// The names of those that the run held in 8-bit blocks.
    in_int8: HashSet<String>,
}

impl Saved {
    fn new(checkpoint: Checkpoint, config: &ModelConfig) -> Result<Saved> {
        let dtypes: HashMap<&str, DType> =
            checkpoint.tensors().map(|(name, dtype, _)| (name, dtype)).collect();
        let wrong = |why: String| Error::file(checkpoint.path(), why);
        let settings = checkpoint.settings();
        let own = settings.get("dtype").and_then(|text| DType::parse(text)).unwrap_or(DType::F32);
        let lora = settings.get("lora").filter(|text| *text != "default");
        let lora: Option<LoraConfig> =
            lora.map(|text| text.parse().map_err(|e: phalanx_nn::Error| wrong(e.to_string()))).transpose()?;
        // Of the model that was trained, and with what adapters add.
        let [config, merged] = match &lora {
            Some(lora) => [lora.model_config(config)?, lora.merged_config(config)?],
            None => [config.clone(), config.clone()],
        };
        let frozen =
            settings.get(FROZEN).map(|folder| FolderTensors::open(folder, &config, own)).transpose()?;
        let untied = config.tied_table().filter(|_| merged.tied_table().is_none());
        let model = merged.init(&Scope::new(0, own, Device::Meta(0)))?;
        let entry = |name: &str, shape: &[usize]| {
            let source = untied.filter(|_| name == HEAD).unwrap_or(name);
            let dtype = dtypes.get(&*format!("model.{source}")).or(frozen.as_ref().map(|_| &own));
            let dtype = dtype.ok_or_else(|| wrong(format!("the model's {name} is missing")))?;
            Ok(TensorEntry::new(name, *dtype, shape))
        };
        let mut entries: Vec<Result<TensorEntry>> = Vec::new();
        model.visit("", &mut |path, found| {
            entries.push(match found {
                Entry::Parameter(p) => entry(p.name(), p.tensor().shape()),
                // Such as the biases of routers.
                Entry::Buffer(b) => entry(path, b.tensor().shape()),
            });
        });
        let mut entries = entries.into_iter().collect::<Result<Vec<_>>>()?;
        let mut known = HashSet::new();
        entries.retain(|entry| known.insert(entry.name.clone()));
        let in_int8 = lora.as_ref().map_or(Ok(HashSet::new()), |lora| in_int8(&config, lora, own))?;
        let saved = Saved { checkpoint, config: merged, untied, entries, lora, frozen, in_int8 };
        saved.check_frozen()?;
        Ok(saved)
    }

    /// Refuses a folder whose parameters are no longer those that the run had.
    fn check_frozen(&self) -> Result<()> {
        let settings = self.checkpoint.settings();
        let (Some(frozen), Some(wanted)) = (&self.frozen, settings.get(FROZEN_DIGEST)) else { return Ok(()) };
        let trained: HashSet<&str> = self.checkpoint.tensors().map(|(name, ..)| name).collect();
        let (alone, mut digests) = (comm::meta(0, 1)?, BTreeMap::new());
        for TensorEntry { name, shape, .. } in &self.entries {
            let is_copy = self.untied.is_some() && name == HEAD;
            if !is_copy && !trained.contains(&*format!("model.{name}")) {
                let values = frozen.rows(name, 0..shape.first().copied().unwrap_or(1))?.contiguous()?;
                let parts = match self.in_int8.contains(name) {
                    true => {
                        let blocks = Int8Blocks::new(&values).map_err(phalanx_nn::Error::from)?;
                        ShardedTensor::of_int8_blocks(name, &Shard::whole(shape), &blocks)?
                    }
                    false => vec![ShardedTensor::whole(name, values)],
                };
                digests.extend(whole_digests(&alone, &parts)?.of);
            }
        }
        if frozen_digest(&digests) == *wanted {
            return Ok(());
        }
        let folder = settings.get(FROZEN).map_or("", String::as_str);
        let why =
            format!("the parameters of {folder} are no longer those that the run had and did not train");
        Err(Error::file(self.checkpoint.path(), why))
    }

    /// Rows of a tensor of this shape, if the checkpoint has it.
    fn read(&self, name: &str, shape: &[usize], rows: Range<usize>) -> Result<Option<Tensor>> {
        let Some((_, dtype, _)) = self.checkpoint.tensors().find(|(other, ..)| *other == name) else {
            return Ok(None);
        };
        let row: usize = shape.iter().skip(1).product();
        let of_rows: Vec<usize> = std::iter::once(rows.len()).chain(shape.iter().skip(1).copied()).collect();
        let values = Tensor::zeros(&of_rows, dtype, Device::CPU)?;
        let (shard, range) = (Shard::whole(shape), rows.start * row..rows.end * row);
        let part = ShardedTensor { name: name.into(), shard, range, values: values.clone(), buffer: false };
        self.checkpoint.read(&[part])?;
        Ok(Some(values))
    }

    fn rows(&self, entry: &TensorEntry, rows: Range<usize>) -> Result<Tensor> {
        let TensorEntry { name, dtype, shape } = entry;
        let untied = self.untied.filter(|_| name == HEAD);
        let name = untied.unwrap_or(name);
        let weight = match (self.trained(name, *dtype, shape, rows.clone())?, &self.frozen) {
            (Some(weight), _) => weight,
            (None, Some(frozen)) => match (frozen.rows(name, rows.clone())?, self.in_int8.contains(name)) {
                (values, false) => values,
                (values, true) => Int8Blocks::new(&values)
                    .and_then(|blocks| blocks.values())
                    .map_err(phalanx_nn::Error::from)?,
            },
            (None, None) => {
                return Err(Error::file(self.checkpoint.path(), format!("the model's {name} is missing")));
            }
        };
        let (Some(lora), Some((stem, kind)), None) = (&self.lora, name.rsplit_once('.'), untied) else {
            return Ok(weight);
        };
        let of = |which: &str, shape: &[usize], rows| {
            let name = format!("{stem}.{which}");
            let saved =
                self.checkpoint.tensors().find(|(other, ..)| other.strip_prefix("model.") == Some(&*name));
            saved.map_or(Ok(None), |(_, dtype, _)| self.trained(&name, dtype, shape, rows))
        };
        let (outputs, inputs) = match (kind, &shape[..]) {
            ("weight", &[outputs, inputs]) => (outputs, inputs),
            ("bias", &[outputs]) => {
                let more = of("lora_B.bias", &[outputs], rows)?;
                return Ok(more.map_or(Ok(weight.clone()), |more| lora.merge_bias(&weight, &more))?);
            }
            _ => return Ok(weight),
        };
        let a = of("lora_embedding_A.weight", &[outputs, lora.rank], rows.clone())?;
        let b = of("lora_embedding_B.weight", &[inputs, lora.rank], 0..inputs)?;
        if let (Some(a), Some(b)) = (a, b) {
            return Ok(lora.merge_embedding(&weight, &a, &b)?);
        }
        let a = of("lora_A.weight", &[lora.rank, inputs], 0..lora.rank)?;
        let b = of("lora_B.weight", &[outputs, lora.rank], rows.clone())?;
        let (Some(a), Some(b)) = (a, b) else { return Ok(weight) };
        let magnitude = of("lora_magnitude_vector", &[outputs], rows)?;
        Ok(lora.merge(&weight, &a, &b, magnitude.as_ref())?)
    }

    /// Rows of what the run has trained: of the average, if it keeps one.
    fn trained(
        &self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        rows: Range<usize>,
    ) -> Result<Option<Tensor>> {
        match self.read(&format!("optimizer.{name}.{EMA}"), shape, rows.clone())? {
            Some(average) => Ok(Some(kernels::cast(&average, dtype)?)),
            None => self.read(&format!("model.{name}"), shape, rows),
        }
    }
}

impl TensorSource for Saved {
    fn entries(&self) -> Vec<TensorEntry> {
        self.entries.clone()
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> phalanx_nn::Result<Tensor> {
        let entry = self.entries.iter().find(|entry| entry.name == name);
        let entry =
            entry.ok_or_else(|| phalanx_nn::Error::invalid("convert", format!("there is no {name}")))?;
        self.rows(entry, rows).map_err(|e| phalanx_nn::Error::invalid("convert", e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use phalanx_nn::models::{BaseWeights, Family, GptConfig, TransformerConfig};
    use phalanx_parallel::hybrid::{Layout, adapted_decoder, decoder};

    use super::*;
    use crate::data::TensorDataset;
    use crate::{Config, MeshRank, Run, Trainer, save_decoder};

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("phalanx-convert-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        folder
    }

    fn gpt() -> ModelConfig {
        ModelConfig::Gpt(GptConfig::new(32, 8, 4, 2, 16))
    }

    /// Of each expert's maps a file has one alone, and a block's are joined in the model.
    fn mixture() -> ModelConfig {
        let size =
            TransformerConfig { key_heads: 2, ..TransformerConfig::new(Family::Llama, 32, 8, 4, 2, 16) };
        let of = |config: &TransformerConfig| config.family == Family::Mixtral;
        Family::samples(&size).into_iter().find(of).map(ModelConfig::from).unwrap()
    }

    fn with_router_biases() -> ModelConfig {
        let ModelConfig::Transformer(mut config) = mixture() else { panic!("a transformer") };
        config.experts.as_mut().unwrap().bias_step = 0.25;
        config.into()
    }

    /// A run, and the folder that it writes at its end.
    fn trained(name: &str, model: &ModelConfig, config: Config, lora: Option<&LoraConfig>) -> PathBuf {
        let out = folder(name);
        run(&out, model, Config { steps: 3, ..config }, lora, None).unwrap();
        out
    }

    /// A run in a folder. With adapters the rest of the model may be from another folder.
    fn run(
        out: &Path,
        model: &ModelConfig,
        config: Config,
        lora: Option<&LoraConfig>,
        init: Option<&Path>,
    ) -> Result<()> {
        let config = Config { batch: 4, save_every: 2, threads: Some(1), out: Some(out.into()), ..config };
        let tokens: Vec<i64> = (0..8 * 8).map(|i| (i * 7919 % 1013) % 32).collect();
        let rows = || Tensor::from_slice(&tokens, &[8, 8], Device::CPU).unwrap();
        let data = TensorDataset::new(vec![rows(), rows()]).unwrap();
        let part = |rank: &MeshRank| {
            let (layout, scope) = (&config.layout, rank.scope(&config));
            Ok(match lora {
                None => decoder(model, layout, &rank.groups, &scope, None)?,
                Some(lora) => adapted_decoder(model, lora, layout, &rank.groups, &scope, init)?,
            })
        };
        let (written, adapted) = (model.clone(), lora.cloned());
        let end = move |run: &mut Run| {
            let out = run.config().folder().unwrap().to_path_buf();
            save_decoder(run, &written, adapted.as_ref(), out.join("model")).map(drop)
        };
        let lora = lora.map_or("default".into(), ToString::to_string);
        let mut trainer = Trainer::new(config.clone()).data(data).at_end(end).identity("lora", lora);
        if let Some(init) = init {
            trainer = trainer.frozen_from(init);
        }
        trainer.identity(MODEL, model.to_json(config.dtype)).run_parts(part).map(drop)
    }

    #[test]
    fn a_checkpoint_of_any_layout_becomes_the_folder_that_its_run_writes() {
        let plain = |tp, pp, dp, zero| {
            let layout = Layout { tp, pp, dp, ..Layout::default() };
            Config { layout, zero, ..Config::default() }
        };
        let lora = LoraConfig::new(2, &["c_attn", "c_proj"]);
        let dora = LoraConfig { dora: true, ..lora.clone() };
        let modules = LoraConfig { trained: vec!["wte".into(), "ln_f".into()], ..lora.clone() };
        let averaged = Config { ema: Some(0.9), ..plain(1, 2, 1, 0) };
        let layout = Layout { dp: 2, ep: 2, ..Layout::default() };
        let experts = Config { layout, ..Config::default() };
        let cases = [
            ("whole", gpt(), Config { ema: Some(0.9), ..Config::default() }, None),
            ("bf16", gpt(), Config { dtype: DType::BF16, ..plain(1, 1, 2, 1) }, None),
            ("zero3", mixture(), plain(2, 1, 2, 3), None),
            ("stages", mixture(), plain(1, 2, 1, 0), None),
            ("experts", with_router_biases(), experts, None),
            ("lora", gpt(), plain(2, 1, 1, 0), Some(&lora)),
            ("dora", gpt(), plain(2, 1, 2, 3), Some(&dora)),
            ("dora-averages", gpt(), averaged, Some(&dora)),
            ("lora-modules", gpt(), plain(2, 1, 2, 3), Some(&modules)),
        ];
        for (name, model, config, lora) in cases {
            let (run, out) = (trained(name, &model, config, lora), folder(&format!("{name}-out")));
            let convert = |from: PathBuf, dtype, file_mb| {
                let config =
                    ConvertConfig { from: Some(from), out: Some(out.clone()), dtype, file_mb, best: false };
                config.run().unwrap();
            };
            let read = |folder: &Path, file: &str| std::fs::read(folder.join(file)).unwrap();
            convert(run.clone(), None, 5000);
            for file in ["model.safetensors", "config.json"] {
                assert!(read(&out, file) == read(&run.join("model"), file), "{name}: {file}");
            }
            // The checkpoint alone, each tensor in a file of its own; then those as one file.
            let checkpoint = run.join("moved");
            std::fs::rename(run.join(checkpoints::NAME), &checkpoint).unwrap();
            convert(checkpoint, None, 0);
            assert!(!out.join("model.safetensors").exists());
            let one = folder(&format!("{name}-one"));
            let again =
                ConvertConfig { from: Some(out.clone()), out: Some(one.clone()), ..ConvertConfig::default() };
            again.run().unwrap();
            assert!(
                read(&one, "model.safetensors") == read(&run.join("model"), "model.safetensors"),
                "{name}"
            );
            [run, out, one].iter().for_each(|folder| std::fs::remove_dir_all(folder).unwrap());
        }
    }

    #[test]
    fn checkpoints_of_adapters_have_nothing_else_and_need_the_same_model() {
        let lora = LoraConfig::new(2, &["q_proj", "o_proj"]);
        adapters_need_the_same_model(&mixture(), "adapters", lora.clone(), 3);
        let trained = vec!["lm_head".into(), "mlp.gate".into()];
        adapters_need_the_same_model(&mixture(), "modules", LoraConfig { trained, ..lora }, 3);
    }

    /// Its folder has the floats of the blocks, and so has what is made of its checkpoint.
    #[test]
    fn checkpoints_of_adapters_beside_int8_become_the_folder_of_their_run() {
        let lora = LoraConfig { base: BaseWeights::Int8, ..LoraConfig::new(2, &["q_proj", "o_proj"]) };
        adapters_need_the_same_model(&mixture(), "int8", LoraConfig { dora: true, ..lora.clone() }, 2);
        adapters_need_the_same_model(&mixture(), "int8-spread", lora, 3);
    }

    /// The head is tied to the embedding until an adapter changes the embedding alone.
    #[test]
    fn checkpoints_of_an_embeddings_adapter_become_the_folder_of_their_run() {
        adapters_need_the_same_model(&gpt(), "embedding", LoraConfig::new(2, &["wte", "c_attn"]), 3);
    }

    /// The head is tied to the embedding, of which one or the other is trained apart, or has an adapter.
    #[test]
    fn checkpoints_of_a_head_that_is_no_longer_tied_become_the_folder_of_their_run() {
        let apart = |targets, trained: &[&str]| LoraConfig {
            trained: trained.iter().map(ToString::to_string).collect(),
            keeps_tie: false,
            ..LoraConfig::new(2, targets)
        };
        for (i, lora) in [
            apart(&["c_attn"], &["wte", "lm_head"]),
            apart(&["c_attn"], &["wte"]),
            apart(&["c_attn"], &["lm_head"]),
            LoraConfig::new(2, &["wte", "lm_head"]),
        ]
        .into_iter()
        .enumerate()
        {
            adapters_need_the_same_model(&gpt(), &format!("untied-{i}"), lora, 3);
        }
    }

    #[test]
    fn checkpoints_of_adapters_with_biases_become_the_folder_of_their_run() {
        let lora = LoraConfig { biased: true, ..LoraConfig::new(2, &["c_attn", "c_proj"]) };
        adapters_need_the_same_model(&gpt(), "biased", lora, 2);
    }

    fn adapters_need_the_same_model(model: &ModelConfig, name: &str, lora: LoraConfig, zero: u8) {
        let [base, other] = [1, 2].map(|seed| {
            let base = folder(&format!("{name}-base-{seed}"));
            let made = model.init(&Scope::new(seed, DType::F32, Device::CPU)).unwrap();
            phalanx_nn::models::save_model(&made, model, &base).unwrap();
            base
        });
        let config = |pp, dp, zero, steps| {
            let layout = Layout { pp, dp, ..Layout::default() };
            Config { layout, zero, steps, ..Config::default() }
        };
        let [whole, parts, out] = ["whole", "parts", "out"].map(|what| folder(&format!("{name}-{what}")));
        run(&whole, model, config(1, 2, 0, 4), Some(&lora), Some(&base)).unwrap();
        run(&parts, model, config(1, 2, zero, 2), Some(&lora), Some(&base)).unwrap();
        let saved = checkpoints::latest(&parts).unwrap();
        let modules = || lora.trained.iter().map(|module| format!("{module}.weight"));
        let is_trained =
            |name: &str| name.contains(".lora_") || modules().any(|module| name.contains(&module));
        assert!(saved.tensors().len() > 8 && saved.tensors().all(|(name, ..)| is_trained(name)));
        assert!(modules().all(|module| saved.tensors().any(|(name, ..)| name.contains(&module))));
        let resumed = |base: Option<&Path>| {
            let config = Config { resume: Some(parts.clone()), ..config(2, 2, 2, 4) };
            run(&parts, model, config, Some(&lora), base)
        };
        let said = resumed(Some(&other)).unwrap_err().to_string();
        assert!(said.contains("not trained") && said.contains(&*base.to_string_lossy()), "{said}");
        let said = resumed(None).unwrap_err().to_string();
        assert!(said.contains("it lacks the parameters that are not trained"), "{said}");
        resumed(Some(&base)).unwrap();
        let read = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
        assert!(read(&parts.join("model")) == read(&whole.join("model")));
        let convert =
            ConvertConfig { from: Some(parts.clone()), out: Some(out.clone()), ..ConvertConfig::default() };
        convert.run().unwrap();
        assert!(read(&out) == read(&whole.join("model")));
        let weights = "model.safetensors";
        std::fs::copy(other.join(weights), base.join(weights)).unwrap();
        let said = convert.run().unwrap_err().to_string();
        assert!(said.contains("no longer those that the run had"), "{said}");
        [base, other, whole, parts, out].iter().for_each(|folder| std::fs::remove_dir_all(folder).unwrap());
    }

    #[test]
    fn what_is_no_model_is_refused() {
        let (from, out) = (folder("nothing"), folder("nothing-out"));
        std::fs::create_dir_all(&from).unwrap();
        let said = |config: ConvertConfig| config.run().unwrap_err().to_string();
        assert!(said(ConvertConfig::default()).contains("wanted `from`"));
        let config =
            ConvertConfig { from: Some(from.clone()), out: Some(out.clone()), ..ConvertConfig::default() };
        assert!(said(config.clone()).contains("checkpoint"), "{}", said(config));
        assert!(!out.exists());
        std::fs::remove_dir_all(from).unwrap();
    }
}
