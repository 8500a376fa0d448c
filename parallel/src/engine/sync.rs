//! Locks and atomics: the standard library's, or loom's where its models explore the engine.

use std::time::Duration;

use crate::panics::unpoisoned;

#[cfg(feature = "loom")]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

/// How long a thread watches for work before it sleeps: waking it costs more than many an operation.
const WATCH: Duration = Duration::from_micros(100);

/// A lock's content. What operations do happens outside of the engine's locks, so no panic leaves one half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// The content of a lock that nobody else has.
pub(crate) fn get_mut<T>(mutex: &mut Mutex<T>) -> &mut T {
    unpoisoned(mutex.get_mut())
}

/// Sleeps until woken, or for no reason at all.
pub(crate) fn sleep<'a, T>(wake: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    unpoisoned(wake.wait(guard))
}

/// Asks again and again for a while, and lets other threads have the processor if they want it.
#[cfg(not(feature = "loom"))]
pub(crate) fn watch(done: impl Fn() -> bool) {
    for _ in 0..64 {
        if done() {
            return;
        }
        std::hint::spin_loop();
    }
    let start = std::time::Instant::now();
    while !done() && start.elapsed() < WATCH {
        std::thread::yield_now();
    }
}

/// A model sleeps at once: watching changes when things happen, not what.
#[cfg(feature = "loom")]
pub(crate) fn watch(_: impl Fn() -> bool) {
    let _ = WATCH;
}

/// A value with cache lines of its own, so that who writes it does not disturb who reads its neighbours.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);
