//! Page-locked memory of the host: what copies may read and write after the call that queued them has returned.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use phalanx_emulator_link::pointer::{Host, Out};

use crate::context::here;
use crate::report;
use crate::status::{Result, Status, present};
use crate::world::world;

/// Pages, so that what is locked is whole ones.
const ALIGN: usize = 4096;

/// What is locked: start to size, and whether it was allocated here.
#[derive(Debug, Default)]
pub(crate) struct HostMemory {
    locked: Mutex<BTreeMap<usize, Locked>>,
}

#[derive(Debug)]
struct Locked {
    bytes: usize,
    flags: u32,
    /// The block that was allocated for it, if it was not there before.
    block: Option<Vec<u8>>,
}

impl HostMemory {
    fn locked(&self) -> MutexGuard<'_, BTreeMap<usize, Locked>> {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all of `bytes` bytes are locked.
    pub(crate) fn holds(&self, address: usize, bytes: usize) -> bool {
        let locked = self.locked();
        let found = locked.range(..=address).next_back();
        found.is_some_and(|(start, l)| address - start <= l.bytes && bytes <= l.bytes - (address - start))
    }

    /// The start and the size of what is locked around an address.
    pub(crate) fn around(&self, address: usize) -> Option<(usize, usize, u32)> {
        let locked = self.locked();
        let (start, found) = locked.range(..=address).next_back()?;
        (address - start < found.bytes).then_some((*start, found.bytes, found.flags))
    }
}

fn allocate(bytes: usize, flags: u32) -> Result<usize> {
    here()?;
    if bytes == 0 {
        return Err(Status::INVALID_VALUE.because("an allocation of 0 bytes"));
    }
    let room = bytes.checked_add(ALIGN).ok_or(Status::OUT_OF_MEMORY)?;
    let mut block = Vec::new();
    block
        .try_reserve_exact(room)
        .map_err(|_| Status::OUT_OF_MEMORY.because(format!("{bytes} bytes of the host")))?;
    // Never written memory must not look like zeros that somebody put there.
    block.resize(room, phalanx_ptx::Memory::POISON);
    let start = (block.as_ptr() as usize).next_multiple_of(ALIGN);
    world()?.host.locked().insert(start, Locked { bytes, flags, block: Some(block) });
    Ok(start)
}

/// Unlocks what begins at an address, and frees it if it was allocated here. A copy that is still queued is a mistake
/// of the caller, who is told; it runs first, so that it does not touch what is nobody's.
fn unlock(address: usize, allocated: bool, call: &str) -> Result<()> {
    let world = world()?;
    let bytes = match world.host.locked().get(&address) {
        Some(locked) if locked.block.is_some() == allocated => locked.bytes,
        _ if allocated => {
            return Err(Status::INVALID_VALUE.because(format!("no allocation begins at {address:#x}")));
        }
        _ => return Err(Status::HOST_MEMORY_NOT_REGISTERED.into()),
    };
    let users = world.executor.queue().using_host(address, address + bytes);
    for (point, what) in &users {
        report::say(&format!("{call}: {what} is still queued and uses the memory: wait for it before"));
        world.executor.wait(point);
    }
    let freed = world.host.locked().remove(&address);
    drop(freed);
    if !users.is_empty() {
        let failure = Status::LAUNCH_FAILED.because("page-locked memory was freed while queued work used it");
        here()?.lose(failure, call);
    }
    Ok(())
}

export! {
    fn cuMemHostAlloc(out: Out<usize>, bytes: usize, flags: u32) { set!(out, allocate(bytes, flags)?) }
    fn cuMemAllocHost_v2(out: Out<usize>, bytes: usize) { set!(out, allocate(bytes, 0)?) }
    fn cuMemFreeHost(address: usize) { unlock(address, true, "cuMemFreeHost") }
    fn cuMemHostRegister_v2(address: Host, bytes: usize, flags: u32) {
        here()?;
        if address.is_null() || bytes == 0 {
            return Err(Status::INVALID_VALUE.because("nothing to register"));
        }
        let (start, host) = (address.address(), &world()?.host);
        let mut locked = host.locked();
        let before = locked.range(..start + bytes).next_back();
        if before.is_some_and(|(other, l)| other + l.bytes > start) {
            return Err(Status::HOST_MEMORY_ALREADY_REGISTERED.into());
        }
        locked.insert(start, Locked { bytes, flags, block: None });
        Ok(())
    }
    fn cuMemHostUnregister(address: usize) { unlock(address, false, "cuMemHostUnregister") }
    fn cuMemHostGetDevicePointer_v2(out: Out<u64>, address: usize, flags: u32) {
        Err(Status::NOT_SUPPORTED.because("kernels cannot reach memory of the host here: copy it"))
    }
    fn cuMemHostGetFlags(flags: Out<u32>, address: usize) {
        let (_, _, found) = present(world()?.host.around(address), "address")?;
        set!(flags, found)
    }
}
