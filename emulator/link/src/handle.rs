//! Handles: what C takes for a pointer to an object is a number that is looked up, so a stale or a foreign one is an
//! error in place of a crash.

use crate::lock;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// The living objects of one kind. A library has one static table for each kind of object.
#[derive(Debug)]
pub struct Handles<T> {
    kind: &'static str,
    /// The upper half of the numbers, another one for each kind.
    base: usize,
    table: Mutex<Table<T>>,
}

#[derive(Debug)]
struct Table<T> {
    /// How many objects were ever made.
    made: usize,
    /// Those that live, by their handle.
    living: BTreeMap<usize, T>,
}

/// A number that is no handle of a living object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unknown {
    /// The number.
    pub handle: usize,
    /// The kind of object that was asked for.
    pub kind: &'static str,
    /// Whether an object of that kind may have had the handle before it was destroyed.
    pub was_destroyed: bool,
}

impl<T: Clone> Handles<T> {
    /// A table without objects. `number` tells the handles of kinds apart.
    pub const fn new(kind: &'static str, number: usize) -> Handles<T> {
        Handles { kind, base: number << 40, table: Mutex::new(Table { made: 0, living: BTreeMap::new() }) }
    }

    fn table(&self) -> MutexGuard<'_, Table<T>> {
        lock(&self.table)
    }

    /// Adds an object and gives its handle.
    pub fn add(&self, object: T) -> usize {
        let mut table = self.table();
        table.made += 1;
        // Aligned like a pointer to something.
        let handle = self.base + table.made * 16;
        table.living.insert(handle, object);
        handle
    }

    /// A clone of the object.
    ///
    /// # Errors
    /// No living object has the handle.
    pub fn get(&self, handle: usize) -> Result<T, Unknown> {
        self.table().living.get(&handle).cloned().ok_or_else(|| self.unknown(handle))
    }

    /// Takes the object out of the table: its handle is no longer valid.
    ///
    /// # Errors
    /// As [`get`](Handles::get).
    pub fn remove(&self, handle: usize) -> Result<T, Unknown> {
        self.table().living.remove(&handle).ok_or_else(|| self.unknown(handle))
    }

    /// Changes the object in its place.
    ///
    /// # Errors
    /// As [`get`](Handles::get), and those of `change`.
    pub fn change<E: From<Unknown>>(
        &self,
        handle: usize,
        change: impl FnOnce(&mut T) -> Result<(), E>,
    ) -> Result<(), E> {
        change(self.table().living.get_mut(&handle).ok_or_else(|| self.unknown(handle))?)
    }

    /// Clones of all living objects.
    pub fn all(&self) -> Vec<T> {
        self.table().living.values().cloned().collect()
    }

    fn unknown(&self, handle: usize) -> Unknown {
        let was_destroyed = handle & !((1 << 40) - 1) == self.base;
        Unknown { handle, kind: self.kind, was_destroyed }
    }
}
