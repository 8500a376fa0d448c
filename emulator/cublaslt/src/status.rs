//! Statuses, and how the end of a call is told.

use std::ffi::CStr;
use std::panic::{self, AssertUnwindSafe};

use phalanx_emulator_link::handle::Unknown;

/// A `cublasStatus_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub i32);

impl Status {
    pub(crate) const NOT_INITIALIZED: Status = Status(1);
    pub(crate) const INVALID_VALUE: Status = Status(7);
    pub(crate) const EXECUTION_FAILED: Status = Status(13);
    pub(crate) const NOT_SUPPORTED: Status = Status(15);
    pub(crate) const INTERNAL_ERROR: Status = Status(14);

    pub(crate) fn because(self, message: impl Into<String>) -> Failure {
        Failure { status: self, message: message.into() }
    }
}

/// Why a call did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub status: Status,
    pub message: String,
}

impl From<Unknown> for Failure {
    fn from(unknown: Unknown) -> Failure {
        Status::INVALID_VALUE.because(format!("{:#x} is no living {}", unknown.handle, unknown.kind))
    }
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// An error if a pointer that must not be null is.
pub(crate) fn present<T>(value: Option<T>, name: &str) -> Result<T> {
    value.ok_or_else(|| Status::INVALID_VALUE.because(format!("{name} is null")))
}

/// Exports functions whose bodies give `Result<()>`.
macro_rules! export {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        phalanx_emulator_link::export! {
            $(fn $name($($arg: $type),*) -> i32 { crate::status::answer(stringify!($name), || $body) })*
        }
    };
}

/// Runs a call and gives its status; a failure's reason goes to stderr.
pub(crate) fn answer(name: &str, body: impl FnOnce() -> Result<()>) -> i32 {
    // A panic is a mistake of the emulator's own, and must not take the program down.
    let bug = |_| Err(Status::INTERNAL_ERROR.because("a bug of the emulator: it panicked, see above"));
    match panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(bug) {
        Ok(()) => 0,
        Err(Failure { status, message }) => {
            eprintln!("phalanx emulated cuBLASLt: {name}: {message}");
            status.0
        }
    }
}

/// A status's name in C.
pub(crate) fn name(status: i32) -> &'static CStr {
    match status {
        0 => c"CUBLAS_STATUS_SUCCESS",
        1 => c"CUBLAS_STATUS_NOT_INITIALIZED",
        3 => c"CUBLAS_STATUS_ALLOC_FAILED",
        7 => c"CUBLAS_STATUS_INVALID_VALUE",
        8 => c"CUBLAS_STATUS_ARCH_MISMATCH",
        11 => c"CUBLAS_STATUS_MAPPING_ERROR",
        13 => c"CUBLAS_STATUS_EXECUTION_FAILED",
        14 => c"CUBLAS_STATUS_INTERNAL_ERROR",
        15 => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"an unknown status",
    }
}
