//! What can be wrong with a schedule.

use std::fmt;

use super::Action;

/// The results of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What is wrong with a schedule, or with what one was asked for.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Sizes or settings that no schedule can have.
    #[error("{op}: got {got}, wanted {wanted}")]
    Invalid {
        /// The function.
        op: &'static str,
        /// What came.
        got: String,
        /// What was wanted.
        wanted: &'static str,
    },
    /// A text is no schedule.
    #[error("schedule, line {line}: got {token:?}, wanted {wanted}")]
    Parse {
        /// From 1. The line is the rank's number plus one.
        line: usize,
        /// What stands there.
        token: String,
        /// What was wanted.
        wanted: &'static str,
    },
    /// An action is wrong where it stands.
    #[error("rank {rank}, action {position} ({action}): {why}")]
    Action {
        /// The rank.
        rank: usize,
        /// The action's place in the rank's list, from 0.
        position: usize,
        /// The action.
        action: Action,
        /// What is wrong.
        why: String,
    },
    /// An action is in no list.
    #[error("rank {rank}: nothing does {action}")]
    Missing {
        /// The rank that should do it.
        rank: usize,
        /// What is not done.
        action: Action,
    },
    /// Ranks wait for each other without end.
    #[error("deadlock: {}", waits.iter().map(|w| w.to_string()).collect::<Vec<_>>().join("; "))]
    Deadlock {
        /// Where each rank that has not come to its end stands.
        waits: Vec<Wait>,
    },
}

/// A rank that cannot go on.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, action {position} ({action}), waits for rank {peer}")]
pub struct Wait {
    /// The rank.
    pub rank: usize,
    /// The place in its list, from 0.
    pub position: usize,
    /// The action there.
    pub action: Action,
    /// The rank that it waits for.
    pub peer: usize,
}

/// The message, so that a program that ends with an error shows it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The message, so that a program that ends with an error shows it.
impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
