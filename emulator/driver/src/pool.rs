//! Memory pools. Memory that is freed is the device's again at once, so a pool holds nothing back; it counts.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use phalanx_emulator_link::pointer::{Host, In, Out};

use crate::device::{Device, device};
use crate::status::{Result, Status, present};
use crate::world::{World, world};

/// A pool of a device.
#[derive(Debug)]
pub(crate) struct Pool {
    pub ordinal: usize,
    /// Numbers of `CUmemPool_attribute` that were set.
    set: Mutex<HashMap<i32, u64>>,
    used_high: Mutex<u64>,
    /// What other devices may do with its memory, by their numbers.
    access: Mutex<HashMap<i32, i32>>,
}

/// A place that memory is used from.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    kind: i32,
    ordinal: i32,
}

/// What is allowed there: nothing (0), to read (1), or [`READ_WRITE`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolAccess {
    location: Location,
    flags: i32,
}

const READ_WRITE: i32 = 3;

/// The release threshold, and the counts of what is reserved and used, now and at most.
const RELEASE_THRESHOLD: i32 = 4;
const RESERVED: i32 = 5;
const RESERVED_HIGH: i32 = 6;
const USED: i32 = 7;
const USED_HIGH: i32 = 8;

/// The default pool of each device, and the one that allocations come from.
static DEFAULTS: LazyLock<Mutex<HashMap<usize, (usize, usize)>>> = LazyLock::new(Mutex::default);

impl Pool {
    fn new(ordinal: usize) -> Pool {
        Pool { ordinal, set: Mutex::default(), used_high: Mutex::default(), access: Mutex::default() }
    }

    fn get(&self, attribute: i32, device: &Device) -> Option<u64> {
        let high = || *self.used_high.lock().unwrap_or_else(PoisonError::into_inner);
        match attribute {
            1..=3 => Some(self.stored(attribute).unwrap_or(1)),
            RELEASE_THRESHOLD => Some(self.stored(attribute).unwrap_or(0)),
            RESERVED | USED => Some(device.memory.used()),
            RESERVED_HIGH | USED_HIGH => Some(high().max(device.memory.used())),
            _ => None,
        }
    }

    fn stored(&self, attribute: i32) -> Option<u64> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner).get(&attribute).copied()
    }
}

/// The handles of a device's default and current pool.
fn pools(world: &World, ordinal: usize) -> (usize, usize) {
    let mut defaults = DEFAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    *defaults.entry(ordinal).or_insert_with(|| {
        let handle = world.pools.add(Arc::new(Pool::new(ordinal)));
        (handle, handle)
    })
}

/// Something was allocated from a pool, or from the device's current one.
pub(crate) fn used(world: &World, device: &Device, pool: Option<&Arc<Pool>>) {
    let current = || world.pools.get(pools(world, device.ordinal).1).ok();
    if let Some(pool) = pool.cloned().or_else(current) {
        let mut high = pool.used_high.lock().unwrap_or_else(PoisonError::into_inner);
        *high = (*high).max(device.memory.used());
    }
}

/// What a pool is made of; what follows is not looked at.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Properties {
    allocation: i32,
    handles: i32,
    location: i32,
    ordinal: i32,
}

fn get_attribute(pool: usize, attribute: i32, value: Host) -> Result<()> {
    let pool = world()?.pools.get(pool)?;
    let device = &world()?.devices[pool.ordinal];
    let unknown = || Status::INVALID_VALUE.because(format!("pool attribute {attribute}"));
    let found = pool.get(attribute, device).ok_or_else(unknown)?;
    // The first three are `int`, the others `cuuint64_t`.
    let done = if attribute <= 3 { value.set(found as i32) } else { value.set(found) };
    present(done, "value")
}

fn set_attribute(pool: usize, attribute: i32, value: Host) -> Result<()> {
    let pool = world()?.pools.get(pool)?;
    let given = if attribute <= 3 { value.get::<i32>().map(|v| v as u64) } else { value.get::<u64>() };
    let given = present(given, "value")?;
    match attribute {
        1..=RELEASE_THRESHOLD => {
            pool.set.lock().unwrap_or_else(PoisonError::into_inner).insert(attribute, given);
        }
        RESERVED_HIGH | USED_HIGH if given == 0 => {
            *pool.used_high.lock().unwrap_or_else(PoisonError::into_inner) = 0;
        }
        _ => {
            return Err(
                Status::INVALID_VALUE.because(format!("pool attribute {attribute} cannot be set to {given}"))
            );
        }
    }
    Ok(())
}

fn set_access(pool: usize, all: &[PoolAccess]) -> Result<()> {
    const DEVICE: i32 = 1;
    let pool = world()?.pools.get(pool)?;
    for PoolAccess { location, flags } in all {
        let there = device(location.ordinal)?.ordinal;
        if location.kind != DEVICE || ![0, 1, READ_WRITE].contains(flags) {
            let why = format!("access {flags} for a location of kind {}", location.kind);
            return Err(Status::INVALID_VALUE.because(why));
        }
        if there == pool.ordinal && *flags != READ_WRITE {
            return Err(Status::INVALID_VALUE.because("a device always reads and writes its own pools"));
        }
        pool.access.lock().unwrap_or_else(PoisonError::into_inner).insert(location.ordinal, *flags);
    }
    Ok(())
}

export! {
    @always {
        fn cuDeviceGetDefaultMemPool(pool: Out<usize>, ordinal: i32) {
            set!(pool, pools(world()?, device(ordinal)?.ordinal).0)
        }
        fn cuDeviceGetMemPool(pool: Out<usize>, ordinal: i32) {
            set!(pool, pools(world()?, device(ordinal)?.ordinal).1)
        }
        fn cuDeviceSetMemPool(ordinal: i32, pool: usize) {
            let (world, device) = (world()?, device(ordinal)?);
            if world.pools.get(pool)?.ordinal != device.ordinal {
                return Err(Status::INVALID_VALUE.because("the pool is another device's"));
            }
            let default = pools(world, device.ordinal).0;
            DEFAULTS.lock().unwrap_or_else(PoisonError::into_inner).insert(device.ordinal, (default, pool));
            Ok(())
        }
    }
    fn cuMemPoolCreate(pool: Out<usize>, properties: In<Properties>) {
        let wanted = present(properties.get(), "properties")?;
        let device = device(wanted.ordinal)?;
        set!(pool, world()?.pools.add(Arc::new(Pool::new(device.ordinal))))
    }
    fn cuMemPoolDestroy(pool: usize) {
        let found = world()?.pools.get(pool)?;
        if pools(world()?, found.ordinal).0 == pool {
            return Err(Status::INVALID_VALUE.because("a device's default pool cannot be destroyed"));
        }
        world()?.pools.remove(pool).map(|_| ())
    }
    fn cuMemPoolGetAttribute(pool: usize, attribute: i32, value: Host) { get_attribute(pool, attribute, value) }
    fn cuMemPoolSetAttribute(pool: usize, attribute: i32, value: Host) { set_attribute(pool, attribute, value) }
    fn cuMemPoolTrimTo(pool: usize, bytes: usize) { world()?.pools.get(pool).map(|_| ()) }
    fn cuMemPoolSetAccess(pool: usize, access: In<PoolAccess>, count: usize) {
        set_access(pool, &access.list(count))
    }
    fn cuMemPoolGetAccess(flags: Out<i32>, pool: usize, location: In<Location>) {
        let (pool, location) = (world()?.pools.get(pool)?, present(location.get(), "location")?);
        let known = pool.access.lock().unwrap_or_else(PoisonError::into_inner).get(&location.ordinal).copied();
        let own = if location.ordinal as usize == pool.ordinal { READ_WRITE } else { 0 };
        set!(flags, known.unwrap_or(own))
    }
}
