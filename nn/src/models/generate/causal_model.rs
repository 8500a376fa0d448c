//! [`CausalModel`]: what generation asks a language model for. [`Decoder`] is a whole model; ranks that have parts of one implement it too.

use phalanx_autograd::Var;

use super::GenerationEnd;
use crate::models::{Decoder, KvCache, RowTokens};
use crate::{Error, LayerFactory, Result};

/// A causal language model as [`generate_rows_by`](super::generate_rows_by) sees it: a whole model, or one rank's part of a model that several
/// ranks have. All ranks then run the same loop over the same rows. One of them draws the tokens and tells them to the others.
///
/// A call of the model is made for a group of rows. Calls are begun in turn, group after group, and end in the order in which they began:
///
/// ```text
/// two stages, groups of rows a and b         time -->
/// stage 0, two calls under way       a   b   a   b   a
/// stage 1, one call under way            a   b   a   b
/// tokens drawn there, known to all         a   b   a
/// ```
pub trait CausalModel {
    /// How it fails.
    type Error: From<Error>;

    /// Positions that a row has at most, if [`Generation::context`](super::Generation::context) does not say otherwise.
    fn context(&self) -> usize;

    /// As [`Decoder::learned_positions`].
    fn learned_positions(&self) -> Option<usize> {
        None
    }

    /// Tokens that there are.
    fn vocabulary(&self) -> usize;

    /// The number of positions beyond which a row's earlier keys are rotated otherwise, if there is one
    /// ([`RopeScaling::LongRope`](crate::RopeScaling::LongRope)). A row that grows beyond it is computed again from its first position.
    fn turning_point(&self) -> Option<usize> {
        None
    }

    /// Empty caches for one row, one for each block that is here, which grow by pages of so many positions.
    ///
    /// # Errors
    /// If they cannot be allocated.
    fn row_caches(&self, page: usize) -> Result<Vec<KvCache>, Self::Error>;

    /// Begins a call: scores `[rows, vocabulary]` of the last of each row's further tokens; none where another rank draws.
    ///
    /// # Errors
    /// If the rows do not fit, or another rank fails.
    fn extend_rows(&self, rows: &mut [RowTokens<'_>]) -> Result<Option<Var>, Self::Error>;

    /// Into how many groups the rows are divided, whose calls may be under way at the same time. Equal on all ranks.
    fn groups(&self) -> usize {
        1
    }

    /// How many calls may be under way here. Ranks may differ.
    fn calls_under_way(&self) -> usize {
        1
    }

    /// Whether the callback is called here.
    fn calls_back(&self) -> bool {
        true
    }

    /// The tokens of `count` rows of a call, or why none could be drawn. `drawn` has them where they were drawn, and is none elsewhere.
    ///
    /// # Errors
    /// That of drawing, on all ranks; if a rank does not take part.
    fn agreed_tokens(&self, drawn: Option<Result<Vec<u32>>>, count: usize) -> Result<Vec<u32>, Self::Error>;

    /// The ends of these rows as the rank with the callback knows them.
    ///
    /// # Errors
    /// If a rank does not take part.
    fn agreed_ends(
        &self,
        own: Vec<Option<GenerationEnd>>,
    ) -> Result<Vec<Option<GenerationEnd>>, Self::Error> {
        Ok(own)
    }
}

impl<L: LayerFactory> CausalModel for Decoder<L> {
    type Error = Error;

    fn context(&self) -> usize {
        Decoder::context(self)
    }

    fn learned_positions(&self) -> Option<usize> {
        Decoder::learned_positions(self)
    }

    fn vocabulary(&self) -> usize {
        Decoder::vocabulary(self)
    }

    fn turning_point(&self) -> Option<usize> {
        Decoder::turning_point(self)
    }

    fn row_caches(&self, page: usize) -> Result<Vec<KvCache>> {
        Decoder::row_caches(self, page)
    }

    fn extend_rows(&self, rows: &mut [RowTokens<'_>]) -> Result<Option<Var>> {
        self.check_whole()?;
        self.extend_stage(None, rows).map(Some)
    }

    fn agreed_tokens(&self, drawn: Option<Result<Vec<u32>>>, count: usize) -> Result<Vec<u32>> {
        drawn.unwrap_or_else(|| Err(Error::invalid("generate", format!("got no tokens of {count} rows"))))
    }
}
