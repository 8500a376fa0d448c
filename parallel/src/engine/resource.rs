//! [`Resource`]: a value and its variable. [`Generator`] and [`Scratch`], the two that every engine needs.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use phalanx_tensor::{PhiloxStream, RngKey};

use super::Engine;
use super::error::{Error, Result};
use super::variable::Variable;

/// A value that operations share. One that names [`Resource::variable`] among what it reads or mutates gets it without
/// waiting; one that does not may find it in use, which is an error. Clones are handles of one value.
pub struct Resource<T> {
    variable: Variable,
    value: Arc<RwLock<T>>,
}

impl<T: Send + Sync + 'static> Resource<T> {
    pub(crate) fn new(variable: Variable, value: T) -> Resource<T> {
        Resource { variable, value: Arc::new(RwLock::new(value)) }
    }

    /// The variable that operations name to use the value.
    pub fn variable(&self) -> &Variable {
        &self.variable
    }

    /// The value, for an operation that reads it, or after a wait.
    ///
    /// # Errors
    /// If an operation that runs is changing it.
    pub fn read(&self) -> Result<ResourceRef<'_, T>> {
        match self.value.try_read() {
            Ok(guard) => Ok(ResourceRef(guard)),
            // The engine has poisoned the variable for the panic.
            Err(TryLockError::Poisoned(guard)) => Ok(ResourceRef(guard.into_inner())),
            Err(TryLockError::WouldBlock) => Err(Error::InUse { variable: self.variable.0.id }),
        }
    }

    /// The value, for an operation that mutates it, or after a wait.
    ///
    /// # Errors
    /// If an operation that runs has it.
    pub fn write(&self) -> Result<ResourceRefMut<'_, T>> {
        match self.value.try_write() {
            Ok(guard) => Ok(ResourceRefMut(guard)),
            Err(TryLockError::Poisoned(guard)) => Ok(ResourceRefMut(guard.into_inner())),
            Err(TryLockError::WouldBlock) => Err(Error::InUse { variable: self.variable.0.id }),
        }
    }

    /// Frees the value after the last operation that uses it, once no other handle is left.
    ///
    /// # Errors
    /// As [`Engine::delete_variable`].
    pub fn delete(self, engine: &Engine) -> Result<()> {
        let Resource { variable, value } = self;
        engine.delete_variable(&variable, move || drop(value))
    }
}

/// A resource's value, read.
pub struct ResourceRef<'a, T>(RwLockReadGuard<'a, T>);

/// A resource's value, to be changed.
pub struct ResourceRefMut<'a, T>(RwLockWriteGuard<'a, T>);

impl<T> Deref for ResourceRef<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Deref for ResourceRefMut<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for ResourceRefMut<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T> Clone for Resource<T> {
    fn clone(&self) -> Resource<T> {
        Resource { variable: self.variable.clone(), value: self.value.clone() }
    }
}

impl<T> fmt::Debug for Resource<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Resource({:?})", self.variable)
    }
}

/// A source of random streams. Operations that draw mutate its variable, so each gets the stream that its place in the
/// order of the pushes gives it, whatever runs at the same time.
#[derive(Clone, Debug)]
pub struct Generator {
    key: RngKey,
    next: u64,
}

impl Generator {
    /// The streams of a key, from the first.
    pub fn new(key: RngKey) -> Generator {
        Generator { key, next: 0 }
    }

    /// The next stream.
    pub fn stream(&mut self) -> PhiloxStream {
        let site = self.next;
        self.next += 1;
        self.key.site(site)
    }
}

/// Memory for intermediate values. An operation that needs some mutates its variable. So a few of them serve any number of
/// operations, and as many operations run at a time as there are scratch spaces.
#[derive(Debug, Default)]
pub struct Scratch(Vec<u8>);

impl Scratch {
    /// This many bytes, with whatever the last operation left in them.
    pub fn bytes(&mut self, len: usize) -> &mut [u8] {
        if self.0.len() < len {
            self.0.resize(len, 0);
        }
        &mut self.0[..len]
    }
}
