//! [`generate_rows`]: several prompts are continued at once, each token by token, with a cache of the keys and values of earlier ones.
//!
//! ```text
//! a call of the model:   | prompt of row 0, a piece | row 1 | row 2 |     rows side by side, each with caches of its own
//!                           no token yet              draw    draw
//! ```
//! A row whose prompt is computed takes part in each call with the token that was drawn last; a row whose prompt is not takes part with the
//! next piece of it. A row that ends gives up its caches, and the others go on.

mod text;

#[cfg(test)]
mod tests;

use phalanx_autograd::inference;
use phalanx_kernels as kernels;
use phalanx_tensor::DType;

use self::text::TextStream;
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
/// alone, on a CPU bit for bit. A row that outgrows the model's context continues with its last half as context.
///
/// # Errors
/// If a prompt is empty or holds an unknown token, the settings make no sense, or the model is not whole.
pub fn generate_rows<L: LayerFactory>(
    model: &Decoder<L>,
    prompts: &[impl AsRef<[u32]>],
    generation: Generation<'_>,
    mut sink: impl FnMut(GenerationStep<'_>) -> bool,
) -> Result<Vec<Generated>> {
    check(model, prompts, &generation)?;
    let Generation { count, sampling, end_tokens, mut processors, text, stop, piece, page } = generation;
    let _inference = inference();
    let row = |prompt: &[u32]| Row {
        all: prompt.to_vec(),
        prompt: prompt.len(),
        ahead: last_tokens(prompt, model.context()),
        caches: Vec::new(),
        text: text.as_deref().map(|decode| TextStream::new(decode, prompt.len(), &stop)),
        end: (count == 0).then_some(GenerationEnd::Count),
    };
    let mut rows: Vec<Row<'_>> = prompts.iter().map(|prompt| row(prompt.as_ref())).collect();
    loop {
        let counts = positions_of_call(model, &mut rows, piece, page)?;
        let taken = rows.iter_mut().zip(&counts).filter(|(_, count)| **count > 0);
        let mut taken: Vec<_> =
            taken.map(|(row, &count)| (&mut row.caches[..], &row.ahead[..count])).collect();
        if taken.is_empty() {
            break;
        }
        let logits = model.extend_rows(&mut taken)?;
        let mut scores = kernels::cast(logits.tensor(), DType::F64)?.to_vec::<f64>()?;
        let taken = rows.iter_mut().zip(counts).enumerate().filter(|(_, (_, count))| *count > 0);
        for ((number, (row, new)), scores) in taken.zip(scores.chunks_mut(logits.shape()[1])) {
            row.ahead.drain(..new);
            if !row.ahead.is_empty() {
                continue;
            }
            processors.iter_mut().for_each(|processor| processor(number, &row.all, scores));
            let history: Vec<i64> = match sampling.repetition_penalty == 1.0 {
                true => Vec::new(),
                false => row.all.iter().map(|&token| i64::from(token)).collect(),
            };
            let step = (row.all.len() - row.prompt) as u64;
            let token = draw_index("generate", scores, &history, sampling, step, number as u64)? as u32;
            let (token, text) = match end_tokens.contains(&token) {
                true => (None, row.end_at(GenerationEnd::Token(token))),
                false => (Some(token), row.push(token, count)),
            };
            if !sink(GenerationStep { row: number, token, text: &text, end: row.end }) && row.end.is_none() {
                row.end_at(GenerationEnd::Callback);
            }
        }
    }
    Ok(rows.into_iter().map(Row::finished).collect())
}

/// A row under way.
struct Row<'a> {
    /// The prompt and the new tokens.
    all: Vec<u32>,
    /// Tokens of the prompt.
    prompt: usize,
    /// The tokens that the model has not seen yet.
    ahead: Vec<i64>,
    /// One for each block; none before the first call and after the end.
    caches: Vec<KvCache>,
    text: Option<TextStream<'a>>,
    end: Option<GenerationEnd>,
}

impl Row<'_> {
    /// Adds a token that was drawn. Returns the text that is certain by now.
    fn push(&mut self, token: u32, count: usize) -> String {
        self.all.push(token);
        self.ahead.push(i64::from(token));
        let (mut text, stopped) = self.text.as_mut().map(|text| text.more(&self.all)).unwrap_or_default();
        if let Some(stop) = stopped {
            self.end_at(GenerationEnd::Stop(stop));
        } else if self.all.len() - self.prompt == count {
            text += &self.end_at(GenerationEnd::Count);
        }
        text
    }

    /// Ends the row, and gives up its caches. Returns the text that was held back.
    fn end_at(&mut self, end: GenerationEnd) -> String {
        self.caches = Vec::new();
        self.end = Some(end);
        if let (Some(text), false) = (&mut self.text, matches!(end, GenerationEnd::Stop(_))) {
            let (rest, stopped) = text.rest(&self.all);
            self.end = Some(stopped.map_or(end, GenerationEnd::Stop));
            return rest;
        }
        String::new()
    }

    fn finished(mut self) -> Generated {
        Generated {
            tokens: self.all.split_off(self.prompt),
            text: self.text.map(TextStream::into_text).unwrap_or_default(),
            end: self.end.unwrap_or(GenerationEnd::Count),
        }
    }
}

/// How many positions of each row the next call computes. A row's prompt is cut into the same pieces whatever the other rows are.
fn positions_of_call<L: LayerFactory>(
    model: &Decoder<L>,
    rows: &mut [Row<'_>],
    piece: usize,
    page: usize,
) -> Result<Vec<usize>> {
    let mut room = piece;
    let mut of_row = |row: &mut Row<'_>| {
        if row.end.is_some() {
            return Ok(0);
        }
        if row.caches.is_empty() {
            row.caches = model.row_caches(page)?;
        }
        if row.caches.first().map_or(0, KvCache::len) + row.ahead.len() > model.context() {
            row.caches.iter_mut().for_each(KvCache::clear);
            row.ahead = last_tokens(&row.all, model.context().div_ceil(2));
        }
        let count = row.ahead.len().min(piece);
        if count > 1 && count > room {
            return Ok(0);
        }
        // A single position is next to nothing, and a row that waits for pieces of others would be slow.
        room -= if count > 1 { count } else { 0 };
        Ok(count)
    };
    rows.iter_mut().map(&mut of_row).collect()
}

fn check<L: LayerFactory>(
    model: &Decoder<L>,
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
    if generation.piece == 0 || generation.page == 0 {
        let Generation { piece, page, .. } = generation;
        return wrong(format!("got pieces of {piece} and pages of {page} positions, wanted at least 1"));
    }
    check_options("generate", generation.sampling)
}

/// The last tokens, at most so many.
fn last_tokens(tokens: &[u32], most: usize) -> Vec<i64> {
    tokens[tokens.len().saturating_sub(most)..].iter().map(|&token| i64::from(token)).collect()
}
