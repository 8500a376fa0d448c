//! [`EndOfText`]: tokens whose documents end at a token.

use std::ops::Range;

use super::{Tokens, check_range};
use crate::Result;

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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_begin_after_an_end_of_text() {
        let tokens = vec![5, 6, 0, 7, 0, 0, 8, 0].with_end_of_text(0);
        assert_eq!(tokens.document_starts(0..8).unwrap(), [0, 3, 5, 6]);
        assert_eq!(tokens.document_starts(3..6).unwrap(), [3, 5]);
        assert_eq!(tokens.document_starts(1..3).unwrap(), [0u64; 0]);
        assert_eq!(tokens.document_starts(0..0).unwrap(), [0u64; 0]);
        assert_eq!(tokens.document_starts(0..1).unwrap(), [0]);
        assert_eq!(tokens.end_of_text(), Some(0));
        assert!(tokens.document_starts(7..9).unwrap_err().to_string().contains("got the tokens 7..9"));
    }

    #[test]
    fn long_ranges_are_searched_block_by_block() {
        let mut tokens = vec![1; 3 * BLOCK];
        let ends = [0, BLOCK - 1, BLOCK, 2 * BLOCK + 5];
        ends.iter().for_each(|&end| tokens[end] = 0);
        let starts = tokens.with_end_of_text(0).document_starts(0..3 * BLOCK as u64).unwrap();
        let wanted: Vec<u64> = std::iter::once(0).chain(ends.iter().map(|&end| end as u64 + 1)).collect();
        assert_eq!(starts, wanted);
    }
}
