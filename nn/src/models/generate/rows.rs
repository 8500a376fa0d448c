//! [`Row`]: a row under way; [`begin`] begins a call of the model for a group of rows, and [`Turns`] says which group is next.

use std::ops::Range;

use phalanx_autograd::Var;

use super::text::TextStream;
use super::{CausalModel, Generated, GenerationEnd};
use crate::models::{KvCache, RowTokens};
use crate::{Error, Result, cut};

/// A row under way.
pub(super) struct Row<'a> {
    /// The prompt and the new tokens.
    pub all: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// The tokens that the model has not seen yet.
    pub ahead: Vec<i64>,
    /// The tokens that are in the caches.
    pub seen: usize,
    /// Positions that the row had when its last call began, those of further pieces included.
    pub known: usize,
    /// Whether the next token is drawn of a call that is under way.
    pub is_drawn: bool,
    /// One for each block; none before the first call and after the end.
    pub caches: Vec<KvCache>,
    pub text: Option<TextStream<'a>>,
    pub end: Option<GenerationEnd>,
}

impl<'a> Row<'a> {
    /// A row that begins with a prompt.
    pub fn new(prompt: &[u32], context: usize, text: Option<TextStream<'a>>) -> Row<'a> {
        Row {
            all: prompt.to_vec(),
            prompt: prompt.len(),
            ahead: last_tokens(prompt, context),
            seen: 0,
            known: 0,
            is_drawn: false,
            caches: Vec::new(),
            text,
            end: None,
        }
    }

    /// Forgets what is in the caches: the last tokens, so many, are ahead.
    fn start_again(&mut self, positions: usize) {
        self.caches.iter_mut().for_each(KvCache::clear);
        self.seen = 0;
        self.ahead = last_tokens(&self.all, positions);
    }

    /// Adds a token that was drawn. Returns the text that is certain by now.
    pub fn push(&mut self, token: u32, count: usize) -> String {
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
    pub fn end_at(&mut self, end: GenerationEnd) -> String {
        self.caches = Vec::new();
        self.end = Some(end);
        if let (Some(text), false) = (&mut self.text, matches!(end, GenerationEnd::Stop(_))) {
            let (rest, stopped) = text.rest(&self.all);
            self.end = Some(stopped.map_or(end, GenerationEnd::Stop));
            return rest;
        }
        String::new()
    }

    /// Ends the row if it has ended on the rank with the callback.
    pub fn agree(&mut self, number: usize, end: Option<GenerationEnd>) -> Result<()> {
        if self.end.is_none() && end.is_some() {
            self.end_at(GenerationEnd::Callback);
        }
        if self.end == end {
            return Ok(());
        }
        let told = |end: Option<GenerationEnd>| end.map_or("goes on".into(), |end| format!("ends ({end:?})"));
        let (here, there) = (told(self.end), told(end));
        let why = format!("row {number} {here} here and {there} on the rank with the callback");
        Err(Error::invalid(
            "generate",
            format!("{why}, wanted `Generation::text` to be one function on all ranks"),
        ))
    }

    pub fn finished(mut self) -> Generated {
        Generated {
            tokens: self.all.split_off(self.prompt),
            text: self.text.map(TextStream::into_text).unwrap_or_default(),
            end: self.end.unwrap_or(GenerationEnd::Count),
        }
    }
}

/// Numbers of positions, as [`Generation`](super::Generation) says them.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub context: usize,
    pub piece: usize,
    pub page: usize,
}

/// How many positions of each row the next call computes. A row's prompt is cut into the same pieces whatever the other rows are.
fn positions_of_call<M: CausalModel>(
    model: &M,
    rows: &mut [Row<'_>],
    Sizes { context, piece, page }: Sizes,
) -> Result<Vec<usize>, M::Error> {
    let mut room = piece;
    let mut of_row = |row: &mut Row<'_>| {
        if row.end.is_some() {
            return Ok(0);
        }
        if row.caches.is_empty() {
            row.caches = model.row_caches(page)?;
        }
        let positions = row.seen + row.ahead.len();
        let turns = |point: usize| row.seen > 0 && row.known <= point && positions > point;
        if positions > context {
            row.start_again(context.div_ceil(2));
        } else if model.turning_point().is_some_and(turns) {
            row.start_again(positions);
        }
        row.known = row.seen + row.ahead.len();
        row.caches.iter_mut().for_each(|cache| cache.expect(row.known));
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

/// A call of the model that was begun.
pub(super) struct Call {
    /// The rows of which a token is drawn, and their places among the rows of the call.
    pub drawn: Vec<(usize, usize)>,
    /// `[rows, vocabulary]`, where tokens are drawn.
    pub logits: Option<Var>,
}

/// Begins a call for a group of rows.
pub(super) fn begin<M: CausalModel>(
    model: &M,
    rows: &mut [Row<'_>],
    group: Range<usize>,
    sizes: Sizes,
) -> Result<Call, M::Error> {
    let first = group.start;
    let rows = &mut rows[group];
    let counts = positions_of_call(model, rows, sizes)?;
    let taken = rows.iter_mut().zip(&counts).filter(|(_, count)| **count > 0);
    let mut taken: Vec<RowTokens<'_>> = taken
        .map(|(Row { caches, seen, ahead, .. }, &count)| RowTokens {
            caches,
            before: *seen,
            tokens: &ahead[..count],
        })
        .collect();
    let logits = model.extend_rows(&mut taken)?;
    let mut drawn = Vec::new();
    let taken = rows.iter_mut().zip(counts).enumerate().filter(|(_, (_, count))| *count > 0);
    for (place, (number, (row, count))) in taken.enumerate() {
        row.ahead.drain(..count);
        row.seen += count;
        row.is_drawn = row.ahead.is_empty();
        if row.is_drawn {
            drawn.push((first + number, place));
        }
    }
    Ok(Call { drawn, logits })
}

/// Whose turn it is: groups of rows, one after the other. A group whose tokens are not known yet is waited for, so all ranks begin the same
/// calls in the same order.
pub(super) struct Turns {
    groups: Vec<Range<usize>>,
    next: usize,
}

impl Turns {
    pub fn new(rows: usize, groups: usize) -> Turns {
        Turns { groups: cut(rows, groups.clamp(1, rows.max(1))), next: 0 }
    }

    /// The next group that is not over; none if it has to be waited for, or all are over.
    pub fn next(&mut self, rows: &[Row<'_>]) -> Option<Range<usize>> {
        for _ in 0..self.groups.len() {
            let group = self.groups[self.next].clone();
            if rows[group.clone()].iter().any(|row| row.is_drawn) {
                return None;
            }
            self.next = (self.next + 1) % self.groups.len();
            if rows[group.clone()].iter().any(|row| row.end.is_none()) {
                return Some(group);
            }
        }
        None
    }
}

/// The last tokens, at most so many.
fn last_tokens(tokens: &[u32], most: usize) -> Vec<i64> {
    tokens[tokens.len().saturating_sub(most)..].iter().map(|&token| i64::from(token)).collect()
}
