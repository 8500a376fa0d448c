//! [`Gpt`]: the settings of a model and its training, and the model.

use std::path::{Path, PathBuf};

use phalanx::nn::models::{GptConfig, LlamaConfig, LoraConfig, ModelConfig, read_config};
use phalanx::nn::{Optimizer, Parameter, Schedule};
use phalanx::train::checkpoints::{self, FROZEN};
use phalanx::train::text::{Codec, Corpus, CorpusConfig, text_of_folder};
use phalanx::train::{self, AnyRule, Config, Error, MODEL, Result, choices, keyed};

choices! {
    pub enum Architecture { Gpt = "gpt", Llama = "llama" }
    pub enum Rule { AdamW = "adamw", Muon = "muon", Lamb = "lamb", Adafactor = "adafactor" }
}

/// Without other flags, 300 steps on sequences of the bundled text.
fn defaults() -> Config {
    let (steps, save_every) = (300, 100);
    let lr = Schedule::Cosine { lr: 1e-3, warmup: 20, total: steps, cycles: 0.5, min: 0.0 };
    Config { steps, batch: 8, lr, save_every, ..Config::default() }
}

keyed! {
    /// A training run of a language model.
    pub struct Gpt {
        in text: CorpusConfig = CorpusConfig::default(),
        in run: Config = defaults(),
        /// What the model is built like [default: gpt, or as the model that is continued].
        "architecture" architecture: Option<Architecture> = None,
        /// Transformer blocks [default: 4, or those of the model that is continued].
        "layers" layers: Option<usize> = None,
        /// Attention heads of a block [default: 4, or as above].
        "heads" heads: Option<usize> = None,
        /// Width of the residual stream [default: 192, or as above].
        "width" width: Option<usize> = None,
        /// What updates the matrices inside the model; the rest is always AdamW's.
        "optimizer" optimizer: Rule = Rule::AdamW,
        /// Weight decay of the matrices.
        "weight-decay" weight_decay: f64 = 0.1,
        /// Probability with which dropout zeroes an element.
        "dropout" dropout: f64 = 0.0,
        /// Start from the weights (and tokenizer) of a Hugging Face folder of GPT-2, Llama, Qwen or another causal language model.
        "init" init: Option<PathBuf> = None,
        /// Train LoRA adapters of that rank beside layers of these names, and modules in `modules_to_save=`; nothing else of `init`'s model.
        "lora" lora: Option<LoraConfig> = None,
        /// File for a JSON object a step.
        "metrics" metrics: Option<PathBuf> = None,
        /// Steps between samples of what the model writes; 0 for one at the end only.
        "sample-every" sample_every: u64 = 0,
        /// What samples go on from.
        "prompt" prompt: String = "\n".into(),
        /// No progress line, no sample.
        "quiet" quiet: bool = false,
    }
}

/// The default text is this workspace's sources and pages, of which one file of so many is held out.
const WORKSPACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const HELD_OUT: usize = 40;

impl Gpt {
    /// Layers, heads and width of a new model.
    pub fn sizes(&self) -> [usize; 3] {
        [self.layers.unwrap_or(4), self.heads.unwrap_or(4), self.width.unwrap_or(192)]
    }

    /// Refuses what the library cannot know of.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: String| Err(Error::Config(why));
        let [layers, heads, width] = self.sizes();
        let sizes = [("layers", layers), ("heads", heads), ("width", width), ("context", self.text.context)];
        if let Some((key, size)) = sizes.into_iter().find(|(_, size)| !(1..=1 << 24).contains(size)) {
            return refuse(format!("`{key}` is {size}, wanted 1 to 2^24"));
        }
        if !width.is_multiple_of(heads) {
            return refuse(format!("`heads` {heads} does not divide `width` {width}"));
        }
        if self.lora.is_some() && self.init.is_none() && self.run.resume.is_none() {
            return refuse("`lora` adapts a model, and `init` is not given".into());
        }
        let numbers = [("weight-decay", self.weight_decay, f64::INFINITY), ("dropout", self.dropout, 1.0)];
        if let Some((key, x, end)) = numbers.into_iter().find(|(_, x, end)| !(0.0..*end).contains(x)) {
            return refuse(format!("`{key}` is {x}, wanted a number from 0 up to {end}"));
        }
        self.run.check()
    }

    /// The folder of the weights to begin with, or of those that a run goes on from and that its checkpoints do not have.
    pub fn base(&self) -> Option<PathBuf> {
        let saved = || checkpoints::latest(self.run.resume.as_ref()?).ok();
        self.init.clone().or_else(|| saved()?.settings().get(FROZEN).map(PathBuf::from))
    }

    /// The model and its data: those of a folder, of the checkpoint that is gone on with (then the flag is true), or new ones.
    pub fn plan(&self) -> Result<(ModelConfig, Corpus, bool)> {
        let saved = self.run.resume.as_ref().and_then(|folder| {
            let saved = checkpoints::latest(folder).ok()?;
            // The tokenizer lies in the run's folder, also if a checkpoint in it is named.
            Some((saved.settings().get(MODEL)?.clone(), train::run_folder(folder)))
        });
        let from = match (&self.init, saved) {
            (_, Some((text, folder))) => Some((ModelConfig::parse(&text, folder)?, folder)),
            (Some(folder), None) => Some((read_config(folder)?, &**folder)),
            (None, None) => None,
        };
        let codec = from.as_ref().map(|(_, folder)| Codec::of(folder)).transpose()?;
        let bundled = || text_of_folder(Path::new(WORKSPACE), &["rs", "md"], HELD_OUT);
        let corpus = Corpus::open(&self.text, codec, bundled)?;
        let from_folder = from.is_some();
        let config = from.map(|(config, folder)| self.continued(config, folder)).transpose()?;
        let config = config.unwrap_or_else(|| self.fresh(corpus.vocabulary()));
        self.run.layout.check(&config, self.run.batch, self.text.context)?;
        Ok((config, corpus, from_folder))
    }

    /// The model of a folder, which may not have other sizes than flags say.
    fn continued(&self, mut config: ModelConfig, folder: &Path) -> Result<ModelConfig> {
        let sizes = [
            ("layers", self.layers, config.layers()),
            ("heads", self.heads, config.heads()),
            ("width", self.width, config.width()),
            ("context", Some(self.text.context.max(config.context())), config.context()),
        ];
        let unlike =
            |(_, wanted, got): &(_, Option<usize>, usize)| wanted.is_some_and(|wanted| wanted != *got);
        if let Some((key, wanted, got)) = sizes.into_iter().find(unlike) {
            let why = format!("`{key}` is {}, and the model has {got}", wanted.unwrap_or(0));
            return Err(Error::file(&folder.join("config.json"), why));
        }
        config.set_dropout(self.dropout);
        Ok(config)
    }

    /// A new model of the flags' sizes.
    fn fresh(&self, vocabulary: usize) -> ModelConfig {
        let ([layers, heads, width], context, dropout) = (self.sizes(), self.text.context, self.dropout);
        if self.architecture == Some(Architecture::Llama) {
            let config = LlamaConfig::new(vocabulary, context, layers, heads, width);
            return ModelConfig::Llama(LlamaConfig { tied: true, dropout, ..config });
        }
        ModelConfig::Gpt(GptConfig::new(vocabulary, context, layers, heads, width).with_dropout(dropout))
    }
}

/// AdamW or Adafactor for everything, or AdamW for all but the matrices, which are LAMB's, or those inside the model, Muon's.
pub fn optimizers(rule: Rule, decay: f64, all: Vec<Parameter>, lr: f64) -> Result<Vec<Optimizer<AnyRule>>> {
    let ends = ["wte", "wpe", "embed_tokens", "lm_head"];
    let inside = |p: &Parameter| p.is_matrix() && !ends.iter().any(|end| p.name().contains(end));
    match rule {
        Rule::AdamW => train::adamw_with(all, lr, decay),
        Rule::Muon => train::muon(all, lr, decay, inside),
        Rule::Lamb => train::lamb(all, lr, decay),
        Rule::Adafactor => train::adafactor(all, lr, decay),
    }
}
