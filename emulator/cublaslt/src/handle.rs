//! Objects that C holds by pointers: numbers that are looked up, so a stale or a foreign one is an error.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use phalanx_emulator_link::driver::Driver;
use phalanx_emulator_link::pointer::{Host, Out};

use crate::call::{Result, Status, present};

/// All living objects of one kind.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    kind: &'static str,
    base: usize,
    living: Mutex<(usize, HashMap<usize, T>)>,
}

impl<T: Clone> Handles<T> {
    /// No objects yet. `number` tells kinds apart.
    pub(crate) fn new(kind: &'static str, number: usize) -> Handles<T> {
        Handles { kind, base: number << 40, living: Mutex::new((0, HashMap::new())) }
    }

    fn living(&self) -> MutexGuard<'_, (usize, HashMap<usize, T>)> {
        self.living.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, object: T) -> usize {
        let mut living = self.living();
        living.0 += 1;
        let handle = self.base + living.0 * 16;
        living.1.insert(handle, object);
        handle
    }

    /// A copy of the object as it is now.
    pub(crate) fn get(&self, handle: usize) -> Result<T> {
        self.living().1.get(&handle).cloned().ok_or_else(|| self.unknown(handle))
    }

    /// Changes the object.
    pub(crate) fn change(&self, handle: usize, change: impl FnOnce(&mut T) -> Result<()>) -> Result<()> {
        change(self.living().1.get_mut(&handle).ok_or_else(|| self.unknown(handle))?)
    }

    pub(crate) fn remove(&self, handle: usize) -> Result<()> {
        self.living().1.remove(&handle).map(|_| ()).ok_or_else(|| self.unknown(handle))
    }

    fn unknown(&self, handle: usize) -> crate::call::Failure {
        Status::INVALID_VALUE.because(format!("{handle:#x} is no living {}", self.kind))
    }
}

/// The value of an attribute, whose size must be right.
pub(crate) fn value<T: phalanx_emulator_link::pointer::Plain>(
    name: &str,
    at: Host,
    bytes: usize,
) -> Result<T> {
    if bytes != size_of::<T>() {
        let why = format!("attribute {name} has {} bytes, not {bytes}", size_of::<T>());
        return Err(Status::INVALID_VALUE.because(why));
    }
    present(at.get(), name)
}

/// The library's handles.
pub(crate) static LIBRARIES: LazyLock<Handles<()>> = LazyLock::new(|| Handles::new("cublasLt handle", 16));

export! {
    fn cublasLtCreate(handle: Out<usize>) {
        Driver::loaded().map_err(|why| Status::NOT_INITIALIZED.because(why))?;
        present(handle.set(LIBRARIES.add(())), "handle")
    }
    fn cublasLtDestroy(handle: usize) { LIBRARIES.remove(handle) }
    fn cublasLtLoggerSetLevel(level: i32) { Ok(()) }
    fn cublasLtLoggerOpenFile(file: Host) { Ok(()) }
}
