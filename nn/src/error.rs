//! What can go wrong in a module, an optimizer or a model's files.

use std::fmt;

/// The crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of an operation or of a backward pass.
    #[error(transparent)]
    Autograd(#[from] phalanx_autograd::Error),
    /// An argument or a setting is invalid.
    #[error("{what}: {why}")]
    Invalid {
        /// What was asked.
        what: String,
        /// The value that was got, and the one that was wanted.
        why: String,
    },
    /// Saved tensors do not fit the parameters.
    #[error("{what}: {problems}")]
    State {
        /// What was loaded.
        what: String,
        /// Everything that does not fit.
        problems: Mismatch,
    },
}

/// The differences between saved tensors and those of the model.
#[must_use = "it says what was not loaded; `let _ =` if that is as it should be"]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mismatch {
    /// Names that the module has and the saved state lacks.
    pub missing: Vec<String>,
    /// Names that the saved state has and the module lacks.
    pub unexpected: Vec<String>,
    /// Tensors of another shape: name, saved shape, shape in the model.
    pub misshaped: Vec<(String, Vec<usize>, Vec<usize>)>,
}

impl Mismatch {
    /// Whether everything fits.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.misshaped.is_empty()
    }

    /// Turns a mismatch into an error.
    ///
    /// # Errors
    /// If there is a mismatch.
    pub fn check(self, what: &str) -> Result<()> {
        if self.is_empty() { Ok(()) } else { Err(Error::State { what: what.into(), problems: self }) }
    }
}

/// Names that a message lists before it only counts.
const LISTED: usize = 8;

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shaped = |(name, got, wanted): &(String, Vec<usize>, Vec<usize>)| {
            format!("{name} (got {got:?}, wanted {wanted:?})")
        };
        let shapes: Vec<String> = self.misshaped.iter().map(shaped).collect();
        let kinds =
            [("missing", &self.missing), ("unexpected", &self.unexpected), ("of another shape", &shapes)];
        let parts = kinds.iter().filter(|(_, names)| !names.is_empty()).map(|(kind, names)| {
            let more = names.len().saturating_sub(LISTED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{kind}: {}{more}", names[..names.len().min(LISTED)].join(", "))
        });
        f.write_str(&parts.collect::<Vec<_>>().join("; "))
    }
}

impl Error {
    /// An [`Error::Invalid`].
    pub fn invalid(what: impl Into<String>, why: impl Into<String>) -> Error {
        Error::Invalid { what: what.into(), why: why.into() }
    }
}

impl From<phalanx_tensor::Error> for Error {
    fn from(error: phalanx_tensor::Error) -> Error {
        Error::Autograd(error.into())
    }
}

/// For code of this crate that runs inside a backward pass.
impl From<Error> for phalanx_autograd::Error {
    fn from(error: Error) -> phalanx_autograd::Error {
        match error {
            Error::Autograd(error) => error,
            other => phalanx_autograd::Error::Custom(other.to_string()),
        }
    }
}

/// Prints the message, so that a program whose `main` returns the error shows it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Refuses a number in a setting unless it `fits`.
pub(crate) fn check_setting(what: &str, name: &str, got: f64, fits: bool, wanted: &str) -> Result<()> {
    if fits {
        return Ok(());
    }
    Err(Error::invalid(what, format!("got {name} {got:?}, wanted {wanted}")))
}

/// Refuses a number that is not finite or below 0: an epsilon or a weight decay.
pub(crate) fn check_non_negative(what: &str, name: &str, got: f64) -> Result<()> {
    check_setting(what, name, got, got.is_finite() && got >= 0.0, "a finite number from 0 up")
}

/// Refuses a number outside of 0 to below 1: the decay of a running mean.
pub(crate) fn check_decay(what: &str, name: &str, got: f64) -> Result<()> {
    check_setting(what, name, got, (0.0..1.0).contains(&got), "0 or more and less than 1")
}

/// Refuses a number outside of 0 to 1: a probability or a share.
pub(crate) fn check_probability(what: &str, name: &str, got: f64) -> Result<()> {
    check_setting(what, name, got, (0.0..=1.0).contains(&got), "0 to 1")
}

/// A module's name in errors: its kind, and its path unless it is the whole model.
pub(crate) fn label(kind: &str, path: &str) -> String {
    if path.is_empty() { kind.into() } else { format!("{kind} `{path}`") }
}
