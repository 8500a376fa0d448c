//! Who uses a storage, in one word.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

/// Who uses a storage: the number of readers, or of readers that try and [`Users::WRITER`], in the lower half, and in
/// the upper half the sum of the tokens of the threads that took the guards. So it is told without any bookkeeping
/// whether all guards are a thread's own: of one guard for certain, of several up to a chance of 2^-32.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Users(pub(crate) u64);

impl Users {
    const WRITER: u32 = 1 << 31;

    #[inline]
    pub(crate) fn count(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(crate) fn has_writer(self) -> bool {
        self.count() & Users::WRITER != 0
    }

    /// What a reader adds.
    #[inline]
    pub(crate) fn reader(token: u32) -> u64 {
        u64::from(token) << 32 | 1
    }

    /// What a writer adds.
    pub(crate) fn writer(token: u32) -> u64 {
        u64::from(token) << 32 | u64::from(Users::WRITER)
    }

    /// Whether all guards were taken by the thread of this token.
    pub(crate) fn all_of(self, token: u32) -> bool {
        let guards = (self.count() & !Users::WRITER) + u32::from(self.has_writer());
        guards > 0 && (self.0 >> 32) as u32 == token.wrapping_mul(guards)
    }
}

/// This thread's token: no other thread's, and no simple sum of others'.
#[inline]
pub(crate) fn token() -> u32 {
    thread_local! {
        static TOKEN: Cell<u32> = const { Cell::new(0) };
    }
    #[cold]
    fn next() -> u32 {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        // A bijection that is far from linear (the finalizer of MurmurHash3).
        let mut x = NEXT.fetch_add(1, Ordering::Relaxed);
        x = (x ^ x >> 16).wrapping_mul(0x85eb_ca6b);
        x = (x ^ x >> 13).wrapping_mul(0xc2b2_ae35);
        x ^ x >> 16
    }
    if TOKEN.get() == 0 {
        TOKEN.set(next());
    }
    TOKEN.get()
}
