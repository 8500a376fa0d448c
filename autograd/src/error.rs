//! What can go wrong when a graph is recorded or run backward.

use std::fmt;

/// The crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a differentiable operation or of a backward pass.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operation itself refused.
    #[error(transparent)]
    Tensor(#[from] phalanx_tensor::Error),
    /// Backward was asked of something that no graph leads to.
    #[error(
        "backward: the root does not require a gradient: nothing that led to it was recorded, as no input was a leaf or \
         a parameter that requires one, or gradients were off (`no_grad`)"
    )]
    NoGraph,
    /// The root has several elements, and no gradient was given for it.
    #[error(
        "backward: got a root of shape {shape:?}, wanted one element; reduce it (`mean_all`, `sum_all`), or give the \
         gradient that it has itself (`Var::backward_with`)"
    )]
    NotScalar {
        /// The root's shape.
        shape: Vec<usize>,
    },
    /// The saved values of this node were freed by an earlier backward pass.
    #[error(
        "{op}: its saved values were freed by an earlier backward; to keep them, run that one as \
         `backward_options(Options {{ retain_graph: true, ..Options::default() }})`"
    )]
    Freed {
        /// The operation.
        op: &'static str,
    },
    /// A value that backward needs was modified in place after it was saved.
    #[error(
        "{op}: {value} was modified in place after it was saved for backward (version {now}, saved at {saved})"
    )]
    Modified {
        /// The operation that saved it.
        op: &'static str,
        /// Which of its inputs or outputs.
        value: String,
        /// The version when it was saved.
        saved: u64,
        /// The version found.
        now: u64,
    },
    /// A gradient does not fit the value it belongs to.
    #[error("{op}: got a gradient of {got}, wanted {wanted}")]
    Gradient {
        /// The operation.
        op: &'static str,
        /// Shape, dtype and device that came.
        got: String,
        /// Those of the value.
        wanted: String,
    },
    /// An operation without a derivative was recorded.
    #[error("{op}: has no derivative, but an input requires a gradient; use `detach` or `no_grad`")]
    NotDifferentiable {
        /// The operation.
        op: &'static str,
    },
    /// A backward function panicked.
    #[error("{op}: panicked in backward: {message}")]
    Panicked {
        /// The operation.
        op: &'static str,
        /// The panic's message.
        message: String,
    },
    /// A backward function failed.
    #[error("backward of {op}: {source}")]
    InBackward {
        /// The operation.
        op: &'static str,
        /// What it said.
        #[source]
        source: Box<Error>,
    },
    /// Anomaly mode found a NaN.
    #[error("{op}: its backward made a NaN; it was recorded at\n{recorded}")]
    Nan {
        /// The operation.
        op: &'static str,
        /// Where the forward pass recorded it.
        recorded: String,
    },
    /// A gradient differs from the central difference.
    #[error(
        "{op}: element {element} of the gradient of input {input}: backward {analytic}, numerically {numeric}"
    )]
    GradCheck {
        /// `gradcheck`, or `gradgradcheck`, whose inputs end with the gradients of the function's outputs.
        op: &'static str,
        /// The input, from 0.
        input: usize,
        /// Its element, in row-major order.
        element: usize,
        /// The central difference.
        numeric: f64,
        /// What backward computed.
        analytic: f64,
    },
    /// A hook or a custom function refused.
    #[error("{0}")]
    Custom(String),
}

impl Error {
    /// A saved value that was modified.
    #[cold]
    pub(crate) fn modified(op: &'static str, value: String, saved: u64, now: u64) -> Error {
        Error::Modified { op, value, saved, now }
    }
}

/// The message, so that a program that ends with an error shows it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
