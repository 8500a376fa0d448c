//! `generate`, and the samples of a run.

use std::path::PathBuf;

use phalanx::nn::Scope;
use phalanx::nn::models::{Decoder, Sampling, generate, has_weights, load_model};
use phalanx::train::text::Codec;
use phalanx::train::{Error, Result, keyed};
use phalanx::{DType, Device};

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
    }
}

/// The folder of a run's last model, and of its best one.
pub const FOLDERS: [&str; 2] = ["model", "best-model"];

/// The prompt, continued by a saved model.
pub fn run(args: &Generate) -> Result<String> {
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
    let is_model = has_weights(folder) || !inner.exists();
    let folder = if is_model && !args.best { folder } else { &inner };
    let (_, model) = load_model(folder, &Scope::new(0, DType::F32, Device::CPU))?;
    let codec = Codec::of(folder)?;
    let prompt = codec.encode(args.prompt.as_bytes(), model.vocabulary())?;
    if prompt.is_empty() {
        return refuse(format!("{}: the prompt {:?} has no tokens", codec.source(), args.prompt));
    }
    let how = Sampling { temperature: args.temperature, top_k: args.top_k, seed: args.seed };
    Ok(format!("{}{}", args.prompt, written(&model, &codec, &prompt, args.tokens, how)?))
}

/// The prompt and 300 tokens more from a model that is being trained.
pub fn sample(model: &Decoder, codec: &Codec, prompt: &str, seed: u64) -> Result<String> {
    // A tokenizer may drop a line's end.
    let tokens = codec.encode(prompt.as_bytes(), model.vocabulary()).unwrap_or_default();
    let tokens = if tokens.is_empty() { vec![0] } else { tokens };
    let how = Sampling { temperature: 0.7, top_k: 40, seed };
    Ok(format!("{prompt}{}", written(model, codec, &tokens, 300, how)?))
}

fn written(model: &Decoder, codec: &Codec, prompt: &[u32], count: usize, how: Sampling) -> Result<String> {
    let mut tokens = Vec::new();
    generate(model, prompt, count, how, |token| {
        tokens.push(token);
        true
    })?;
    codec.decode(&tokens)
}
