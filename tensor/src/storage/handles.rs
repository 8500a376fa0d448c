//! [`Handles`]: how many there are of a storage.

use crate::sync::{AtomicUsize, Ordering, fence};

/// How many handles there are. 2^64 would not fit into memory, and to leak as many takes centuries.
pub(super) struct Handles(AtomicUsize);

impl Handles {
    pub(super) fn one() -> Handles {
        Handles(AtomicUsize::new(1))
    }

    /// Whether there is but one. Whoever has it then has seen all that was done by way of the others.
    #[inline]
    pub(super) fn is_sole(&self) -> bool {
        self.0.load(Ordering::Acquire) == 1
    }

    /// For a clone of one that is there.
    #[inline]
    pub(super) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether it was the last. Then all that was done by way of the others has been seen.
    #[inline]
    pub(super) fn remove(&self) -> bool {
        let last = self.is_sole() || self.0.fetch_sub(1, Ordering::Release) == 1;
        if last {
            fence(Ordering::Acquire);
        }
        last
    }
}
