//! Errors of a training run.

use std::fmt;
use std::path::Path;

use phalanx_parallel::{self as parallel, comm};

/// The crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the model, its gradients, its optimizer, or of communication.
    #[error(transparent)]
    Parallel(#[from] parallel::Error),
    /// Settings that do not fit each other, the data or the run that is resumed.
    #[error("{0}")]
    Config(String),
    /// An error of a file or a data set.
    #[error("{what}: {why}")]
    Data {
        /// Which.
        what: String,
        /// The value that was got, and the one that was wanted.
        why: String,
    },
    /// An error of a step.
    #[error("step {step}: {source}")]
    Step {
        /// The step, from 0.
        step: u64,
        /// The error.
        #[source]
        source: Box<Error>,
    },
    /// Another process of the run reports the error.
    #[error("another process says what went wrong")]
    Elsewhere,
    /// The loss or a gradient has diverged, and the policy ends the run.
    #[error("{0}")]
    Diverged(String),
    /// A repeated step has other digests than were recorded.
    #[error("{0}")]
    Differs(String),
}

impl Error {
    /// An [`Error::Data`].
    pub fn data(what: impl Into<String>, why: impl Into<String>) -> Error {
        Error::Data { what: what.into(), why: why.into() }
    }

    /// An error of a file.
    pub fn file(path: &Path, why: impl fmt::Display) -> Error {
        Error::data(path.display().to_string(), why.to_string())
    }

    /// The error with its step. An error that names a rank or a step already is returned unchanged.
    pub(crate) fn in_step(self, step: u64) -> Error {
        match self {
            Error::Step { .. } | Error::Parallel(parallel::Error::Comm(_)) => self,
            source => Error::Step { step, source: Box::new(source) },
        }
    }

    /// The error in an error of a step.
    pub(crate) fn without_step(&self) -> &Error {
        match self {
            Error::Step { source, .. } => source.without_step(),
            error => error,
        }
    }
}

macro_rules! from {
    ($($error:ty),* $(,)?) => {$(
        impl From<$error> for Error {
            fn from(error: $error) -> Error {
                Error::Parallel(error.into())
            }
        }
    )*};
}

from!(phalanx_tensor::Error, phalanx_nn::autograd::Error, phalanx_nn::Error, comm::Error);

/// The message, so that a program that ends with an error shows it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
