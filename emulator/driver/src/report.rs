//! What is said on stderr, and the texts that `cuGetErrorString` gives: the last one of each code.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{CString, c_char};
use std::io::Write;
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::status::{self, Failure, Status};

/// Texts handed out are kept for ever, as C expects of them; equal ones are kept once.
#[derive(Default)]
struct Texts {
    last: HashMap<i32, String>,
    kept: HashSet<&'static std::ffi::CStr>,
}

thread_local! {
    /// The last reasons that this thread has heard of: those of others matter only where it has none.
    static MINE: RefCell<HashMap<i32, String>> = RefCell::default();
}

static TEXTS: LazyLock<Mutex<Texts>> = LazyLock::new(Mutex::default);

/// Says something once on stderr.
pub(crate) fn say(message: &str) {
    // In one piece, so that nothing gets in between.
    let line = format!("phalanx emulated driver: {message}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Says the reason of a failure, keeps it for `cuGetErrorString` and returns it; empty if there is none.
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
    TEXTS.lock().unwrap_or_else(PoisonError::into_inner).last.insert(status.0, reason.into());
}

/// The name of a code.
pub(crate) fn name(code: i32) -> Option<*const c_char> {
    status::describe(code).map(|(name, _)| kept(name))
}

/// The text of a code with the reason of the last failure that had it, of this thread if it had any.
pub(crate) fn text(code: i32) -> Option<*const c_char> {
    let (_, text) = status::describe(code)?;
    let mine = MINE.with_borrow(|mine| mine.get(&code).cloned());
    let last = mine.or_else(|| TEXTS.lock().unwrap_or_else(PoisonError::into_inner).last.get(&code).cloned());
    Some(kept(&last.map_or(text.to_string(), |reason| format!("{text}: {reason}"))))
}

/// A C text that stays valid.
pub(crate) fn kept(text: &str) -> *const c_char {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kept) = texts.kept.get(text.as_c_str()) {
        return kept.as_ptr();
    }
    let leaked: &'static CString = Box::leak(Box::new(text));
    texts.kept.insert(leaked);
    leaked.as_ptr()
}
