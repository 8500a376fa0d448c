//! Device memory: at once, in stream order, and from pools. Memory that is freed is the device's again at once, so a
//! pool holds nothing back; it counts.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use phalanx_emulator_link::handle::Handles;
use phalanx_emulator_link::lock;

use crate::context::{CONTEXTS, Context, here};
use crate::device::{Device, device_of, devices};
use crate::failing;
use crate::graph;
use crate::ledger::{self, Kind};
use crate::log::Work;
use crate::queue::{Progress, Task};
use crate::race::Access;
use crate::settings::{Frees, settings};
use crate::status::{Failure, Result, Status};
use crate::streams::{streams, submit, synchronize_all};

/// Allocates at once. If memory is short, all queued operations run first: they may free some.
pub(crate) fn allocate(device: &Device, bytes: u64) -> Result<u64> {
    if bytes == 0 {
        return Err(Status::INVALID_VALUE.because("an allocation of 0 bytes"));
    }
    if failing::fails() {
        let left = device.memory.capacity() - device.memory.used();
        let why = format!(
            "out of memory: {bytes} bytes wanted, {left} are left, but this allocation was chosen to fail"
        );
        return Err(Status::OUT_OF_MEMORY.because(why));
    }
    if let Ok(address) = device.memory.allocate(bytes) {
        return Ok(address);
    }
    for context in CONTEXTS.all().iter().filter(|context| context.ordinal == device.ordinal) {
        synchronize_all(context.id);
    }
    device.memory.allocate(bytes).map_err(|error| Status::OUT_OF_MEMORY.because(error.to_string()))
}

/// Allocates in stream order: the address is known at once, the memory is there behind what is queued.
pub(crate) fn allocate_async(bytes: usize, stream: usize, pool: Option<&Arc<Pool>>) -> Result<u64> {
    let (id, context) = {
        let mut streams = streams();
        let id = streams.find(stream)?;
        (id, streams.get(id)?.context.clone())
    };
    let device = pool.map_or(context.ordinal, |pool| pool.ordinal);
    let device = &devices()?[device];
    let captured = match streams().capture_of(id)? {
        Some(capture) => Some(capture.memory.allocate(device, bytes as u64)?),
        None => None,
    };
    let address = captured.map_or_else(|| allocate(device, bytes as u64), Ok)?;
    ledger::made(Kind::Allocation, address as usize, bytes as u64, "cuMemAllocAsync");
    let what = format!("an allocation of {bytes} bytes");
    let run = move |_| {
        graph::set_allocated(address);
        Progress::Done(Vec::new())
    };
    let task = Task::new(what, &context, run).touching([Access::write(address, bytes as u64)]);
    submit(stream, task.with_work(Work::new("allocate", 0, bytes as u64)))?;
    note_use(device, pool);
    Ok(address)
}

/// Frees in stream order.
pub(crate) fn free_async(address: u64, stream: usize) -> Result<()> {
    let (device, start, bytes) = allocation(address)?;
    let context = {
        let mut streams = streams();
        let id = streams.find(stream)?;
        let context = streams.get(id)?.context.clone();
        if let Some(capture) = streams.capture_of(id)? {
            // A GPU's driver may go on with the capture or not: the stricter one counts.
            capture.memory.freed(address, bytes).inspect_err(|_| capture.broken = true)?;
            let run = move |_| Progress::from(graph::set_freed(start).unwrap_or(Ok(())));
            let task = Task::new("a free", &context, run).touching([Access::write(start, bytes)]);
            let task = task.with_work(Work::new("free", 0, bytes));
            return streams.enqueue(id, Arc::new(task)).map(|_| ());
        }
        context
    };
    graph::free_queued(start);
    let run = move |_| {
        let freed = graph::set_freed(start);
        Progress::from(freed.unwrap_or_else(|| device.free(start)))
    };
    let task = Task::new(format!("the free of {bytes} bytes"), &context, run);
    let task = task.touching([Access::write(start, bytes)]);
    submit(stream, task.with_work(Work::new("free", 0, bytes))).map(|_| ())
}

/// The device, the start and the bytes of the allocation that begins at an address.
fn allocation(address: u64) -> Result<(&'static Device, u64, u64)> {
    let unknown = || Status::INVALID_VALUE.because(format!("no allocation begins at {address:#x}"));
    let device = device_of(address).ok_or_else(unknown)?;
    let (start, bytes) =
        device.memory.allocation(address).filter(|(start, _)| *start == address).ok_or_else(unknown)?;
    Ok((device, start, bytes))
}

/// Frees now, when everything queued on the device has run, as the driver may do; so no queued work can lose its
/// memory by it.
pub(crate) fn free(address: u64, context: &Context) -> Result<()> {
    let (device, start, _) = allocation(address)?;
    synchronize_all(context.id);
    graph::free_queued(start);
    graph::set_freed(start).unwrap_or_else(|| device.free(start))
}

/// The outcome of a free. One that is refused ends the context, unless it is told not to: programs free where they drop
/// what they own, and do not look at the status.
pub(crate) fn freed(outcome: Result<()>, call: &str) -> Result<()> {
    let ends = |failure: &Failure| match settings().frees {
        Frees::Error => failure.status != Status::CAPTURE_INVALIDATED,
        Frees::Strict => true,
        Frees::Status => false,
    };
    if let (Err(failure), Ok(context)) = (&outcome, here())
        && ends(failure)
    {
        context.lose(failure.status.because(format!("the free is refused: {}", failure.message)), call);
    }
    outcome
}

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

/// All pools.
pub(crate) static POOLS: Handles<Arc<Pool>> = Handles::new("memory pool", 9);

/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(crate) const READ_WRITE: i32 = 3;

/// The release threshold, and the counts of what is reserved and used, now and at most.
const RELEASE_THRESHOLD: i32 = 4;
const RESERVED: i32 = 5;
const RESERVED_HIGH: i32 = 6;
const USED: i32 = 7;
const USED_HIGH: i32 = 8;

/// The default pool of each device, and the one that allocations come from.
static DEFAULTS: LazyLock<Mutex<HashMap<usize, (usize, usize)>>> = LazyLock::new(Mutex::default);

impl Pool {
    pub(crate) fn new(ordinal: usize) -> Pool {
        Pool { ordinal, set: Mutex::default(), used_high: Mutex::default(), access: Mutex::default() }
    }

    /// An attribute's value; `device` is the pool's.
    pub(crate) fn get(&self, attribute: i32, device: &Device) -> Option<u64> {
        let high = || *lock(&self.used_high);
        match attribute {
            1..=3 => Some(self.stored(attribute).unwrap_or(1)),
            RELEASE_THRESHOLD => Some(self.stored(attribute).unwrap_or(0)),
            RESERVED | USED => Some(device.memory.used()),
            RESERVED_HIGH | USED_HIGH => Some(high().max(device.memory.used())),
            _ => None,
        }
    }

    /// Sets an attribute.
    pub(crate) fn set(&self, attribute: i32, given: u64) -> Result<()> {
        match attribute {
            1..=RELEASE_THRESHOLD => {
                lock(&self.set).insert(attribute, given);
            }
            RESERVED_HIGH | USED_HIGH if given == 0 => {
                *lock(&self.used_high) = 0;
            }
            _ => {
                let why = format!("pool attribute {attribute} cannot be set to {given}");
                return Err(Status::INVALID_VALUE.because(why));
            }
        }
        Ok(())
    }

    /// Notes what a device may do with the pool's memory.
    pub(crate) fn allow(&self, ordinal: i32, flags: i32) {
        lock(&self.access).insert(ordinal, flags);
    }

    /// What a device may do with the pool's memory.
    pub(crate) fn allowed(&self, ordinal: i32) -> i32 {
        let known = lock(&self.access).get(&ordinal).copied();
        known.unwrap_or(if ordinal as usize == self.ordinal { READ_WRITE } else { 0 })
    }

    fn stored(&self, attribute: i32) -> Option<u64> {
        lock(&self.set).get(&attribute).copied()
    }
}

/// The handles of a device's default and current pool.
pub(crate) fn default_pools(ordinal: usize) -> (usize, usize) {
    let mut defaults = lock(&DEFAULTS);
    *defaults.entry(ordinal).or_insert_with(|| {
        let handle = POOLS.add(Arc::new(Pool::new(ordinal)));
        (handle, handle)
    })
}

/// Notes an allocation from a pool, or from the device's current one.
fn note_use(device: &Device, pool: Option<&Arc<Pool>>) {
    let current = || POOLS.get(default_pools(device.ordinal).1).ok();
    if let Some(pool) = pool.cloned().or_else(current) {
        let mut high = lock(&pool.used_high);
        *high = (*high).max(device.memory.used());
    }
}

/// Makes a pool the one that a device's allocations come from.
pub(crate) fn set_current_pool(ordinal: usize, pool: usize) {
    let default = default_pools(ordinal).0;
    lock(&DEFAULTS).insert(ordinal, (default, pool));
}
