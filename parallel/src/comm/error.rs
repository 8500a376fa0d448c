//! [`Error`]: how communication can fail. Every message names the rank and the call.

use std::fmt;
use std::time::Duration;

/// The results of communication.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a call of a communicator, or the end of a whole run. Ranks are those of the whole run, not of a group.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor cannot be used.
    #[error(transparent)]
    Tensor(#[from] phalanx_tensor::Error),
    /// The call's arguments do not fit each other or this rank.
    #[error("{op}: {why}")]
    Invalid {
        /// The call.
        op: &'static str,
        /// What was given and what was wanted.
        why: String,
    },
    /// Two ranks came to the same place with different calls.
    #[error("the ranks call different things: rank {left} {left_call}, rank {right} {right_call}")]
    Mismatch {
        /// A rank.
        left: usize,
        /// The call of that rank.
        left_call: String,
        /// The first rank that differs.
        right: usize,
        /// The call of that one.
        right_call: String,
    },
    /// Ranks did not arrive within the timeout.
    #[error("{call}: ranks {missing:?} did not arrive within {} ms{hint}", waited.as_millis())]
    Late {
        /// Those that others waited for.
        missing: Vec<usize>,
        /// Where they were wanted.
        call: String,
        /// The timeout.
        waited: Duration,
        /// How to learn more: the end of the message.
        hint: String,
    },
    /// A rank ended, without an error, while others wait for it.
    #[error("{call}: rank {rank} has ended without arriving")]
    Deserted {
        /// The rank that ended.
        rank: usize,
        /// Where it was wanted.
        call: String,
    },
    /// A rank ended with an error or a panic.
    #[error("rank {rank} failed: {cause}")]
    Failed {
        /// The rank.
        rank: usize,
        /// Its message.
        cause: String,
    },
    /// Another process has ended the run.
    #[error("{what} (said rank {rank})")]
    Reported {
        /// The rank that said so.
        rank: usize,
        /// Its message.
        what: String,
        /// Whether a process was lost.
        is_loss: bool,
    },
    /// A process is gone, or cannot be reached any more.
    #[error("rank {rank} is lost: {why}")]
    Lost {
        /// The rank.
        rank: usize,
        /// How that showed.
        why: String,
    },
    /// The run could not be started.
    #[error("launch: {0}")]
    Launch(String),
    /// Something else went wrong while this rank was in a call.
    #[error("{call}: {cause}")]
    Interrupted {
        /// Where this rank was.
        call: String,
        /// The error that ended the run.
        cause: Box<Error>,
    },
}

impl Error {
    pub(crate) fn invalid(op: &'static str, why: impl Into<String>) -> Error {
        Error::Invalid { op, why: why.into() }
    }

    /// The failure of a rank. If the cause is the failure of some rank already, because every rank has heard of it, it is that.
    pub fn failed(rank: usize, cause: &str) -> Error {
        let named = cause.strip_prefix("rank ").and_then(|rest| rest.split_once(" failed: "));
        let named = named.and_then(|(number, cause)| Some((number.parse().ok()?, cause)));
        let (rank, cause) = named.unwrap_or((rank, cause));
        Error::Failed { rank, cause: cause.into() }
    }

    /// Whether a process was lost, by whatever path this rank learned of it.
    pub fn is_loss(&self) -> bool {
        match self {
            Error::Lost { .. } => true,
            Error::Reported { is_loss, .. } => *is_loss,
            Error::Interrupted { cause, .. } => cause.is_loss(),
            _ => false,
        }
    }

    /// This error, which ended the run, as returned by a rank that was in `call`.
    pub(crate) fn seen_in(&self, call: impl FnOnce() -> String) -> Error {
        match self {
            Error::Mismatch { .. } => self.clone(),
            _ => {
                let call = call();
                match self {
                    Error::Late { call: at, .. } | Error::Deserted { call: at, .. } if *at == call => {
                        self.clone()
                    }
                    _ => Error::Interrupted { call, cause: Box::new(self.clone()) },
                }
            }
        }
    }
}

/// The message, so that a program that ends with an error shows it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_rank_that_failed_once() {
        let once = Error::failed(1, "no such file").to_string();
        assert_eq!(once, "rank 1 failed: no such file");
        assert_eq!(Error::failed(0, &once).to_string(), once);
        assert_eq!(Error::failed(0, "rank x failed: y").to_string(), "rank 0 failed: rank x failed: y");
    }

    #[test]
    fn a_loss_is_one_whichever_rank_reports_it() {
        let lost = Error::Lost { rank: 2, why: "its connection broke".into() };
        let told = Error::Reported { rank: 3, what: format!("1RECV_F0: {lost}"), is_loss: true };
        let inside = Error::Interrupted { call: "recv".into(), cause: Box::new(told.clone()) };
        assert!([lost, told, inside].iter().all(Error::is_loss));
        // A program's own message is none, whatever it says.
        let what = "rank 1 failed: shard 3 is lost: no such file".into();
        assert!(!Error::Reported { rank: 1, what, is_loss: false }.is_loss());
    }
}
