//! The errors of schedules.

use std::fmt;

use super::Action;

/// The results of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a schedule, or of the arguments of a function that makes one.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Sizes or settings that no schedule can have.
    #[error("{op}: got {got}, wanted {wanted}")]
    Invalid {
        /// The function.
        op: &'static str,
        /// The value that was given.
        got: String,
        /// The values that are allowed.
        wanted: &'static str,
    },
    /// A text that is not a schedule.
    #[error("schedule, line {line}: got {token:?}, wanted {wanted}")]
    Parse {
        /// The line, from 1: the rank plus one.
        line: usize,
        /// The text there.
        token: String,
        /// The values that are allowed.
        wanted: &'static str,
    },
    /// An action that is wrong at its position.
    #[error("rank {rank}, action {position} ({action}): {why}")]
    Action {
        /// The rank.
        rank: usize,
        /// The action's position in the rank's list, from 0.
        position: usize,
        /// The action.
        action: Action,
        /// The reason.
        why: String,
    },
    /// An action that is missing.
    #[error("rank {rank}: nothing does {action}")]
    Missing {
        /// The rank that should have it.
        rank: usize,
        /// The missing action.
        action: Action,
    },
    /// Ranks that wait for each other.
    #[error("deadlock: {}", waits.iter().map(|w| w.to_string()).collect::<Vec<_>>().join("; "))]
    Deadlock {
        /// The ranks that wait, each with its action.
        waits: Vec<Wait>,
    },
}

/// A rank that waits in a deadlock.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, action {position} ({action}), waits for rank {peer}")]
pub struct Wait {
    /// The rank.
    pub rank: usize,
    /// The position in its list, from 0.
    pub position: usize,
    /// The action at that position.
    pub action: Action,
    /// The rank that it waits for.
    pub peer: usize,
}

/// Shows the message, since a program that ends with an error prints its `Debug` text.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Shows the message, since a program that ends with an error prints its `Debug` text.
impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
