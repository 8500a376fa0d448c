//! [`sample`]: indices drawn from scores, as a language model draws its next token.

use std::cmp::Ordering;

use phalanx_autograd::Var;
use phalanx_kernels as kernels;
use phalanx_tensor::{DType, RngKey};

use crate::{Error, Result};

/// How indices are drawn from scores, in this order: the penalty, the temperature, `top_k`, `top_p`, `min_p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleOptions {
    /// Scores are divided by it; 0: always the largest.
    pub temperature: f64,
    /// Only so many of the largest scores are drawn from; `None`: all.
    pub top_k: Option<usize>,
    /// Only the largest scores whose probabilities together reach this are drawn from; 1: all.
    /// Source: Holtzman et al.: The curious case of neural text degeneration (2020).
    pub top_p: f64,
    /// Only scores whose probability is at least this share of the largest one's are drawn from; 0: all.
    /// Source: Nguyen et al.: Turning up the heat: min-p sampling for creative and coherent LLM outputs (2024).
    pub min_p: f64,
    /// Positive scores of indices in the history are divided by it, others multiplied; 1: no penalty.
    /// Source: Keskar et al.: CTRL (2019).
    pub repetition_penalty: f64,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for SampleOptions {
    fn default() -> SampleOptions {
        SampleOptions {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

/// Draws one index from scores `[V]`, or one from each row of `[B, V]`: logits, of which the softmax is the distribution.
///
/// The draw is a function of the seed, `step` and the row, so a caller that draws several times increments `step`. `histories` has for
/// each row the indices that were drawn before, for [`SampleOptions::repetition_penalty`]; it may be empty otherwise. Equal
/// scores are ordered by their indices.
///
/// ```
/// use phalanx_nn::autograd::Var;
/// use phalanx_nn::tensor::Device;
/// use phalanx_nn::{SampleOptions, sample};
/// let logits = Var::from_slice(&[0.1f32, 2.0, 1.0, -1.0], &[4], Device::CPU)?;
/// let options = SampleOptions { temperature: 0.8, top_k: Some(2), ..SampleOptions::default() };
/// let mut text = vec![];
/// for step in 0..10 {
///     text.extend(sample(&logits, &[], step, options)?);
/// }
/// assert!(text.iter().all(|&index| index == 1 || index == 2));
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
///
/// # Errors
/// If a setting makes no sense (a negative temperature, `top_k` 0, `top_p` or `min_p` outside of 0 to 1), the shape is another, a row
/// has no score or one that is NaN or infinite, or a history is missing or holds an index beyond the scores.
pub fn sample(logits: &Var, histories: &[&[i64]], step: u64, options: SampleOptions) -> Result<Vec<i64>> {
    check("sample", options)?;
    let (rows, width) = match *logits.shape() {
        [width] => (1, width),
        [rows, width] => (rows, width),
        _ => return refuse(format!("got logits of shape {:?}, wanted [V] or [B, V]", logits.shape())),
    };
    if rows > 0 && width == 0 {
        return refuse(format!("got logits of shape {:?}, which have no scores", logits.shape()));
    }
    if !(histories.is_empty() && options.repetition_penalty == 1.0) && histories.len() != rows {
        return refuse(format!(
            "got {} histories for {rows} rows of logits, wanted one for each",
            histories.len()
        ));
    }
    let scores = kernels::cast(logits.tensor(), DType::F64)?.to_vec::<f64>()?;
    let row = |(row, scores): (usize, &[f64])| {
        let history = histories.get(row).copied().unwrap_or_default();
        Ok(draw_index("sample", scores, history, options, step, row as u64)? as i64)
    };
    scores.chunks(width.max(1)).enumerate().map(row).collect()
}

fn refuse<T>(why: String) -> Result<T> {
    Err(Error::invalid("sample", why))
}

/// Refuses settings that make no sense.
pub(crate) fn check(op: &str, options: SampleOptions) -> Result<()> {
    let SampleOptions { temperature, top_k, top_p, min_p, repetition_penalty, .. } = options;
    let why = if !temperature.is_finite() || temperature < 0.0 {
        format!("got a temperature of {temperature}, wanted 0 or more")
    } else if top_k == Some(0) {
        "got a top_k of 0, wanted at least 1, or None for all".into()
    } else if !(top_p > 0.0 && top_p <= 1.0) {
        format!("got a top_p of {top_p}, wanted more than 0 and at most 1")
    } else if !(0.0..=1.0).contains(&min_p) {
        format!("got a min_p of {min_p}, wanted 0 to 1")
    } else if !repetition_penalty.is_finite() || repetition_penalty <= 0.0 {
        format!("got a repetition penalty of {repetition_penalty}, wanted more than 0, such as 1.1")
    } else {
        return Ok(());
    };
    Err(Error::invalid(op, why))
}

/// The site of the draws.
const SITE: u64 = 0x6765_6e65_7261_7465;

/// Draws an index by settings that were checked.
pub(crate) fn draw_index(
    op: &str,
    scores: &[f64],
    history: &[i64],
    options: SampleOptions,
    step: u64,
    row: u64,
) -> Result<usize> {
    let scores = &penalised(op, scores, history, options.repetition_penalty)?[..];
    if let Some(odd) =
        scores.iter().find(|score| score.is_nan() || (**score == f64::INFINITY && options.temperature > 0.0))
    {
        return Err(Error::invalid(op, format!("a score is {odd}, wanted finite ones, or -inf for never")));
    }
    let largest_first =
        |a: &usize, b: &usize| scores[*b].partial_cmp(&scores[*a]).unwrap_or(Ordering::Equal).then(a.cmp(b));
    let mut order: Vec<usize> = (0..scores.len()).collect();
    let first = order.iter().copied().min_by(largest_first);
    let Some(first) = first.filter(|&first| scores[first] > f64::NEG_INFINITY) else {
        return Err(Error::invalid(op, format!("none of the {} scores is above -inf", scores.len())));
    };
    if options.temperature == 0.0 {
        return Ok(first);
    }
    if let Some(top_k) = options.top_k.filter(|&top_k| top_k < order.len()) {
        order.select_nth_unstable_by(top_k - 1, largest_first);
        order.truncate(top_k);
    }
    order.sort_unstable_by(largest_first);
    let weight = |&index: &usize| ((scores[index] - scores[first]) / options.temperature).exp();
    let mut weights: Vec<f64> = order.iter().map(weight).collect();
    if options.top_p < 1.0 {
        weights.truncate(nucleus(&weights, options.top_p));
    }
    // The largest weight is 1.
    weights.truncate(weights.partition_point(|&weight| weight >= options.min_p));
    let [a, b, ..] = RngKey { seed: options.seed, step }.site(SITE).block(row, 0);
    let unit = ((u64::from(a) << 32 | u64::from(b)) >> 11) as f64 / (1u64 << 53) as f64;
    let mut rest = unit * weights.iter().sum::<f64>();
    let drawn = weights.iter().position(|weight| {
        rest -= weight;
        rest < 0.0
    });
    Ok(order[drawn.unwrap_or(weights.len() - 1)])
}

/// How many of these weights, the largest first, are needed to reach `top_p` of their sum. At least one.
fn nucleus(weights: &[f64], top_p: f64) -> usize {
    let wanted = top_p * weights.iter().sum::<f64>();
    let mut reached = 0.0;
    let last = weights.iter().position(|weight| {
        reached += weight;
        reached >= wanted
    });
    last.map_or(weights.len(), |last| last + 1)
}

/// The scores, with the history's indices made less likely.
fn penalised(op: &str, scores: &[f64], history: &[i64], penalty: f64) -> Result<Vec<f64>> {
    let mut changed = scores.to_vec();
    for &index in history {
        let index = usize::try_from(index).ok().filter(|&index| index < scores.len()).ok_or_else(|| {
            Error::invalid(op, format!("the history holds {index}, and there are {} scores", scores.len()))
        })?;
        // Computed from the original score, so that an index that was drawn twice is penalised once.
        let score = scores[index];
        changed[index] = if score > 0.0 { score / penalty } else { score * penalty };
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;

    fn options() -> SampleOptions {
        SampleOptions { seed: 3, ..SampleOptions::default() }
    }

    fn logits(values: &[f64], shape: &[usize]) -> Var {
        Var::from_slice(values, shape, Device::CPU).unwrap()
    }

    /// How often each of three indices is drawn.
    fn counts(scores: &[f64; 3], history: &[i64], options: SampleOptions) -> [f64; 3] {
        let mut counts = [0.0; 3];
        for step in 0..10_000 {
            counts[draw_index("sample", scores, history, options, step, 0).unwrap()] += 1e-4;
        }
        counts
    }

    fn near(counts: [f64; 3], shares: [f64; 3]) {
        assert!(counts.iter().zip(shares).all(|(count, share)| (count - share).abs() < 0.02), "{counts:?}");
    }

    #[test]
    fn draws_follow_the_scores_within_top_k_and_top_p() {
        let scores = [1.0f64, 6.0, 3.0].map(f64::ln);
        near(counts(&scores, &[], options()), [0.1, 0.6, 0.3]);
        near(
            counts(&scores, &[], SampleOptions { temperature: 0.5, ..options() }),
            [1.0 / 46.0, 36.0 / 46.0, 9.0 / 46.0],
        );
        near(
            counts(&scores, &[], SampleOptions { top_k: Some(2), ..options() }),
            [0.0, 2.0 / 3.0, 1.0 / 3.0],
        );
        near(counts(&scores, &[], SampleOptions { top_k: Some(9), ..options() }), [0.1, 0.6, 0.3]);
        near(counts(&scores, &[], SampleOptions { top_p: 0.59, ..options() }), [0.0, 1.0, 0.0]);
        near(counts(&scores, &[], SampleOptions { top_p: 0.61, ..options() }), [0.0, 2.0 / 3.0, 1.0 / 3.0]);
        near(counts(&scores, &[], SampleOptions { min_p: 0.17, ..options() }), [0.0, 2.0 / 3.0, 1.0 / 3.0]);
        near(counts(&scores, &[], SampleOptions { min_p: 0.16, ..options() }), [0.1, 0.6, 0.3]);
        near(counts(&scores, &[], SampleOptions { min_p: 1.0, ..options() }), [0.0, 1.0, 0.0]);
        // The temperature comes first: 1 / 36 and 9 / 36 of the largest.
        let sharp = SampleOptions { temperature: 0.5, min_p: 0.2, ..options() };
        near(counts(&scores, &[], sharp), [0.0, 0.8, 0.2]);
        near(counts(&scores, &[], SampleOptions { temperature: 0.0, ..options() }), [0.0, 1.0, 0.0]);
        near(counts(&[0.0, f64::NEG_INFINITY, 0.0], &[], options()), [0.5, 0.0, 0.5]);
    }

    #[test]
    fn a_penalty_makes_the_historys_indices_less_likely_once() {
        let penalty = SampleOptions { repetition_penalty: 2.0, ..options() };
        let scores = [2.0, 2.0, -1.0];
        let want = [1f64, 2.0, -2.0].map(f64::exp);
        let sum: f64 = want.iter().sum();
        near(counts(&scores, &[0, 2, 0, 0], penalty), want.map(|w| w / sum));
        let greedy = SampleOptions { temperature: 0.0, ..penalty };
        assert_eq!(sample(&logits(&scores, &[3]), &[&[0]], 0, greedy).unwrap(), [1]);
    }

    #[test]
    fn rows_draw_apart_and_the_first_as_if_alone() {
        let flat = [0.0; 64];
        let both = logits(&[flat, flat].concat(), &[2, 64]);
        let (mut same, mut steps) = (0, 0);
        for step in 0..50 {
            let drawn = sample(&both, &[], step, options()).unwrap();
            assert_eq!(drawn[0], sample(&logits(&flat, &[64]), &[], step, options()).unwrap()[0]);
            same += usize::from(drawn[0] == drawn[1]);
            steps += 1;
        }
        assert!(same < steps / 4, "{same} of {steps} equal");
        let half = both.to(DType::F16).unwrap();
        assert_eq!(sample(&half, &[], 7, options()).unwrap(), sample(&both, &[], 7, options()).unwrap());
        assert_eq!(sample(&logits(&[], &[0, 5]), &[], 0, options()).unwrap(), [0i64; 0]);
    }

    #[test]
    fn settings_scores_and_histories_that_make_no_sense_are_named() {
        let x = logits(&[1.0, 2.0], &[2]);
        let said = |x: &Var, histories: &[&[i64]], options: SampleOptions, part: &str| {
            let text = sample(x, histories, 0, options).unwrap_err().to_string();
            assert!(text.starts_with("sample: ") && text.contains(part), "{text:?} lacks {part:?}");
        };
        for temperature in [f64::NAN, -1.0, f64::INFINITY] {
            said(&x, &[], SampleOptions { temperature, ..options() }, "temperature");
        }
        for top_p in [f64::NAN, 0.0, -0.5, 1.5] {
            said(&x, &[], SampleOptions { top_p, ..options() }, "top_p");
        }
        for min_p in [f64::NAN, -0.1, 1.1] {
            said(&x, &[], SampleOptions { min_p, ..options() }, "min_p");
        }
        said(&x, &[], SampleOptions { top_k: Some(0), ..options() }, "top_k of 0");
        for repetition_penalty in [f64::NAN, 0.0, -1.0] {
            said(&x, &[&[]], SampleOptions { repetition_penalty, ..options() }, "repetition penalty");
        }
        said(&x, &[], SampleOptions { repetition_penalty: 1.2, ..options() }, "0 histories for 1 rows");
        said(&x, &[&[2]], options(), "holds 2");
        said(&x, &[&[-1]], options(), "holds -1");
        said(&logits(&[f64::NAN, 0.0], &[2]), &[], options(), "NaN");
        said(&logits(&[f64::INFINITY, 0.0], &[2]), &[], options(), "inf");
        said(&logits(&[f64::NEG_INFINITY; 2], &[2]), &[], options(), "above -inf");
        said(&logits(&[], &[0]), &[], options(), "no scores");
        said(&logits(&[0.0; 8], &[2, 2, 2]), &[], options(), "[2, 2, 2]");
    }
}
