//! Generation: one token at a time, with the keys and values of earlier ones kept.

use std::cmp::Ordering;

use phalanx_autograd::{Var, no_grad};
use phalanx_kernels as kernels;
use phalanx_tensor::{Context, DType, RngKey};

use super::{Decoder, KvCache};
use crate::{Error, Layers, Result};

/// How tokens are chosen.
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

/// The site of the draws.
const SITE: u64 = 0x6765_6e65_7261_7465;

/// Continues `prompt` by `count` tokens; `sink` gets each as it is chosen and returns whether to go on.
///
/// Where a sequence outgrows the model's context, it goes on from the last half of it.
///
/// # Errors
/// If the prompt is empty or holds an unknown token, the settings make no sense, or the model is not whole.
pub fn generate<L: Layers>(
    model: &Decoder<L>,
    prompt: &[u32],
    count: usize,
    sampling: Sampling,
    mut sink: impl FnMut(u32) -> bool,
) -> Result<()> {
    check(model, prompt, sampling)?;
    let _grad = no_grad();
    let _eval = Context::with(|c| c.train = false);
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
        let token = choose(&scores, sampling, step as u64)?;
        if !sink(token) {
            break;
        }
        all.push(token);
        new = vec![i64::from(token)];
    }
    Ok(())
}

fn check<L: Layers>(model: &Decoder<L>, prompt: &[u32], sampling: Sampling) -> Result<()> {
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
    if !sampling.temperature.is_finite() || sampling.temperature < 0.0 {
        return wrong(format!("got a temperature of {}, wanted 0 or more", sampling.temperature));
    }
    Ok(())
}

/// The last tokens that fit.
fn fitting(tokens: &[u32], context: usize) -> Vec<i64> {
    tokens[tokens.len().saturating_sub(context)..].iter().map(|&token| i64::from(token)).collect()
}

/// Draws a token; equal scores come in order of their tokens.
fn choose(scores: &[f64], sampling: Sampling, step: u64) -> Result<u32> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).unwrap_or(Ordering::Equal).then(a.cmp(&b)));
    let best = scores[order[0]];
    if scores.iter().any(|x| x.is_nan()) {
        return Err(Error::invalid("generate", "the model's scores are not numbers"));
    }
    if sampling.temperature == 0.0 {
        return Ok(order[0] as u32);
    }
    let kept = if sampling.top_k == 0 { order.len() } else { sampling.top_k.min(order.len()) };
    let weights: Vec<f64> =
        order[..kept].iter().map(|&i| ((scores[i] - best) / sampling.temperature).exp()).collect();
    let [a, b, ..] = RngKey { seed: sampling.seed, step }.site(SITE).block(0, 0);
    let unit = ((u64::from(a) << 32 | u64::from(b)) >> 11) as f64 / (1u64 << 53) as f64;
    let mut rest = unit * weights.iter().sum::<f64>();
    let drawn = weights.iter().position(|weight| {
        rest -= weight;
        rest < 0.0
    });
    Ok(order[drawn.unwrap_or(kept - 1)] as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_scores_and_stay_inside_top_k() {
        let scores: Vec<f64> = [1.0f64, 6.0, 3.0].map(f64::ln).into();
        let sampling = Sampling { temperature: 1.0, top_k: 0, seed: 3 };
        let mut counts = [0; 3];
        (0..10_000).for_each(|step| counts[choose(&scores, sampling, step).unwrap() as usize] += 1);
        for (count, share) in counts.into_iter().zip([0.1, 0.6, 0.3]) {
            assert!((f64::from(count) / 1e4 - share).abs() < 0.02, "{counts:?}");
        }
        let two = Sampling { top_k: 2, ..sampling };
        assert!((0..1000).all(|step| choose(&scores, two, step).unwrap() != 0));
        let greedy = Sampling { temperature: 0.0, ..sampling };
        assert!((0..10).all(|step| choose(&scores, greedy, step).unwrap() == 1));
        assert!(choose(&[0.0, f64::NAN], sampling, 0).is_err());
    }
}
