//! [`MicroBatch`]: which part of the mini-batch this thread computes, for layers to which that matters.

use std::cell::Cell;
use std::marker::PhantomData;

/// A micro-batch among those of its mini-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// From 0.
    pub index: usize,
    /// Micro-batches of this mini-batch, which may be fewer than were asked for.
    pub count: usize,
}

impl MicroBatch {
    /// A batch that is not cut.
    pub const WHOLE: MicroBatch = MicroBatch { index: 0, count: 1 };

    /// The one that this thread computes; [`MicroBatch::WHOLE`] if nobody said otherwise.
    pub fn current() -> MicroBatch {
        CURRENT.get()
    }

    /// Says until the guard is dropped that this thread computes this one. Whoever cuts batches does so around each
    /// forward pass.
    ///
    /// ```
    /// use phalanx_parallel::pipeline::MicroBatch;
    /// let second = MicroBatch { index: 1, count: 4 };
    /// let guard = second.enter();
    /// assert_eq!(MicroBatch::current(), second);
    /// drop(guard);
    /// assert_eq!(MicroBatch::current(), MicroBatch::WHOLE);
    /// ```
    pub fn enter(self) -> MicroBatchGuard {
        MicroBatchGuard { before: CURRENT.replace(self), thread: PhantomData }
    }
}

thread_local! {
    static CURRENT: Cell<MicroBatch> = const { Cell::new(MicroBatch::WHOLE) };
}

/// Restores what was said before.
#[must_use = "what was said before is restored when the guard is dropped"]
#[derive(Debug)]
pub struct MicroBatchGuard {
    before: MicroBatch,
    thread: PhantomData<*const ()>,
}

impl Drop for MicroBatchGuard {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}
