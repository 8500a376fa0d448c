//! [`caught`]: errors and panics as text that names the place.

use std::any::Any;
use std::cell::RefCell;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Where this thread panicked last.
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// What `f` returns, its error or panic as text.
pub(crate) fn caught<T, E: Display>(f: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PLACE.set(info.location().map(ToString::to_string));
            before(info);
        }));
    });
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(outcome) => outcome.map_err(|e| e.to_string()),
        Err(panic) => Err(format!("panicked at {}: {}", place(), message(panic.as_ref()))),
    }
}

fn place() -> String {
    PLACE.take().unwrap_or_else(|| "an unknown place".into())
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a payload that is no text".into())
}
