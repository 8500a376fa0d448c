//! `generate`: a saved model continues a prompt.

use std::path::PathBuf;

use phalanx::nn::models::{Generation, Sampling, read_config};
use phalanx::train::text::Codec;
use phalanx::train::{Error, Layout, Result, generate_saved, keyed};

keyed! {
    /// What continues a prompt, and how.
    pub struct Generate {
        /// Hugging Face folder of the model; the `model` folder of a training run, or the run's folder itself.
        "model" model: Option<PathBuf> = None,
        /// Take the weights with the run's lowest validation loss, which `keep-best` has kept.
        "best" best: bool = false,
        /// Text to continue.
        "prompt" prompt: String = String::new(),
        /// Tokens to make.
        "tokens" tokens: usize = 300,
        /// Divides the logits; 0 takes the likeliest token always.
        "temperature" temperature: f64 = 0.8,
        /// Draw among that many likeliest tokens; 0 for all.
        "top-k" top_k: usize = 40,
        /// Seed of the draws.
        "seed" seed: u64 = 1,
        /// Ranks that split each layer of the model.
        "tp" tp: usize = 1,
        /// Ranks among which the layers are divided.
        "pp" pp: usize = 1,
    }
}

/// The folder of a run's last model, and of its best one.
pub const FOLDERS: [&str; 2] = ["model", "best-model"];

/// The prompt, continued by a saved model; none if another process has the first rank.
pub fn run(args: &Generate) -> Result<Option<String>> {
    let refuse = |why: String| Err(Error::Config(why));
    let Some(folder) = &args.model else {
        return refuse("`model` is not given, wanted a model's folder".into());
    };
    if args.prompt.is_empty() {
        return refuse("`prompt` is empty, wanted at least one character".into());
    }
    if !(0.0..f64::INFINITY).contains(&args.temperature) {
        return refuse(format!("`temperature` is {}, wanted a number from 0 up", args.temperature));
    }
    let inner = folder.join(FOLDERS[usize::from(args.best)]);
    let is_model = folder.join("config.json").exists() || !inner.exists();
    let folder = if is_model && !args.best { folder } else { &inner };
    let codec = Codec::of(folder)?;
    let prompt = codec.encode(args.prompt.as_bytes(), read_config(folder)?.vocabulary())?;
    if prompt.is_empty() {
        return refuse(format!("{}: the prompt {:?} has no tokens", codec.source(), args.prompt));
    }
    let how = Sampling { temperature: args.temperature, top_k: args.top_k, seed: args.seed };
    let generation = || Generation::new(args.tokens).with_sampling(how.into());
    let layout = Layout { tp: args.tp, pp: args.pp, ..Layout::default() };
    let rows = generate_saved(folder, layout, &[prompt], generation, |_| true, crate::complain)?;
    let Some(row) = rows.unwrap_or_default().pop() else { return Ok(None) };
    Ok(Some(format!("{}{}", args.prompt, codec.decode(&row.tokens)?)))
}
