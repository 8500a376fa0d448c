//! [`Stage`]: a range of a model.

use std::ops::Range;

/// Which part of a model is built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The blocks.
    pub layers: Range<usize>,
    /// Whether the embedding belongs to it.
    pub first: bool,
    /// Whether the final norm and the head belong to it.
    pub last: bool,
}

impl Stage {
    /// The whole of a model of that many blocks.
    pub fn whole(layers: usize) -> Stage {
        Stage { layers: 0..layers, first: true, last: true }
    }
}
