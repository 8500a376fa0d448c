//! [`Error`]: how parallel training can fail. Collectives, `nn`, the engine and schedules have errors of their own, which this one
//! wraps; wrappers and pipelines add theirs.

use std::fmt;

use crate::pipeline::schedule;
use crate::{comm, engine};

/// The crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Between ranks.
    #[error(transparent)]
    Comm(#[from] comm::Error),
    /// In the model, its gradients or its optimizer.
    #[error(transparent)]
    Nn(#[from] phalanx_nn::Error),
    /// In an operation of an engine.
    #[error(transparent)]
    Engine(#[from] engine::Error),
    /// In a pipeline's schedule.
    #[error(transparent)]
    Schedule(#[from] schedule::Error),
    /// The ranks hold different models.
    #[error("ranks {ranks:?} hold a model other than rank 0's: {why}")]
    Models {
        /// The ranks that differ.
        ranks: Vec<usize>,
        /// Where.
        why: String,
    },
    /// The ranks were given different settings, texts, checkpoints or weights. Every rank has this error.
    #[error("{0}")]
    Disagreement(String),
    /// Settings that do not fit each other, the ranks or the model.
    #[error("{0}")]
    Config(String),
    /// An action of a pipeline's schedule failed or panicked on this rank.
    #[error("{action}: {cause}")]
    Action {
        /// The action, in the notation of schedules.
        action: String,
        /// Its error.
        cause: String,
    },
    /// In a cell of a pipeline.
    #[error("gpipe: stage {stage} on {device}, micro-batch {micro_batch}: {source}")]
    Stage {
        /// The stage.
        stage: usize,
        /// Its device.
        device: phalanx_tensor::Device,
        /// The micro-batch.
        micro_batch: usize,
        /// The error there.
        #[source]
        source: Box<Error>,
    },
    /// Gradients that every rank waits for did not come.
    #[error("backward gave no gradient to {}; let unused parameters be looked for (`find_unused`)", parameters.join(", "))]
    Unused {
        /// The parameters' names.
        parameters: Vec<String>,
    },
    /// Ranks ran out of batches before others, which was refused.
    #[error("join: ranks {ranks:?} have run out of batches, others have more")]
    Exhausted {
        /// The ranks that did.
        ranks: Vec<usize>,
    },
    /// Ranks run different numbers of synchronised passes for a batch.
    #[error(
        "join: ranks {pass:?} begin a pass that synchronises where ranks {batch:?} come to their next batch"
    )]
    Passes {
        /// Those with a pass more.
        pass: Vec<usize>,
        /// Those that are through with their batch.
        batch: Vec<usize>,
    },
}

impl From<phalanx_tensor::Error> for Error {
    fn from(error: phalanx_tensor::Error) -> Error {
        Error::Nn(error.into())
    }
}

impl From<phalanx_nn::autograd::Error> for Error {
    fn from(error: phalanx_nn::autograd::Error) -> Error {
        Error::Nn(error.into())
    }
}

/// For hooks, which run inside a backward pass.
impl From<Error> for phalanx_nn::autograd::Error {
    fn from(error: Error) -> phalanx_nn::autograd::Error {
        match error {
            Error::Nn(error) => error.into(),
            other => phalanx_nn::autograd::Error::Custom(other.to_string()),
        }
    }
}

/// The message, so that a program that ends with an error shows it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
