//! [`RecomputeMode`]: which values are computed again in backward instead of being kept.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// Which values are computed again in backward instead of being kept: of a model's blocks, or of a pipeline's micro-batches.
/// [`RecomputeMode::Attention`] is a mode of models alone; a pipeline, which knows no attention, recomputes no micro-batch under it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecomputeMode {
    /// None.
    #[default]
    Never,
    /// Those inside attention, between its linear layers, of every block: scores, probabilities and their dropout, which are most of the
    /// memory of long sequences and little of the arithmetic. Where attention has no dropout its kernel never keeps them, and nothing
    /// else is recomputed. Source: Korthikanti et al.: Reducing activation recomputation (2022), section 5.
    Attention,
    /// Those of all blocks (of all micro-batches) but the last, whose backward begins at once.
    ExceptLast,
    /// All: the least memory.
    Always,
}

impl RecomputeMode {
    const NAMES: [(&'static str, RecomputeMode); 4] = [
        ("always", RecomputeMode::Always),
        ("attention", RecomputeMode::Attention),
        ("except-last", RecomputeMode::ExceptLast),
        ("never", RecomputeMode::Never),
    ];

    /// How many of `count` blocks or micro-batches are recomputed: the first ones. Of micro-batches `count` is how many there
    /// are, not how many were asked for: 5 rows in 4 micro-batches make 3, of which the last is kept.
    pub fn recomputed(self, count: usize) -> usize {
        match self {
            RecomputeMode::Always => count,
            RecomputeMode::ExceptLast => count.saturating_sub(1),
            RecomputeMode::Never | RecomputeMode::Attention => 0,
        }
    }
}

impl fmt::Display for RecomputeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = RecomputeMode::NAMES.iter().find(|(_, mode)| mode == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

impl FromStr for RecomputeMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<RecomputeMode, Error> {
        let known = RecomputeMode::NAMES.iter().find(|(name, _)| *name == text);
        let why = || format!("got {text:?}, wanted always, attention, except-last or never");
        known.map(|(_, mode)| *mode).ok_or_else(|| Error::invalid("recomputation", why()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_micro_batches_that_there_are_count() {
        let counts = |m| RecomputeMode::NAMES.map(|(_, mode)| mode.recomputed(m));
        assert_eq!((counts(2), counts(1), counts(0)), ([2, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]));
    }

    #[test]
    fn names_parse_back_and_others_are_refused() {
        for (name, mode) in RecomputeMode::NAMES {
            assert_eq!((name.parse::<RecomputeMode>().unwrap(), mode.to_string().as_str()), (mode, name));
        }
        let message = "sometimes".parse::<RecomputeMode>().unwrap_err().to_string();
        assert_eq!(
            message,
            "recomputation: got \"sometimes\", wanted always, attention, except-last or never"
        );
    }
}
