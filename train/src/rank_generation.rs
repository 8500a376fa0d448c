//! Texts by the ranks that have a language model in parts: [`generate_rows`] and [`sample`] of a run's model, [`generate_saved`] of a folder's.

use std::path::Path;
use std::sync::Mutex;

use phalanx_nn::models::{Generated, Generation, GenerationStep, ModelConfig, Sampling, read_config};
use phalanx_nn::{Parameters, Scope, pack_weights};
use phalanx_parallel::hybrid::{self, Layout};
use phalanx_tensor::{DType, Device, unpoisoned};

use crate::text::Codec;
use crate::{Config, Result, Run, ranks, start};

/// New tokens of a sample.
const SAMPLE_TOKENS: usize = 300;

/// Continues prompts with the model of a run as it is now: with the averages of the weights, if there are such, and with adapters beside the
/// layers. The ranks of the first replica do it, each with its part of the model ([`hybrid::generate_rows`]); with ZeRO-3 each has the
/// parameters of its part whole meanwhile. Where ranks divide the experts, the other replicas of the first one's expert group take part.
/// Returns the rows there, and none on other ranks. All ranks call it, with the same prompts and settings.
///
/// # Errors
/// If the run trains no decoder, or as [`hybrid::generate_rows`].
pub fn generate_rows(
    run: &Run,
    prompts: &[impl AsRef<[u32]>],
    generation: Generation<'_>,
    sink: impl FnMut(GenerationStep<'_>) -> bool,
) -> Result<Option<Vec<Generated>>> {
    let _averages = run.averaged()?;
    let _values = run.data_parallel().gathered()?;
    let (groups, layout) = (&run.mesh_rank().groups, &run.config().layout);
    // Ranks that divide the experts need each other.
    if groups.at().dp >= layout.ep {
        return Ok(None);
    }
    Ok(Some(hybrid::generate_rows(&**run.model(), layout, groups, prompts, generation, sink)?))
}

/// What the model of a run writes now: the prompt and 300 tokens more, on the first rank. All ranks call it. A prompt that has no tokens is
/// replaced by token 0.
///
/// # Errors
/// As [`generate_rows`], and those of the tokenizer.
pub fn sample(
    run: &Run,
    config: &ModelConfig,
    codec: &Codec,
    prompt: &str,
    seed: u64,
) -> Result<Option<String>> {
    // A tokenizer may drop a line's end.
    let tokens = codec.encode(prompt.as_bytes(), config.vocabulary()).unwrap_or_default();
    let tokens = if tokens.is_empty() { vec![0] } else { tokens };
    let sampling = Sampling { temperature: 0.7, top_k: 40, seed };
    let generation = Generation::new(SAMPLE_TOKENS)
        .with_sampling(sampling.into())
        .with_text(|tokens| codec.decode(tokens).unwrap_or_default(), &[]);
    let rows = generate_rows(run, &[tokens], generation, |_| true)?.unwrap_or_default();
    let row = rows.first().filter(|_| run.mesh_rank().is_first());
    // An error that the text as it came could not tell.
    row.map(|row| codec.decode(&row.tokens).map(|_| format!("{prompt}{}", row.text))).transpose()
}

/// Continues prompts with the model of a Hugging Face folder, on CPUs and in this dtype. With several ranks each reads and holds its part of the model
/// only, as the layout's `tp` and `pp` say. Ranks are threads, or the processes that a launcher has started ([`start`], which gets `tell`). `generation` is called on each rank;
/// `sink` on the first one. Returns the rows in the process of the first rank. Weights lie in panels ([`pack_weights`]).
///
/// # Errors
/// If the folder has no decoder, the ranks cannot split it, or as [`hybrid::generate_rows`].
pub fn generate_saved<'a>(
    folder: &Path,
    layout: Layout,
    dtype: DType,
    prompts: &[Vec<u32>],
    generation: impl Fn() -> Generation<'a> + Sync,
    sink: impl FnMut(GenerationStep<'_>) -> bool + Send,
    tell: impl Fn(&str),
) -> Result<Option<Vec<Generated>>> {
    let model = read_config(folder)?;
    layout.check(&model, 1, model.context())?;
    let config = Config { layout, device: Device::CPU, dtype, ..Config::default() };
    let sink = Mutex::new(sink);
    start(&config, tell, |process| {
        let mut rows = ranks(&config, process, |rank| {
            let scope = Scope::new(0, config.dtype, rank.device);
            let part = hybrid::decoder(&model, &config.layout, &rank.groups, &scope, Some(folder))?;
            pack_weights(&part.parameters())?;
            let sink = |step: GenerationStep<'_>| unpoisoned(sink.lock())(step);
            Ok(hybrid::generate_rows(&part, &config.layout, &rank.groups, prompts, generation(), sink)?)
        })?;
        let is_first = process.is_none_or(|rank| rank.rank() == 0);
        Ok((is_first && !rows.is_empty()).then(|| rows.swap_remove(0)))
    })
}
