//! The driver's status codes, and the reasons of failures: each goes to stderr, and `cuGetErrorString` gives the last
//! one of each code.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char};
use std::io::Write;
use std::sync::{LazyLock, Mutex};

use phalanx_emulator_link::handle::Unknown;
use phalanx_emulator_link::lock;
use phalanx_emulator_link::pointer::c_text;
use phalanx_emulator_link::status::{self, StatusCode};
use phalanx_ptx::{Fault, FaultKind};

pub(crate) use phalanx_emulator_link::status::{caught, present};

/// A `CUresult` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Status(pub i32);

macro_rules! statuses {
    ($($short:ident = $code:literal $name:ident $text:literal,)*) => {
        impl Status {
            $(pub(crate) const $short: Status = Status($code);)*
        }

        /// The C name and the text of a code.
        pub(crate) fn describe(code: i32) -> Option<(&'static str, &'static str)> {
            match code {
                0 => Some(("CUDA_SUCCESS", "no error")),
                $($code => Some((stringify!($name), $text)),)*
                _ => None,
            }
        }
    };
}

statuses! {
    INVALID_VALUE = 1 CUDA_ERROR_INVALID_VALUE "invalid argument",
    OUT_OF_MEMORY = 2 CUDA_ERROR_OUT_OF_MEMORY "out of memory",
    NOT_INITIALIZED = 3 CUDA_ERROR_NOT_INITIALIZED "initialization error",
    INVALID_DEVICE = 101 CUDA_ERROR_INVALID_DEVICE "invalid device ordinal",
    INVALID_IMAGE = 200 CUDA_ERROR_INVALID_IMAGE "device kernel image is invalid",
    INVALID_CONTEXT = 201 CUDA_ERROR_INVALID_CONTEXT "invalid device context",
    NO_BINARY_FOR_GPU = 209 CUDA_ERROR_NO_BINARY_FOR_GPU "no kernel image is available for execution on the device",
    INVALID_PTX = 218 CUDA_ERROR_INVALID_PTX "a PTX JIT compilation failed",
    FILE_NOT_FOUND = 301 CUDA_ERROR_FILE_NOT_FOUND "file not found",
    INVALID_HANDLE = 400 CUDA_ERROR_INVALID_HANDLE "invalid resource handle",
    ILLEGAL_STATE = 401 CUDA_ERROR_ILLEGAL_STATE "the operation cannot be performed in the present state",
    NOT_FOUND = 500 CUDA_ERROR_NOT_FOUND "named symbol not found",
    NOT_READY = 600 CUDA_ERROR_NOT_READY "device not ready",
    ILLEGAL_ADDRESS = 700 CUDA_ERROR_ILLEGAL_ADDRESS "an illegal memory access was encountered",
    LAUNCH_OUT_OF_RESOURCES = 701 CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES "too many resources requested for launch",
    LAUNCH_TIMEOUT = 702 CUDA_ERROR_LAUNCH_TIMEOUT "the launch timed out and was terminated",
    PEER_ACCESS_ALREADY_ENABLED = 704 CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED "peer access is already enabled",
    PEER_ACCESS_NOT_ENABLED = 705 CUDA_ERROR_PEER_ACCESS_NOT_ENABLED "peer access has not been enabled",
    ASSERT = 710 CUDA_ERROR_ASSERT "device-side assert triggered",
    HOST_MEMORY_ALREADY_REGISTERED = 712 CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        "part or all of the requested memory range is already mapped",
    HOST_MEMORY_NOT_REGISTERED = 713 CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
        "pointer does not correspond to a registered memory region",
    ILLEGAL_INSTRUCTION = 715 CUDA_ERROR_ILLEGAL_INSTRUCTION "an illegal instruction was encountered",
    MISALIGNED_ADDRESS = 716 CUDA_ERROR_MISALIGNED_ADDRESS "misaligned address",
    INVALID_PC = 718 CUDA_ERROR_INVALID_PC "invalid program counter",
    LAUNCH_FAILED = 719 CUDA_ERROR_LAUNCH_FAILED "unspecified launch failure",
    COOPERATIVE_LAUNCH_TOO_LARGE = 720 CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
        "too many blocks in cooperative launch",
    NOT_PERMITTED = 800 CUDA_ERROR_NOT_PERMITTED "operation not permitted",
    NOT_SUPPORTED = 801 CUDA_ERROR_NOT_SUPPORTED "operation not supported",
    CAPTURE_UNSUPPORTED = 900 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED "operation not permitted when stream is capturing",
    CAPTURE_INVALIDATED = 901 CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        "operation failed due to a previous error during capture",
    CAPTURE_MERGE = 902 CUDA_ERROR_STREAM_CAPTURE_MERGE "operation would result in a merge of separate capture sequences",
    CAPTURE_UNMATCHED = 903 CUDA_ERROR_STREAM_CAPTURE_UNMATCHED "capture was not ended in the same stream as it began",
    CAPTURE_UNJOINED = 904 CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        "capturing stream has unjoined work",
    CAPTURE_ISOLATION = 905 CUDA_ERROR_STREAM_CAPTURE_ISOLATION
        "dependency created on uncaptured work in another stream",
    CAPTURE_IMPLICIT = 906 CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        "operation would make the legacy stream depend on a capturing blocking stream",
    CAPTURED_EVENT = 907 CUDA_ERROR_CAPTURED_EVENT "operation not permitted on an event last recorded in a capturing stream",
    CAPTURE_WRONG_THREAD = 908 CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
        "attempt to terminate a thread-local capture sequence from another thread",
    GRAPH_UPDATE_FAILURE = 910 CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
        "the graph update was not performed because it included changes which violated constraints",
    INVALID_CLUSTER_SIZE = 912 CUDA_ERROR_INVALID_CLUSTER_SIZE "invalid cluster size",
    UNKNOWN = 999 CUDA_ERROR_UNKNOWN "unknown error",
}

pub(crate) type Failure = status::Failure<Status>;
pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Status {
    /// The status with the reason for it.
    pub(crate) fn because(self, message: impl Into<String>) -> Failure {
        Failure::new(self, message)
    }
}

impl StatusCode for Status {
    const INVALID_ARGUMENT: Status = Status::INVALID_VALUE;
    const PANICKED: Status = Status::UNKNOWN;

    fn number(self) -> i32 {
        self.0
    }

    fn unknown_handle(unknown: Unknown) -> Failure {
        let why = if unknown.was_destroyed { "was destroyed" } else { "is none" };
        Status::INVALID_HANDLE.because(format!("the {} handle {:#x} {why}", unknown.kind, unknown.handle))
    }
}

/// A kernel's fault as the driver reports it, behind the name of the operation, which says which kernel.
pub(crate) fn failure(fault: &Fault) -> Failure {
    let status = match fault.kind {
        FaultKind::OutOfBounds | FaultKind::InvalidFree => Status::ILLEGAL_ADDRESS,
        FaultKind::Misaligned => Status::MISALIGNED_ADDRESS,
        FaultKind::Assert => Status::ASSERT,
        FaultKind::Deadlock | FaultKind::Endless => Status::LAUNCH_TIMEOUT,
        FaultKind::InvalidCall => Status::INVALID_PC,
        FaultKind::Unsupported => Status::ILLEGAL_INSTRUCTION,
        FaultKind::BadLaunch => Status::INVALID_VALUE,
        _ => Status::LAUNCH_FAILED,
    };
    status.because(Fault { kernel: String::new(), ..fault.clone() }.to_string())
}

/// Texts handed out are kept for ever, as C expects of them; equal ones are kept once.
#[derive(Default)]
struct Texts {
    last: HashMap<i32, String>,
    kept: HashSet<&'static CStr>,
}

thread_local! {
    /// The last reasons of failures on this thread; those of other threads serve where it has none.
    static MINE: RefCell<HashMap<i32, String>> = RefCell::default();
}

static TEXTS: LazyLock<Mutex<Texts>> = LazyLock::new(Mutex::default);

/// Writes a line to stderr.
pub(crate) fn say(message: &str) {
    // In one piece, so that nothing gets in between.
    let line = format!("phalanx emulated driver: {message}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Writes the reason of a failure to stderr, keeps it for `cuGetErrorString` and returns it; empty if there is none.
pub(crate) fn explain(place: &str, failure: &Failure) -> String {
    if failure.message.is_empty() {
        return String::new();
    }
    let text = format!("{place}: {}", failure.message);
    say(&text);
    keep(failure.status, &text);
    text
}

/// Keeps a reason for `cuGetErrorString`: this thread was given the failure's status.
pub(crate) fn keep(status: Status, reason: &str) {
    if reason.is_empty() {
        return;
    }
    MINE.with_borrow_mut(|mine| mine.insert(status.0, reason.into()));
    lock(&TEXTS).last.insert(status.0, reason.into());
}

/// The name of a code.
pub(crate) fn name(code: i32) -> Option<*const c_char> {
    describe(code).map(|(name, _)| kept(name))
}

/// The text of a code with the reason of the last failure that had it, of this thread if it had any.
pub(crate) fn text(code: i32) -> Option<*const c_char> {
    let (_, text) = describe(code)?;
    let mine = MINE.with_borrow(|mine| mine.get(&code).cloned());
    let last = mine.or_else(|| lock(&TEXTS).last.get(&code).cloned());
    Some(kept(&last.map_or(text.to_string(), |reason| format!("{text}: {reason}"))))
}

/// A C text that stays valid.
pub(crate) fn kept(text: &str) -> *const c_char {
    let text = c_text(text);
    let mut texts = lock(&TEXTS);
    if let Some(kept) = texts.kept.get(text.as_c_str()) {
        return kept.as_ptr();
    }
    let leaked: &'static CStr = Box::leak(text.into_boxed_c_str());
    texts.kept.insert(leaked);
    leaked.as_ptr()
}
