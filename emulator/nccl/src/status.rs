//! Statuses, and how the end of a call is told.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{self, AssertUnwindSafe};

use phalanx_emulator_link::handle::Unknown;

/// An `ncclResult_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub i32);

impl Status {
    pub(crate) const UNHANDLED_CUDA_ERROR: Status = Status(1);
    pub(crate) const SYSTEM_ERROR: Status = Status(2);
    pub(crate) const INVALID_ARGUMENT: Status = Status(4);
    pub(crate) const INVALID_USAGE: Status = Status(5);
    pub(crate) const REMOTE_ERROR: Status = Status(6);
    pub(crate) const IN_PROGRESS: Status = Status(7);
    pub(crate) const TIMEOUT: Status = Status(8);
    pub(crate) const INTERNAL_ERROR: Status = Status(3);

    pub(crate) fn because(self, message: impl Into<String>) -> Failure {
        Failure { status: self, message: message.into() }
    }
}

/// Why something did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub status: Status,
    pub message: String,
}

impl From<Unknown> for Failure {
    fn from(unknown: Unknown) -> Failure {
        Status::INVALID_ARGUMENT.because(format!("{:#x} is no living {}", unknown.handle, unknown.kind))
    }
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// An error if a pointer that must not be null is.
pub(crate) fn present<T>(value: Option<T>, name: &str) -> Result<T> {
    value.ok_or_else(|| Status::INVALID_ARGUMENT.because(format!("{name} is null")))
}

/// Exports functions whose bodies give `Result<()>`.
macro_rules! export {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        phalanx_emulator_link::export! {
            $(fn $name($($arg: $type),*) -> i32 { crate::status::answer(stringify!($name), || $body) })*
        }
    };
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Why the last call of this thread failed; valid until its next failure, as NCCL's is.
pub(crate) fn last() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

/// Runs a call and gives its status; a failure's reason goes to stderr.
pub(crate) fn answer(name: &str, body: impl FnOnce() -> Result<()>) -> i32 {
    // A panic is a mistake of the emulator's own, and must not take the program down.
    let bug = |_| Err(Status::INTERNAL_ERROR.because("a bug of the emulator: it panicked, see above"));
    match panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(bug) {
        Ok(()) => 0,
        Err(Failure { status, message }) => {
            if status != Status::IN_PROGRESS {
                eprintln!("phalanx emulated NCCL: {name}: {message}");
                LAST.set(CString::new(message.replace('\0', " ")).unwrap_or_default());
            }
            status.0
        }
    }
}

/// What a status means, in words.
pub(crate) fn text(status: i32) -> &'static std::ffi::CStr {
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
