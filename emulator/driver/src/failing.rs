//! Allocations that fail because a test wants to see what its program does then.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::settings::settings;

/// Allocations until one fails; 0 if none is to.
static LEFT: LazyLock<AtomicU64> = LazyLock::new(|| AtomicU64::new(settings().fail_allocation));
/// Allocations since `choose` was called.
static MADE: AtomicU64 = AtomicU64::new(0);

/// An allocation is made, of a device or of page-locked memory: whether it is the one that fails.
pub(crate) fn fails() -> bool {
    MADE.fetch_add(1, Ordering::Relaxed);
    let fewer = |left: u64| left.checked_sub(1);
    LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer) == Ok(1)
}

/// The allocation of this number, counted from now on from 1, fails; none if it is 0. Gives the number of allocations since
/// the last call.
pub(crate) fn choose(number: u64) -> u64 {
    LEFT.store(number, Ordering::Relaxed);
    MADE.swap(0, Ordering::Relaxed)
}
