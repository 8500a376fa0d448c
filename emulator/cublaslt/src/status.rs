//! cuBLASLt's statuses, and the report of a failed call.

use std::ffi::CStr;

use phalanx_emulator_link::status::{self, StatusCode};

pub(crate) use phalanx_emulator_link::status::present;

/// A `cublasStatus_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub i32);

impl Status {
    pub(crate) const NOT_INITIALIZED: Status = Status(1);
    pub(crate) const INVALID_VALUE: Status = Status(7);
    pub(crate) const EXECUTION_FAILED: Status = Status(13);
    pub(crate) const INTERNAL_ERROR: Status = Status(14);
    pub(crate) const NOT_SUPPORTED: Status = Status(15);

    /// The status with the reason for it.
    pub(crate) fn because(self, message: impl Into<String>) -> Failure {
        Failure::new(self, message)
    }
}

impl StatusCode for Status {
    const INVALID_ARGUMENT: Status = Status::INVALID_VALUE;
    const PANICKED: Status = Status::INTERNAL_ERROR;

    fn number(self) -> i32 {
        self.0
    }
}

pub(crate) type Failure = status::Failure<Status>;
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Runs the body of the exported function `name` and gives its status; a failure's reason goes to stderr.
pub(crate) fn answer(name: &str, body: impl FnOnce() -> Result<()>) -> i32 {
    status::answer(body, |failure| eprintln!("phalanx emulated cuBLASLt: {name}: {}", failure.message))
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
