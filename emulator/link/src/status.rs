//! How a call of an emulated library ends: with a status of the library's C interface and, if it failed, a reason in
//! words.
//!
//! Each library has its own type of statuses, which implements [`StatusCode`]. What all libraries do with a status is
//! here.

use std::panic::{self, AssertUnwindSafe};

use crate::handle::Unknown;

/// A status of one library's C interface other than success.
pub trait StatusCode: Copy {
    /// The status of a call that got a null pointer or a wrong argument.
    const INVALID_ARGUMENT: Self;
    /// The status of a call in which the emulator panicked.
    const PANICKED: Self;

    /// The status as C has it.
    fn number(self) -> i32;

    /// The failure of a call that got a number which is no living object's handle.
    fn unknown_handle(unknown: Unknown) -> Failure<Self> {
        Failure::new(Self::INVALID_ARGUMENT, format!("{:#x} is no living {}", unknown.handle, unknown.kind))
    }
}

/// Why a call or an operation did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure<S> {
    /// What C gets.
    pub status: S,
    /// The reason, in words; empty if the status says enough.
    pub message: String,
}

impl<S> Failure<S> {
    /// A status with the reason for it.
    pub fn new(status: S, message: impl Into<String>) -> Failure<S> {
        Failure { status, message: message.into() }
    }
}

impl<S: StatusCode> From<S> for Failure<S> {
    fn from(status: S) -> Failure<S> {
        Failure::new(status, "")
    }
}

impl<S: StatusCode> From<Unknown> for Failure<S> {
    fn from(unknown: Unknown) -> Failure<S> {
        S::unknown_handle(unknown)
    }
}

/// The value, or the error of an argument that must not be null and is.
///
/// # Errors
/// There is no value.
pub fn present<T, S: StatusCode>(value: Option<T>, name: &str) -> Result<T, Failure<S>> {
    value.ok_or_else(|| Failure::new(S::INVALID_ARGUMENT, format!("{name} is null")))
}

/// Runs code of the emulator. A panic in it is a bug of the emulator, and must not end the program.
///
/// # Errors
/// Those of `body`, or that it panicked.
pub fn caught<T, S: StatusCode>(body: impl FnOnce() -> Result<T, Failure<S>>) -> Result<T, Failure<S>> {
    let bug = |_| Err(Failure::new(S::PANICKED, "a bug of the emulator: it panicked, see above"));
    panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(bug)
}

/// Runs the body of an exported function and gives the status that C gets: 0, or that of the failure, which `report`
/// is shown first.
pub fn answer<S: StatusCode>(
    body: impl FnOnce() -> Result<(), Failure<S>>,
    report: impl FnOnce(&Failure<S>),
) -> i32 {
    match caught(body) {
        Ok(()) => 0,
        Err(failure) => {
            report(&failure);
            failure.status.number()
        }
    }
}
