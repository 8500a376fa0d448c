//! [`catch_panic`]: a panic as an error, with its place. Ranks, actions of pipelines and GPipe's workers run inside it, so that the
//! other ranks get the cause.

use phalanx_tensor::panic_message;

use std::any::Any;
use std::cell::RefCell;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Where this thread panicked last.
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `f`. Returns its error as text, or its panic as text that names the line.
pub(crate) fn catch_panic<T, E: Display>(f: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
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
        Err(panic) => {
            let place = PLACE.take().unwrap_or_else(|| "an unknown place".into());
            Err(format!("panicked at {place}: {}", panic_text(panic.as_ref())))
        }
    }
}

/// The text that a panic was raised with.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic_message(panic).unwrap_or("a payload that is no text").to_string()
}
