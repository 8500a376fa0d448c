//! Sequence numbers: the order in which operations were recorded, which backward follows in reverse and which fixes
//! the order of sums.
//!
//! A checkpoint's operations are recorded when they are recomputed, long after what came behind them. They get the
//! numbers that they would have had without the checkpoint, from a range that its forward pass has reserved.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

static NEXT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Numbers reserved for what this thread records now; empty if none are.
    static RESERVED: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    /// Nodes that this thread has made, or would have made if it had recorded.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The next sequence number, and a number that no other node has: the same but for recomputed nodes.
pub(crate) fn next_sequence() -> (u64, u64) {
    pass_over();
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let (next, end) = RESERVED.get();
    if next < end {
        RESERVED.set((next + 1, end));
        return (next, id);
    }
    (id, id)
}

/// Counts an operation that was not recorded.
pub(crate) fn pass_over() {
    COUNT.set(COUNT.get() + 1);
}

/// Nodes made or passed over so far.
pub(crate) fn count() -> u64 {
    COUNT.get()
}

/// Takes `count` numbers at once, from those reserved on this thread if there are any.
pub(crate) fn reserve(count: u64) -> Range<u64> {
    let (next, end) = RESERVED.get();
    if count <= end - next {
        RESERVED.set((next + count, end));
        return next..next + count;
    }
    let start = NEXT.fetch_add(count, Ordering::Relaxed);
    start..start + count
}

/// Lets this thread use reserved numbers until the guard is dropped.
pub(crate) fn use_reserved(range: &Range<u64>) -> ReservedGuard {
    ReservedGuard { before: RESERVED.replace((range.start, range.end)) }
}

/// Ends the effect of [`use_reserved`].
pub(crate) struct ReservedGuard {
    before: (u64, u64),
}

impl Drop for ReservedGuard {
    fn drop(&mut self) {
        RESERVED.set(self.before);
    }
}
