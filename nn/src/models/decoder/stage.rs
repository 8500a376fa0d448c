//! [`DecoderStage`]: which parts of a decoder are built.

use std::ops::Range;

/// A pipeline stage of a decoder: which of its parts are built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecoderStage {
    /// The blocks.
    pub layers: Range<usize>,
    /// Whether the embedding belongs to it.
    pub first: bool,
    /// Whether the final norm and the head belong to it.
    pub last: bool,
}

impl DecoderStage {
    /// The whole of a model of that many blocks.
    pub fn whole(layers: usize) -> DecoderStage {
        DecoderStage { layers: 0..layers, first: true, last: true }
    }
}
