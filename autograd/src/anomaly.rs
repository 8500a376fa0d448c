//! Anomaly mode: finds the operation whose backward made the first NaN.

use std::backtrace::Backtrace;
use std::cell::Cell;

thread_local! {
    static DETECT: Cell<bool> = const { Cell::new(false) };
}

/// Until the guard is dropped, operations of this thread note where they were recorded, and a backward pass that
/// it starts ends with [`crate::Error::Nan`] at the first operation that makes a NaN. Slow; for debugging.
pub fn detect_anomaly() -> AnomalyGuard {
    set(true)
}

/// Ends anomaly mode.
#[must_use = "anomaly mode lasts until the guard is dropped"]
pub struct AnomalyGuard {
    before: bool,
    thread: std::marker::PhantomData<*const ()>,
}

impl Drop for AnomalyGuard {
    fn drop(&mut self) {
        DETECT.set(self.before);
    }
}

/// Whether this thread is in anomaly mode.
pub fn is_detecting_anomaly() -> bool {
    DETECT.get()
}

pub(crate) fn set(on: bool) -> AnomalyGuard {
    AnomalyGuard { before: DETECT.replace(on), thread: std::marker::PhantomData }
}

#[inline]
pub(crate) fn recorded_here() -> Option<Box<str>> {
    #[cold]
    fn here() -> Box<str> {
        Backtrace::force_capture().to_string().into_boxed_str()
    }
    is_detecting_anomaly().then(here)
}
