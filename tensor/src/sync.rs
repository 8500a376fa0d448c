//! Atomics, locks and cells of the code that loom models (the pool and the counts of storages): the standard library's, or loom's with the
//! feature `loom`. [`lock`] and [`panic_message`]: helpers for code outside the models.

use std::any::Any;
use std::sync::PoisonError;

#[cfg(feature = "loom")]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicU64, AtomicUsize, Ordering, fence},
    },
    thread::yield_now,
};
#[cfg(not(feature = "loom"))]
pub(crate) use std::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicU64, AtomicUsize, Ordering, fence},
    },
    thread::yield_now,
};

/// A cell whose content is borrowed by a pointer, so that a model knows which thread has it when.
#[cfg(not(feature = "loom"))]
#[derive(Default)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(feature = "loom"))]
impl<T> UnsafeCell<T> {
    /// For `f` to read, while no thread writes.
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// For `f` to write, while no other thread reads or writes.
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// The message of a panic, if its payload is text.
pub fn panic_message(payload: &(dyn Any + Send)) -> Option<&str> {
    payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str))
}

/// Locks a mutex, also after a thread has panicked while it held it.
pub fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// [`lock`] for a mutex of a model.
pub(crate) fn lock_modelled<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sleeps until woken, or until a spurious wake-up.
pub(crate) fn sleep<'a, T>(wake: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    wake.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
