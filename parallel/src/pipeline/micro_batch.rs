//! [`Cell`]: a micro-batch at a stage; [`MicroBatch`]: which part of the mini-batch this thread computes, for layers that
//! need to know it.

use std::cell;
use std::marker::PhantomData;

/// One micro-batch at one stage: what a pipeline computes as a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cell {
    /// The micro-batch, from 0.
    pub micro_batch: usize,
    /// The stage, from 0.
    pub stage: usize,
}

/// A micro-batch among those of its mini-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// From 0.
    pub index: usize,
    /// Micro-batches of this mini-batch, which may be fewer than were asked for.
    pub count: usize,
}

impl MicroBatch {
    /// A batch that is not split.
    pub const WHOLE: MicroBatch = MicroBatch { index: 0, count: 1 };

    /// The micro-batch that this thread computes: that of the innermost [`MicroBatch::enter`], else [`MicroBatch::WHOLE`].
    pub fn current() -> MicroBatch {
        CURRENT.get()
    }

    /// Until the guard is dropped, this is the micro-batch that the thread computes. Code that splits batches calls it around
    /// each forward pass.
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
    static CURRENT: cell::Cell<MicroBatch> = const { cell::Cell::new(MicroBatch::WHOLE) };
}

/// When it is dropped, [`MicroBatch::current`] is again what it was before.
#[must_use = "the micro-batch before is current again when the guard is dropped"]
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
