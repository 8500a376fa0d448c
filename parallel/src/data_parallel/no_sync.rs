//! [`NoSync`]: while it lives, backward passes only accumulate.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Whether backward passes synchronise: while no [`NoSync`] of it lives.
#[derive(Clone, Default)]
pub(crate) struct Synchronise(Arc<AtomicUsize>);

impl Synchronise {
    pub(crate) fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    /// Not while the result lives.
    pub(crate) fn off(&self) -> NoSync {
        self.0.fetch_add(1, Ordering::Relaxed);
        NoSync(self.clone())
    }
}

/// See [`Ddp::no_sync`](super::Ddp::no_sync). Several may live at a time, and end in any order.
#[must_use = "gradients are added again when it is dropped"]
pub struct NoSync(Synchronise);

impl Drop for NoSync {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_synchronise_when_the_last_one_has_ended() {
        let synchronise = Synchronise::default();
        let (first, second) = (synchronise.off(), synchronise.off());
        drop(first);
        assert!(!synchronise.is_on());
        drop(second);
        assert!(synchronise.is_on());
    }
}
