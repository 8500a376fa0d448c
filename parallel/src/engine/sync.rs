//! Locks and atomics: the standard library's, or loom's where its models explore the engine.

use phalanx_tensor::unpoisoned;

use std::time::Duration;

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

/// How long a thread spins before it sleeps: waking it costs more than most operations take.
const SPIN_MAX: Duration = Duration::from_micros(100);

/// Locks a mutex. Operations run outside the engine's locks, so a panic leaves no content half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// The content of a lock that the caller owns.
pub(crate) fn get_mut<T>(mutex: &mut Mutex<T>) -> &mut T {
    unpoisoned(mutex.get_mut())
}

/// Sleeps until woken; may also return without a reason.
pub(crate) fn sleep<'a, T>(wake: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    unpoisoned(wake.wait(guard))
}

/// Spins until `done`, for a while at most; after the first rounds it yields the processor.
#[cfg(not(feature = "loom"))]
pub(crate) fn spin_until(done: impl Fn() -> bool) {
    for _ in 0..64 {
        if done() {
            return;
        }
        std::hint::spin_loop();
    }
    let start = std::time::Instant::now();
    while !done() && start.elapsed() < SPIN_MAX {
        std::thread::yield_now();
    }
}

/// A model does not spin: spinning changes when things happen, not what happens.
#[cfg(feature = "loom")]
pub(crate) fn spin_until(_: impl Fn() -> bool) {
    let _ = SPIN_MAX;
}

/// A value with cache lines of its own, so that writing it does not slow down reads of its neighbours.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(pub(crate) T);
