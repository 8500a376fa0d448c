//! Handles: what C sees as a pointer is a number that is looked up, so a stale or a foreign one is an error.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::status::{Result, Status};

/// All living objects of one kind.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    kind: &'static str,
    /// The upper half of the numbers, another one for each kind.
    base: usize,
    living: Mutex<(usize, HashMap<usize, Arc<T>>)>,
}

impl<T> Handles<T> {
    /// No objects yet. `number` tells kinds apart.
    pub(crate) fn new(kind: &'static str, number: usize) -> Handles<T> {
        Handles { kind, base: number << 40, living: Mutex::new((0, HashMap::new())) }
    }

    fn living(&self) -> std::sync::MutexGuard<'_, (usize, HashMap<usize, Arc<T>>)> {
        self.living.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A handle for a new object.
    pub(crate) fn add(&self, object: Arc<T>) -> usize {
        let mut living = self.living();
        living.0 += 1;
        // Aligned like a pointer to something.
        let handle = self.base + living.0 * 16;
        living.1.insert(handle, object);
        handle
    }

    /// The object.
    pub(crate) fn get(&self, handle: usize) -> Result<Arc<T>> {
        self.living().1.get(&handle).cloned().ok_or_else(|| self.unknown(handle))
    }

    /// The object, whose handle is one no more.
    pub(crate) fn remove(&self, handle: usize) -> Result<Arc<T>> {
        self.living().1.remove(&handle).ok_or_else(|| self.unknown(handle))
    }

    /// All objects.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.living().1.values().cloned().collect()
    }

    fn unknown(&self, handle: usize) -> crate::status::Failure {
        let why = if handle & !((1 << 40) - 1) == self.base { "was destroyed" } else { "is none" };
        Status::INVALID_HANDLE.because(format!("the {} handle {handle:#x} {why}", self.kind))
    }
}
