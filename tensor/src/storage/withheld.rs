//! Storages of tensors whose elements are elsewhere: all that reads or writes one is an error that says where they are.
//!
//! Such a storage has no bytes and a writer that never leaves. So nothing is asked of other storages: who meets a writer takes
//! the slow path in any case, and learns there why this one will not go.

use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Handle, Storage};
use crate::{Device, Result};

/// One for each device and reason, which is kept for good: no handle that a user has is the sole one.
static KEPT: Mutex<Vec<(Device, &'static str, Handle)>> = Mutex::new(Vec::new());

/// No thread has this token.
const NOBODY: u32 = 0;

fn kept() -> MutexGuard<'static, Vec<(Device, &'static str, Handle)>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Storage {
    /// The storage without elements of a device for a reason.
    pub(crate) fn withhold(device: Device, why: &'static str) -> Result<Handle> {
        let mut kept = kept();
        if let Some((_, _, known)) = kept.iter().find(|(at, said, _)| (*at, *said) == (device, why)) {
            return Ok(known.clone());
        }
        let storage = Storage::allocate("withheld", &[0], 0, device)?;
        storage.users.enter(&|users| users.and_writer(NOBODY));
        kept.push((device, why, storage.clone()));
        Ok(storage)
    }

    /// Why its elements are not here, if they are withheld.
    pub(crate) fn why_withheld(&self) -> Option<&'static str> {
        if !self.users.now().has_writer() {
            return None;
        }
        kept().iter().find(|(_, _, kept)| ptr::eq::<Storage>(&**kept, self)).map(|(_, why, _)| *why)
    }
}
