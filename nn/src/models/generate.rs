//! [`generate`]: text generation, one token at a time, with a cache of the keys and values of earlier tokens.

use phalanx_autograd::{Var, inference};
use phalanx_kernels as kernels;
use phalanx_tensor::DType;

use super::{Decoder, KvCache};
use crate::sample::{check as check_options, draw_index};
use crate::{Error, LayerFactory, Result, SampleOptions};

/// How tokens are chosen; [`SampleOptions`] has more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Scores are divided by it; 0: always the most likely token.
    pub temperature: f64,
    /// Only so many of the most likely tokens are drawn from; 0: all.
    pub top_k: usize,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 1.0, top_k: 0, seed: 0 }
    }
}

impl From<Sampling> for SampleOptions {
    fn from(sampling: Sampling) -> SampleOptions {
        let Sampling { temperature, top_k, seed } = sampling;
        SampleOptions { temperature, top_k: (top_k > 0).then_some(top_k), seed, ..SampleOptions::default() }
    }
}

/// Continues `prompt` by `count` tokens. `sink` gets each token when it is drawn and returns whether to continue.
///
/// A sequence that outgrows the model's context continues with its last half as context.
///
/// # Errors
/// If the prompt is empty or holds an unknown token, the settings make no sense, or the model is not whole.
pub fn generate<L: LayerFactory>(
    model: &Decoder<L>,
    prompt: &[u32],
    count: usize,
    sampling: Sampling,
    sink: impl FnMut(u32) -> bool,
) -> Result<()> {
    generate_with(model, prompt, count, sampling.into(), sink)
}

/// [`generate`] with all options of [`sample`](crate::sample()). The history of the repetition penalty is the prompt and all tokens that
/// follow it.
///
/// # Errors
/// As [`generate`].
pub fn generate_with<L: LayerFactory>(
    model: &Decoder<L>,
    prompt: &[u32],
    count: usize,
    options: SampleOptions,
    mut sink: impl FnMut(u32) -> bool,
) -> Result<()> {
    check(model, prompt)?;
    check_options("generate", options)?;
    let _inference = inference();
    let mut caches = model.caches(1, model.context().min(prompt.len().saturating_add(count)))?;
    let mut all = prompt.to_vec();
    let mut new = fitting(prompt, model.context());
    for step in 0..count {
        if caches.first().map_or(0, KvCache::len) + new.len() > model.context() {
            caches.iter_mut().for_each(KvCache::clear);
            new = fitting(&all[all.len().saturating_sub(model.context().div_ceil(2))..], model.context());
        }
        let tokens = Var::from_slice(&new, &[1, new.len()], model.device())?;
        let logits = model.extend(&tokens, &mut caches)?;
        let scores = kernels::cast(logits.tensor(), DType::F64)?.to_vec::<f64>()?;
        let history: Vec<i64> = match options.repetition_penalty == 1.0 {
            true => Vec::new(),
            false => all.iter().map(|&token| i64::from(token)).collect(),
        };
        let token = draw_index("generate", &scores, &history, options, step as u64, 0)? as u32;
        if !sink(token) {
            break;
        }
        all.push(token);
        new = vec![i64::from(token)];
    }
    Ok(())
}

fn check<L: LayerFactory>(model: &Decoder<L>, prompt: &[u32]) -> Result<()> {
    let wrong = |why: String| Err(Error::invalid("generate", why));
    if prompt.is_empty() {
        return wrong("the prompt is empty".into());
    }
    if let Some(token) = prompt.iter().find(|&&token| token as usize >= model.vocabulary()) {
        return wrong(format!(
            "token {token} of the prompt is not below the vocabulary {}",
            model.vocabulary()
        ));
    }
    Ok(())
}

/// The last tokens that fit the context.
fn fitting(tokens: &[u32], context: usize) -> Vec<i64> {
    tokens[tokens.len().saturating_sub(context)..].iter().map(|&token| i64::from(token)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_means_the_options_of_the_same_names() {
        let options = SampleOptions::from(Sampling { temperature: 0.5, top_k: 0, seed: 3 });
        assert_eq!(options, SampleOptions { temperature: 0.5, seed: 3, ..SampleOptions::default() });
        assert_eq!(SampleOptions::from(Sampling { top_k: 2, ..Sampling::default() }).top_k, Some(2));
    }
}
