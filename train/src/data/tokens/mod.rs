//! [`Tokens`]: long sequences of token numbers, read a window at a time from memory or from a file; [`EndOfText`]: documents that end at
//! a token.

mod file;
mod indexed;
pub(super) mod prepare;
#[cfg(test)]
mod tests;
mod windows;

pub use super::samples::Blend;
pub use file::{TokenFile, TokenWriter, Width};
pub use indexed::{IndexedTokens, IndexedWriter};
pub use windows::{Packed, TokenWindows};

use std::ops::Range;
use std::sync::Arc;

use phalanx_parallel::Content;

use super::dataset::in_memory;
use super::wrong;
use crate::{Error, Result};

/// A sequence of tokens that is read a part at a time. Several threads read it at once.
///
/// Implemented by files and, for small texts, by `Vec<u32>` and `[u32]`, which are one document.
pub trait Tokens: Send + Sync {
    /// How many tokens there are.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `to` with the tokens from `at` on.
    ///
    /// # Errors
    /// If there are fewer, they cannot be read, or one is outside the vocabulary that was named.
    fn copy(&self, at: u64, to: &mut [u32]) -> Result<()>;

    /// The places in `range` at which a document begins, ascending. There is one at 0.
    ///
    /// # Errors
    /// If the range reaches beyond the tokens, or they cannot be read.
    fn document_starts(&self, range: Range<u64>) -> Result<Vec<u64>>;

    /// The token at the end of every document, if there is one. The first token of the next document may then be predicted from it.
    fn end_of_text(&self) -> Option<u32> {
        None
    }

    /// What they are read from; see [`Dataset::contents`](super::Dataset::contents).
    fn contents(&self) -> Vec<Content> {
        Vec::new()
    }

    /// The same tokens, of which a document ends at each `end_of_text`.
    fn with_end_of_text(self, end_of_text: u32) -> EndOfText<Self>
    where
        Self: Sized,
    {
        EndOfText::new(self, end_of_text)
    }
}

impl Tokens for [u32] {
    fn len(&self) -> u64 {
        self.len() as u64
    }

    fn copy(&self, at: u64, to: &mut [u32]) -> Result<()> {
        check_range("tokens", &(at..at.saturating_add(to.len() as u64)), Tokens::len(self))?;
        to.copy_from_slice(&self[at as usize..][..to.len()]);
        Ok(())
    }

    fn document_starts(&self, range: Range<u64>) -> Result<Vec<u64>> {
        check_range("tokens", &range, Tokens::len(self))?;
        Ok(if range.contains(&0) { vec![0] } else { vec![] })
    }

    fn contents(&self) -> Vec<Content> {
        vec![in_memory(self.iter().flat_map(|token| token.to_le_bytes()))]
    }
}

macro_rules! forward {
    ($([$($generic:tt)*] $type:ty),*) => {$(
        impl<$($generic)*> Tokens for $type {
            fn len(&self) -> u64 {
                Tokens::len(&**self)
            }

            fn copy(&self, at: u64, to: &mut [u32]) -> Result<()> {
                (**self).copy(at, to)
            }

            fn document_starts(&self, range: Range<u64>) -> Result<Vec<u64>> {
                (**self).document_starts(range)
            }

            fn end_of_text(&self) -> Option<u32> {
                (**self).end_of_text()
            }

            fn contents(&self) -> Vec<Content> {
                (**self).contents()
            }
        }
    )*};
}

forward!([] Vec<u32>, [T: Tokens + ?Sized] Arc<T>, [T: Tokens + ?Sized] Box<T>);

/// Refuses a range that is not inside `len` tokens.
fn check_range(what: impl std::fmt::Display, range: &Range<u64>, len: u64) -> Result<()> {
    match range.start <= range.end && range.end <= len {
        true => Ok(()),
        false => Err(wrong(what, format!("got the tokens {range:?}, wanted a range of {len} tokens"))),
    }
}

/// Refuses tokens that are not in the vocabulary. The first lies at `at`.
fn check_vocabulary(what: impl std::fmt::Display, tokens: &[u32], at: u64, vocabulary: u32) -> Result<()> {
    match tokens.iter().position(|&token| token >= vocabulary) {
        None => Ok(()),
        Some(place) => Err(beyond(what, tokens[place].into(), at + place as u64, vocabulary)),
    }
}

/// The error of a number outside of the vocabulary.
fn beyond(what: impl std::fmt::Display, token: i64, at: u64, vocabulary: u32) -> Error {
    wrong(what, format!("got token {token} at position {at}, wanted one of a vocabulary of {vocabulary}"))
}

/// Tokens of which a document ends at each end-of-text token; see [`Tokens::with_end_of_text`].
#[derive(Clone, Debug)]
pub struct EndOfText<T> {
    tokens: T,
    end_of_text: u32,
}

impl<T> EndOfText<T> {
    pub(super) fn new(tokens: T, end_of_text: u32) -> EndOfText<T> {
        EndOfText { tokens, end_of_text }
    }
}

/// Tokens that are searched at a time.
const BLOCK: usize = 1 << 14;

impl<T: Tokens> Tokens for EndOfText<T> {
    fn len(&self) -> u64 {
        self.tokens.len()
    }

    fn copy(&self, at: u64, to: &mut [u32]) -> Result<()> {
        self.tokens.copy(at, to)
    }

    fn document_starts(&self, range: Range<u64>) -> Result<Vec<u64>> {
        check_range("tokens", &range, self.len())?;
        let mut starts = if range.contains(&0) { vec![0] } else { vec![] };
        // A document begins after the token that ends the one before.
        let (mut at, end) = (range.start.saturating_sub(1), range.end.saturating_sub(1));
        let mut block = vec![0; BLOCK.min(end.saturating_sub(at) as usize)];
        while at < end {
            let part = BLOCK.min((end - at) as usize);
            self.tokens.copy(at, &mut block[..part])?;
            let ends = (at..).zip(&block[..part]).filter(|&(_, &token)| token == self.end_of_text);
            starts.extend(ends.map(|(place, _)| place + 1));
            at += part as u64;
        }
        Ok(starts)
    }

    fn end_of_text(&self) -> Option<u32> {
        Some(self.end_of_text)
    }

    fn contents(&self) -> Vec<Content> {
        self.tokens.contents()
    }
}
