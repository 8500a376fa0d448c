//! `generate`, and the sample at the end of training.

use phalanx::nn::Scope;
use phalanx::nn::models::{Decoder, Sampling, generate, load_model};
use phalanx::train::text::Codec;
use phalanx::{DType, Device};

use crate::args::GenerateArgs;

/// Continues the prompt with a saved model.
pub fn run(args: &GenerateArgs) -> Result<(), String> {
    if args.prompt.is_empty() {
        return Err("--prompt is empty, wanted at least one character".into());
    }
    if !(0.0..f64::INFINITY).contains(&args.temperature) {
        return Err(format!("--temperature is {}, wanted a number from 0 up", args.temperature));
    }
    let inner = args.model.join("model");
    let folder =
        if args.model.join("config.json").exists() || !inner.exists() { &args.model } else { &inner };
    let (_, model) =
        load_model(folder, &Scope::new(0, DType::F32, Device::CPU)).map_err(|e| e.to_string())?;
    let codec = Codec::of(folder).map_err(|e| e.to_string())?;
    let prompt = codec.encode(args.prompt.as_bytes(), model.vocabulary()).map_err(|e| e.to_string())?;
    if prompt.is_empty() {
        return Err(format!("{}: the prompt {:?} has no tokens", codec.source(), args.prompt));
    }
    let sampling = Sampling { temperature: args.temperature, top_k: args.top_k, seed: args.seed };
    crate::say(&format!("{}{}", args.prompt, written(&model, &codec, &prompt, args.tokens, sampling)?));
    Ok(())
}

/// The prompt and 300 tokens more from the model that was just trained.
pub fn sample(model: &Decoder, codec: &Codec, prompt: &str, seed: u64) -> Result<String, String> {
    // A tokenizer may drop a line's end.
    let tokens = codec.encode(prompt.as_bytes(), model.vocabulary()).unwrap_or_default();
    let tokens = if tokens.is_empty() { vec![0] } else { tokens };
    let how = Sampling { temperature: 0.7, top_k: 40, seed };
    Ok(format!("{prompt}{}", written(model, codec, &tokens, 300, how)?))
}

fn written(
    model: &Decoder,
    codec: &Codec,
    prompt: &[u32],
    count: usize,
    how: Sampling,
) -> Result<String, String> {
    let mut tokens = Vec::new();
    let keep = |token| {
        tokens.push(token);
        true
    };
    generate(model, prompt, count, how, keep).map_err(|e| e.to_string())?;
    codec.decode(&tokens).map_err(|e| e.to_string())
}
