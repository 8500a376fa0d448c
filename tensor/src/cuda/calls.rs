//! [`calls`]: how often a thread has waited for GPUs and asked for memory, so that a test can say that a step does neither.

use std::cell::Cell;

/// What a thread has asked of the driver so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Waits for a GPU's work.
    pub waits: u64,
    /// Pieces of a GPU's memory, and of the host's that was pinned.
    pub allocations: u64,
}

thread_local! {
    static CALLS: Cell<Calls> = const { Cell::new(Calls { waits: 0, allocations: 0 }) };
}

/// The calls of this thread.
pub fn calls() -> Calls {
    CALLS.get()
}

pub(super) fn count_wait() {
    let calls = CALLS.get();
    CALLS.set(Calls { waits: calls.waits + 1, ..calls });
}

pub(super) fn count_allocation() {
    let calls = CALLS.get();
    CALLS.set(Calls { allocations: calls.allocations + 1, ..calls });
}
