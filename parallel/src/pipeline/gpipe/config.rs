//! [`GPipeConfig`]: micro-batches, recomputation, who looks on.

use std::fmt;
use std::str::FromStr;

use super::Observer;
use crate::Error;

/// Which micro-batches' values are computed again in backward instead of being kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checkpoint {
    /// Those of every micro-batch: the least memory.
    Always,
    /// All but the last one's, which backward needs at once.
    #[default]
    ExceptLast,
    /// None.
    Never,
}

impl Checkpoint {
    const NAMES: [(&'static str, Checkpoint); 3] = [
        ("always", Checkpoint::Always),
        ("except-last", Checkpoint::ExceptLast),
        ("never", Checkpoint::Never),
    ];

    /// How many of so many micro-batches are recomputed: the first ones. They are counted as they are, not as they were
    /// asked for: 5 rows in 4 micro-batches make 3, of which the last is kept.
    pub fn recomputed(self, micro_batches: usize) -> usize {
        match self {
            Checkpoint::Always => micro_batches,
            Checkpoint::ExceptLast => micro_batches.saturating_sub(1),
            Checkpoint::Never => 0,
        }
    }
}

impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Checkpoint::NAMES.iter().find(|(_, mode)| mode == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

impl FromStr for Checkpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Checkpoint, Error> {
        let known = Checkpoint::NAMES.iter().find(|(name, _)| *name == text);
        let wrong =
            || Error::Config(format!("recomputation: got {text:?}, wanted always, except-last or never"));
        known.map(|(_, mode)| *mode).ok_or_else(wrong)
    }
}

/// How a [`super::GPipe`] runs.
#[derive(Clone)]
pub struct GPipeConfig {
    pub(super) micro_batches: usize,
    pub(super) checkpoint: Checkpoint,
    pub(super) observer: Option<Observer>,
}

impl GPipeConfig {
    /// At most that many micro-batches; all but the last one recomputed.
    pub fn new(micro_batches: usize) -> GPipeConfig {
        GPipeConfig { micro_batches, checkpoint: Checkpoint::default(), observer: None }
    }

    /// With these recomputed.
    #[must_use]
    pub fn with_checkpoint(self, checkpoint: Checkpoint) -> GPipeConfig {
        GPipeConfig { checkpoint, ..self }
    }

    /// With an observer of everything that is computed or copied.
    #[must_use]
    pub fn with_observer(self, observer: Observer) -> GPipeConfig {
        GPipeConfig { observer: Some(observer), ..self }
    }
}

impl fmt::Debug for GPipeConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let observed = self.observer.is_some();
        write!(f, "{} micro-batches, recomputed {}, observed {observed}", self.micro_batches, self.checkpoint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_micro_batches_that_there_are_count() {
        let counts = |m| Checkpoint::NAMES.map(|(_, mode)| mode.recomputed(m));
        assert_eq!((counts(2), counts(1), counts(0)), ([2, 1, 0], [1, 0, 0], [0, 0, 0]));
    }

    #[test]
    fn names_parse_back_and_others_are_refused() {
        for (name, mode) in Checkpoint::NAMES {
            assert_eq!((name.parse::<Checkpoint>().unwrap(), mode.to_string().as_str()), (mode, name));
        }
        let message = "sometimes".parse::<Checkpoint>().unwrap_err().to_string();
        assert_eq!(message, "recomputation: got \"sometimes\", wanted always, except-last or never");
    }
}
