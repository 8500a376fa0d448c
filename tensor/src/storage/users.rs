//! [`Users`]: who uses a storage, in one word. [`InUse`]: how they come and go.

use std::cell::Cell;
use std::sync::atomic::AtomicU32;

use crate::sync::{AtomicU64, Ordering};

/// Who uses a storage: the number of readers, or of readers that try and [`Users::WRITER`], in the lower half, and in
/// the upper half the sum of the tokens of the threads that took the guards. So it is told without any bookkeeping
/// whether all guards are a thread's own: of one guard for certain, of several up to a chance of 2^-32.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Users(u64);

impl Users {
    const WRITER: u32 = 1 << 31;

    #[inline]
    pub(super) fn count(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(super) fn has_writer(self) -> bool {
        self.count() & Users::WRITER != 0
    }

    /// What a reader adds.
    #[inline]
    pub(super) fn reader(token: u32) -> u64 {
        u64::from(token) << 32 | 1
    }

    /// What a writer adds.
    pub(super) fn writer(token: u32) -> u64 {
        u64::from(token) << 32 | u64::from(Users::WRITER)
    }

    /// What they are with a further reader, if there is no writer.
    pub(super) fn and_reader(self, token: u32) -> Option<u64> {
        (!self.has_writer()).then(|| self.0.wrapping_add(Users::reader(token)))
    }

    /// What they are with a writer, if there is nobody.
    pub(super) fn and_writer(self, token: u32) -> Option<u64> {
        (self.count() == 0).then(|| Users::writer(token))
    }

    /// Whether all guards were taken by the thread of this token.
    pub(super) fn all_of(self, token: u32) -> bool {
        let guards = (self.count() & !Users::WRITER) + u32::from(self.has_writer());
        guards > 0 && (self.0 >> 32) as u32 == token.wrapping_mul(guards)
    }
}

/// The [`Users`] of a storage at the moment: any number of readers, or one writer. Whoever has entered sees what those did
/// that have left and could not be there at the same time.
#[derive(Default)]
pub(super) struct InUse(AtomicU64);

impl InUse {
    #[inline]
    pub(super) fn now(&self) -> Users {
        Users(self.0.load(Ordering::Relaxed))
    }

    /// Counts a reader, if there is no writer.
    #[inline]
    pub(super) fn enter_reader(&self, token: u32) -> bool {
        let alone = !Users(self.0.fetch_add(Users::reader(token), Ordering::Acquire)).has_writer();
        if !alone {
            self.0.fetch_sub(Users::reader(token), Ordering::Relaxed);
        }
        alone
    }

    /// Goes from a state that `admit` accepts to the one that it returns, if it is in one.
    #[inline]
    pub(super) fn enter(&self, admit: &impl Fn(Users) -> Option<u64>) -> bool {
        let admit = |users| admit(Users(users));
        self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, admit).is_ok()
    }

    /// Takes away what somebody has added.
    #[inline]
    pub(super) fn leave(&self, added: u64) {
        self.0.fetch_sub(added, Ordering::Release);
    }
}

/// This thread's token: no other thread's, and no simple sum of others'.
#[inline]
pub(super) fn token() -> u32 {
    thread_local! {
        static TOKEN: Cell<u32> = const { Cell::new(0) };
    }
    #[cold]
    fn next() -> u32 {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        // A bijection that is far from linear (the finalizer of MurmurHash3).
        let mut x = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        x = (x ^ x >> 16).wrapping_mul(0x85eb_ca6b);
        x = (x ^ x >> 13).wrapping_mul(0xc2b2_ae35);
        x ^ x >> 16
    }
    if TOKEN.get() == 0 {
        TOKEN.set(next());
    }
    TOKEN.get()
}
