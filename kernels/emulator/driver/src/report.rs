//! What is said on stderr, and the texts that `cuGetErrorString` gives: the last one of each code.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{CString, c_char};
use std::io::Write;
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::status::{self, Failure};

/// Texts handed out are kept for ever, as C expects of them; equal ones are kept once.
#[derive(Default)]
struct Texts {
    last: HashMap<i32, String>,
    kept: HashSet<&'static std::ffi::CStr>,
}

thread_local! {
    /// The last reasons that came up on this thread: those of others matter only where it has none.
    static MINE: RefCell<HashMap<i32, String>> = RefCell::default();
}

static TEXTS: LazyLock<Mutex<Texts>> = LazyLock::new(Mutex::default);

/// Says something once on stderr.
pub(crate) fn say(message: &str) {
    // In one piece, so that nothing gets in between.
    let line = format!("phalanx emulated driver: {message}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Keeps the reason of a failure for `cuGetErrorString` and says it.
pub(crate) fn explain(place: &str, failure: &Failure) {
    if failure.message.is_empty() {
        return;
    }
    let text = format!("{place}: {}", failure.message);
    say(&text);
    MINE.with_borrow_mut(|mine| mine.insert(failure.status.0, text.clone()));
    TEXTS.lock().unwrap_or_else(PoisonError::into_inner).last.insert(failure.status.0, text);
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
