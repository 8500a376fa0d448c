//! [`generate_rows`]: several prompts are continued at once, each token by token, with a cache of the keys and values of earlier ones.
//!
//! ```text
//! a call of the model:   | prompt of row 0, a piece | row 1 | row 2 |     rows side by side, each with caches of its own
//!                           no token yet              draw    draw
//! ```
//! A row whose prompt is computed takes part in each call with the token that was drawn last; a row whose prompt is not takes part with the
//! next piece of it. A row that ends gives up its caches, and the others go on.

mod causal_model;
mod rows;
mod text;

#[cfg(test)]
mod cache_tests;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use phalanx_autograd::{Var, inference};
use phalanx_kernels as kernels;
use phalanx_tensor::DType;

pub use self::causal_model::CausalModel;
use self::rows::{Call, Row, Sizes, Turns, begin};
use self::text::TextStream;
use super::Decoder;
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

/// Changes a row's scores before a token is drawn from them. It gets the row's number, its tokens so far, the prompt's included, and the
/// scores; -inf is for tokens that must not be drawn.
pub type LogitsProcessor<'a> = Box<dyn FnMut(usize, &[u32], &mut [f64]) + 'a>;

/// The text of some tokens that follow each other.
pub type TokenText<'a> = Box<dyn Fn(&[u32]) -> String + 'a>;

/// How rows are continued.
pub struct Generation<'a> {
    /// The largest number of new tokens of a row.
    pub count: usize,
    /// How tokens are drawn. Each row has draws of its own, which are a function of the seed and the row's number.
    pub sampling: SampleOptions,
    /// A row ends at one of these, which does not belong to its tokens.
    pub end_tokens: Vec<u32>,
    /// What becomes of scores before the penalty and the temperature, in this order.
    pub processors: Vec<LogitsProcessor<'a>>,
    /// What makes text of tokens, if text is wanted.
    pub text: Option<TokenText<'a>>,
    /// A row ends where its new text has one of these, which does not belong to its text.
    pub stop: Vec<String>,
    /// Positions that a row has at most, the model's context if none is given. A row that outgrows it continues with its last half, and only so
    /// many of a prompt's last tokens are seen. A model with rotated positions takes more than its context, as transformers does.
    pub context: Option<usize>,
    /// The largest number of positions of prompts that one call of the model computes, which bounds the memory for activations.
    pub piece: usize,
    /// Positions of a page of the cache. A row holds whole pages.
    pub page: usize,
}

impl<'a> Generation<'a> {
    /// So many new tokens a row, drawn as [`SampleOptions::default`] says, without text or an end before that.
    pub fn new(count: usize) -> Generation<'a> {
        Generation {
            count,
            sampling: SampleOptions::default(),
            end_tokens: Vec::new(),
            processors: Vec::new(),
            text: None,
            stop: Vec::new(),
            context: None,
            piece: 512,
            page: 64,
        }
    }

    /// The same with these options of drawing.
    #[must_use]
    pub fn with_sampling(mut self, sampling: SampleOptions) -> Generation<'a> {
        self.sampling = sampling;
        self
    }

    /// The same with rows that end at these tokens.
    #[must_use]
    pub fn with_end_tokens(mut self, tokens: &[u32]) -> Generation<'a> {
        self.end_tokens.extend(tokens);
        self
    }

    /// The same with one more change of scores.
    #[must_use]
    pub fn with_processor(mut self, processor: impl FnMut(usize, &[u32], &mut [f64]) + 'a) -> Generation<'a> {
        self.processors.push(Box::new(processor));
        self
    }

    /// The same with rows of at most so many positions.
    #[must_use]
    pub fn with_context(mut self, positions: usize) -> Generation<'a> {
        self.context = Some(positions);
        self
    }

    /// The same with text, which `text` makes of tokens, and rows that end where their text has one of the strings `stop`.
    #[must_use]
    pub fn with_text(mut self, text: impl Fn(&[u32]) -> String + 'a, stop: &[&str]) -> Generation<'a> {
        self.text = Some(Box::new(text));
        self.stop.extend(stop.iter().map(ToString::to_string));
        self
    }
}

/// What happened in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GenerationStep<'a> {
    /// The row.
    pub row: usize,
    /// The new token; none where the row ends at an end token.
    pub token: Option<u32>,
    /// Text that is certain by now. Text that may be the beginning of a stop string, or of a character, is held back.
    pub text: &'a str,
    /// Why the row ends here, if it does.
    pub end: Option<GenerationEnd>,
}

/// Why a row ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenerationEnd {
    /// It has as many new tokens as were wanted.
    Count,
    /// This end token was drawn.
    Token(u32),
    /// Its text had the stop string of this number.
    Stop(usize),
    /// The callback wanted no more.
    Callback,
}

/// A row that was continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The new tokens.
    pub tokens: Vec<u32>,
    /// Their text up to the stop string; empty without [`Generation::text`].
    pub text: String,
    /// Why it ended.
    pub end: GenerationEnd,
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
    let generation = Generation::new(count).with_sampling(options);
    generate_rows(model, &[prompt], generation, |step| step.token.is_none_or(&mut sink)).map(drop)
}

/// Continues prompts, which may be of unlike length, as `generation` says. `sink` gets what happens in each row as it happens, and returns
/// whether the row goes on. Returns what was made of each row.
///
/// There is no padding: a row's positions are counted from its first token, and it sees itself alone. So its scores are those that it has
/// alone, on a CPU bit for bit. A row that outgrows its context ([`Generation::context`]) continues with its last half.
///
/// # Errors
/// If a prompt is empty or holds an unknown token, the settings make no sense, or the model is not whole.
pub fn generate_rows<L: LayerFactory>(
    model: &Decoder<L>,
    prompts: &[impl AsRef<[u32]>],
    generation: Generation<'_>,
    sink: impl FnMut(GenerationStep<'_>) -> bool,
) -> Result<Vec<Generated>> {
    generate_rows_by(model, prompts, generation, sink)
}

/// [`generate_rows`] by any [`CausalModel`]. If several ranks have it, all of them call this with the same prompts and settings, and get
/// the same rows. `sink` is called on one of them, and processors where tokens are drawn.
///
/// # Errors
/// As [`generate_rows`], and those of the model.
pub fn generate_rows_by<M: CausalModel>(
    model: &M,
    prompts: &[impl AsRef<[u32]>],
    generation: Generation<'_>,
    mut sink: impl FnMut(GenerationStep<'_>) -> bool,
) -> Result<Vec<Generated>, M::Error> {
    check(model, prompts, &generation)?;
    let Generation { count, sampling, end_tokens, processors, text, stop, context, piece, page } = generation;
    let sizes = Sizes { context: context.unwrap_or(model.context()), piece, page };
    let _inference = inference();
    let row = |prompt: &[u32]| {
        let text = text.as_deref().map(|decode| TextStream::new(decode, prompt.len(), &stop));
        let end = (count == 0).then_some(GenerationEnd::Count);
        Row { end, ..Row::new(prompt, sizes.context, text) }
    };
    let mut rows: Vec<Row<'_>> = prompts.iter().map(|prompt| row(prompt.as_ref())).collect();
    let mut turns = Turns::new(rows.len(), model.groups());
    let mut draws = Draws { sampling, processors };
    let mut under_way = VecDeque::new();
    loop {
        while under_way.len() < model.calls_under_way()
            && let Some(group) = turns.next(&rows)
        {
            under_way.push_back(begin(model, &mut rows, group, sizes)?);
        }
        let Some(Call { drawn, logits }) = under_way.pop_front() else { break };
        if drawn.is_empty() {
            continue;
        }
        let tokens = logits.map(|logits| draws.draw(&rows, &drawn, &logits));
        let tokens = model.agreed_tokens(tokens, drawn.len())?;
        for (&(number, _), token) in drawn.iter().zip(tokens) {
            let row = &mut rows[number];
            row.is_drawn = false;
            let (token, text) = match end_tokens.contains(&token) {
                true => (None, row.end_at(GenerationEnd::Token(token))),
                false => (Some(token), row.push(token, count)),
            };
            let step = GenerationStep { row: number, token, text: &text, end: row.end };
            if model.calls_back() && !sink(step) && row.end.is_none() {
                row.end_at(GenerationEnd::Callback);
            }
        }
        let ends = model.agreed_ends(drawn.iter().map(|&(number, _)| rows[number].end).collect())?;
        for (&(number, _), end) in drawn.iter().zip(ends) {
            rows[number].agree(number, end)?;
        }
    }
    Ok(rows.into_iter().map(Row::finished).collect())
}

/// How tokens are drawn.
struct Draws<'a> {
    sampling: SampleOptions,
    processors: Vec<LogitsProcessor<'a>>,
}

impl Draws<'_> {
    /// A token for each row, by the logits at its place.
    fn draw(&mut self, rows: &[Row<'_>], drawn: &[(usize, usize)], logits: &Var) -> Result<Vec<u32>> {
        let mut scores = kernels::cast(logits.tensor(), DType::F64)?.to_vec::<f64>()?;
        let width = logits.shape()[1];
        let token = |&(number, place): &(usize, usize)| {
            let (row, scores) = (&rows[number], &mut scores[place * width..][..width]);
            self.processors.iter_mut().for_each(|processor| processor(number, &row.all, scores));
            let history: Vec<i64> = match self.sampling.repetition_penalty == 1.0 {
                true => Vec::new(),
                false => row.all.iter().map(|&token| i64::from(token)).collect(),
            };
            let step = (row.all.len() - row.prompt) as u64;
            Ok(draw_index("generate", scores, &history, self.sampling, step, number as u64)? as u32)
        };
        drawn.iter().map(token).collect()
    }
}

fn check<M: CausalModel>(
    model: &M,
    prompts: &[impl AsRef<[u32]>],
    generation: &Generation<'_>,
) -> Result<()> {
    let wrong = |why: String| Err(Error::invalid("generate", why));
    for (row, prompt) in prompts.iter().enumerate() {
        let prompt = prompt.as_ref();
        if prompt.is_empty() {
            return wrong(format!("row {row}: the prompt is empty"));
        }
        if let Some(token) = prompt.iter().find(|&&token| token as usize >= model.vocabulary()) {
            let vocabulary = model.vocabulary();
            return wrong(format!(
                "row {row}: token {token} of the prompt is not below the vocabulary {vocabulary}"
            ));
        }
    }
    if generation.stop.iter().any(String::is_empty) {
        return wrong("got an empty stop string, wanted text".into());
    }
    if generation.text.is_none() && !generation.stop.is_empty() {
        return wrong(
            "got stop strings and nothing that makes text of tokens, wanted `Generation::text`".into(),
        );
    }
    if generation.context == Some(0) {
        return wrong("got a context of 0 positions, wanted at least 1".into());
    }
    if let (Some(context), Some(most)) = (generation.context, model.learned_positions())
        && context > most
    {
        return wrong(format!(
            "got a context of {context} positions, wanted at most the model's {most} learned ones"
        ));
    }
    if generation.piece == 0 || generation.page == 0 {
        let Generation { piece, page, .. } = generation;
        return wrong(format!("got pieces of {piece} and pages of {page} positions, wanted at least 1"));
    }
    check_options("generate", generation.sampling)
}
