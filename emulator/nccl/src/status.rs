//! NCCL's statuses, the report of a failed call, and `ncclGetLastError`'s text.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use phalanx_emulator_link::pointer::c_text;
use phalanx_emulator_link::status::{self, StatusCode};

pub(crate) use phalanx_emulator_link::status::present;

/// An `ncclResult_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub i32);

impl Status {
    pub(crate) const UNHANDLED_CUDA_ERROR: Status = Status(1);
    pub(crate) const SYSTEM_ERROR: Status = Status(2);
    pub(crate) const INTERNAL_ERROR: Status = Status(3);
    pub(crate) const INVALID_ARGUMENT: Status = Status(4);
    pub(crate) const INVALID_USAGE: Status = Status(5);
    pub(crate) const REMOTE_ERROR: Status = Status(6);
    pub(crate) const IN_PROGRESS: Status = Status(7);
    pub(crate) const TIMEOUT: Status = Status(8);

    /// The status with the reason for it.
    pub(crate) fn because(self, message: impl Into<String>) -> Failure {
        Failure::new(self, message)
    }
}

impl StatusCode for Status {
    const INVALID_ARGUMENT: Status = Status::INVALID_ARGUMENT;
    const PANICKED: Status = Status::INTERNAL_ERROR;

    fn number(self) -> i32 {
        self.0
    }
}

pub(crate) type Failure = status::Failure<Status>;
pub(crate) type Result<T> = std::result::Result<T, Failure>;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Why the last call of this thread failed; valid until its next failure, as NCCL's is.
pub(crate) fn last() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

/// Makes a failure's reason this thread's last one.
pub(crate) fn remember(failure: &Failure) {
    if failure.status != Status::IN_PROGRESS {
        LAST.set(c_text(&failure.message));
    }
}

/// Runs the body of the exported function `name` and gives its status. A failure's reason goes to stderr and to
/// [`last`]; `ncclInProgress` is no failure.
pub(crate) fn answer(name: &str, body: impl FnOnce() -> Result<()>) -> i32 {
    status::answer(body, |failure| {
        if failure.status != Status::IN_PROGRESS {
            eprintln!("phalanx emulated NCCL: {name}: {}", failure.message);
            remember(failure);
        }
    })
}

/// What a status means, in words.
pub(crate) fn text(status: i32) -> &'static CStr {
    match status {
        0 => c"no error",
        1 => c"unhandled cuda error",
        2 => c"unhandled system error",
        3 => c"internal error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        8 => c"timeout",
        _ => c"unknown result code",
    }
}
