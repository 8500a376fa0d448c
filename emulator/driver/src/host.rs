//! Page-locked memory of the host: what copies may read and write after the call that queued them has returned.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use phalanx_emulator_link::lock;

use crate::context::here;
use crate::executor::executor;
use crate::failing;
use crate::ledger::{self, Kind};
use crate::settings::settings;
use crate::status::{Result, Status};
use crate::unwaited;

/// Bytes of a page: locked memory begins at one.
const ALIGN: usize = 4096;

/// The locked ranges, by their start.
static LOCKED: Mutex<BTreeMap<usize, Locked>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
struct Locked {
    bytes: usize,
    flags: u32,
    /// The block that was allocated for it, if it was not there before.
    block: Option<Vec<u8>>,
}

fn locked() -> MutexGuard<'static, BTreeMap<usize, Locked>> {
    lock(&LOCKED)
}

/// Whether all of `bytes` bytes are locked.
pub(crate) fn holds(address: usize, bytes: usize) -> bool {
    let locked = locked();
    let found = locked.range(..=address).next_back();
    found.is_some_and(|(start, l)| address - start <= l.bytes && bytes <= l.bytes - (address - start))
}

/// The start, the size and the flags of the locked range around an address.
pub(crate) fn around(address: usize) -> Option<(usize, usize, u32)> {
    let locked = locked();
    let (start, found) = locked.range(..=address).next_back()?;
    (address - start < found.bytes).then_some((*start, found.bytes, found.flags))
}

/// Allocates page-locked memory.
pub(crate) fn allocate(bytes: usize, flags: u32) -> Result<usize> {
    here()?;
    if bytes == 0 {
        return Err(Status::INVALID_VALUE.because("an allocation of 0 bytes"));
    }
    if failing::fails() {
        let why = format!("{bytes} bytes of the host: this allocation was chosen to fail");
        return Err(Status::OUT_OF_MEMORY.because(why));
    }
    let room = bytes.checked_add(ALIGN).ok_or(Status::OUT_OF_MEMORY)?;
    let mut block = Vec::new();
    block
        .try_reserve_exact(room)
        .map_err(|_| Status::OUT_OF_MEMORY.because(format!("{bytes} bytes of the host")))?;
    // Never written memory must not look like zeros that a program put there.
    block.resize(room, phalanx_ptx::Memory::POISON);
    let start = (block.as_ptr() as usize).next_multiple_of(ALIGN);
    locked().insert(start, Locked { bytes, flags, block: Some(block) });
    ledger::made(Kind::PageLocked, start, bytes as u64, "cuMemHostAlloc");
    Ok(start)
}

/// Unlocks what begins at an address, and frees it if it was allocated here. A copy that is still queued is a mistake
/// of the caller, and is reported; it runs first, so that it does not touch memory that was given back.
pub(crate) fn unlock(address: usize, allocated: bool, call: &str) -> Result<()> {
    let bytes = match locked().get(&address) {
        Some(locked) if locked.block.is_some() == allocated => locked.bytes,
        _ if allocated => {
            return Err(Status::INVALID_VALUE.because(format!("no allocation begins at {address:#x}")));
        }
        _ => return Err(Status::HOST_MEMORY_NOT_REGISTERED.into()),
    };
    let mut early = executor().queue().unwaited.freed(address, address + bytes);
    let users = executor().queue().using_host(address, address + bytes);
    for (point, what) in users {
        executor().wait(&point);
        early.push(what);
    }
    let freed = locked().remove(&address);
    drop(freed);
    ledger::gone(Kind::PageLocked, address);
    if let Some(what) = early.first() {
        let why = format!("page-locked memory is freed before the host has waited for {what}, which uses it");
        unwaited::mistake(&*here()?, settings().races, why, call);
    }
    Ok(())
}

/// Locks memory that was there before.
pub(crate) fn register(start: usize, bytes: usize, flags: u32) -> Result<()> {
    let mut locked = locked();
    let before = locked.range(..start + bytes).next_back();
    if before.is_some_and(|(other, l)| other + l.bytes > start) {
        return Err(Status::HOST_MEMORY_ALREADY_REGISTERED.into());
    }
    locked.insert(start, Locked { bytes, flags, block: None });
    Ok(())
}
