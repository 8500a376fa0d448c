//! Device memory: at once, and in stream order.

use std::sync::Arc;

use phalanx_emulator_link::pointer::Out;
use phalanx_ptx::{Fault, FaultKind};

use crate::access::Access;
use crate::capture::forbidden;
use crate::context::{Context, here};
use crate::device::Device;
use crate::graph_memory;
use crate::pool::Pool;
use crate::status::{Failure, Result, Status, present};
use crate::stream::{submit, synchronize_all};
use crate::task::{Progress, Task};
use crate::world::world;

/// A fault as the driver tells it.
pub(crate) fn failure(fault: &Fault) -> Failure {
    let status = match fault.kind {
        FaultKind::OutOfBounds | FaultKind::InvalidFree => Status::ILLEGAL_ADDRESS,
        FaultKind::Misaligned => Status::MISALIGNED_ADDRESS,
        FaultKind::Assert => Status::ASSERT,
        FaultKind::Deadlock | FaultKind::Endless => Status::LAUNCH_TIMEOUT,
        FaultKind::Unsupported => Status::ILLEGAL_INSTRUCTION,
        FaultKind::BadLaunch => Status::INVALID_VALUE,
        _ => Status::LAUNCH_FAILED,
    };
    status.because(fault.to_string())
}

/// Allocates now. If memory is short, what is queued runs first: it may free some.
pub(crate) fn allocate(device: &Device, bytes: u64) -> Result<u64> {
    if bytes == 0 {
        return Err(Status::INVALID_VALUE.because("an allocation of 0 bytes"));
    }
    if let Ok(address) = device.memory.allocate(bytes) {
        return Ok(address);
    }
    let world = world()?;
    for context in world.contexts.all().iter().filter(|context| context.ordinal == device.ordinal) {
        synchronize_all(world, context.id);
    }
    device.memory.allocate(bytes).map_err(|error| Status::OUT_OF_MEMORY.because(error.to_string()))
}

/// Allocates in stream order: the address is known at once, the memory is there behind what is queued.
pub(crate) fn allocate_async(bytes: usize, stream: usize, pool: Option<&Arc<Pool>>) -> Result<u64> {
    let world = world()?;
    let (lane, context) = {
        let mut lanes = world.lanes();
        let lane = lanes.find(stream)?;
        (lane, lanes.lane(lane)?.context.clone())
    };
    let device = pool.map_or(context.ordinal, |pool| pool.ordinal);
    let device = &world.devices[device];
    let address = allocate(device, bytes as u64)?;
    if let Some(capture) = world.lanes().capture_of(lane)? {
        capture.memory.allocated(address);
    }
    let what = format!("an allocation of {bytes} bytes");
    let run = move |_| {
        graph_memory::set_allocated(address);
        Progress::Done(Vec::new())
    };
    submit(stream, Task::new(what, &context, run).touching([Access::write(address, bytes as u64)]))?;
    crate::pool::used(world, device, pool);
    Ok(address)
}

fn free_async(address: u64, stream: usize) -> Result<()> {
    let world = world()?;
    let (device, start, bytes) = allocation(address)?;
    let context = {
        let mut lanes = world.lanes();
        let lane = lanes.find(stream)?;
        let context = lanes.lane(lane)?.context.clone();
        if let Some(capture) = lanes.capture_of(lane)? {
            capture.memory.freed(address)?;
            let run = move |_| Progress::from(graph_memory::set_freed(start).unwrap_or(Ok(())));
            let task = Task::new("a free", &context, run).touching([Access::write(start, bytes)]);
            return lanes.enqueue(world, lane, Arc::new(task)).map(|_| ());
        }
        context
    };
    graph_memory::free_queued(start);
    let run = move |_| {
        let freed = graph_memory::set_freed(start);
        Progress::from(freed.unwrap_or_else(|| device.memory.free(start).map_err(|fault| failure(&fault))))
    };
    let task = Task::new(format!("the free of {bytes} bytes"), &context, run);
    submit(stream, task.touching([Access::write(start, bytes)])).map(|_| ())
}

/// The device, the start and the bytes of the allocation that begins at an address.
fn allocation(address: u64) -> Result<(&'static Device, u64, u64)> {
    let unknown = || Status::INVALID_VALUE.because(format!("no allocation begins at {address:#x}"));
    let device = world()?.device_of(address).ok_or_else(unknown)?;
    let (start, bytes) =
        device.memory.allocation(address).filter(|(start, _)| *start == address).ok_or_else(unknown)?;
    Ok((device, start, bytes))
}

/// Frees now, when everything queued on the device has run, as the driver may do; so no queued work can lose its
/// memory by it.
fn free(address: u64, context: &Context) -> Result<()> {
    let (device, start, _) = allocation(address)?;
    synchronize_all(context.world(), context.id);
    graph_memory::free_queued(start);
    graph_memory::set_freed(start)
        .unwrap_or_else(|| device.memory.free(start).map_err(|fault| failure(&fault)))
}

export! {
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        forbidden("cuMemAlloc")?;
        set!(address, allocate(here()?.device(), bytes as u64)?)
    }
    fn cuMemAllocPitch_v2(address: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        forbidden("cuMemAllocPitch")?;
        let row = width.next_multiple_of(512);
        set!(pitch, row)?;
        set!(address, allocate(here()?.device(), row as u64 * height as u64)?)
    }
    fn cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: u32) {
        Err(Status::NOT_SUPPORTED.because("managed memory is not emulated"))
    }
    fn cuMemFree_v2(address: u64) {
        if address == 0 {
            return Ok(());
        }
        forbidden("cuMemFree")?;
        free(address, &*here()?)
    }
    fn cuMemAllocAsync(address: Out<u64>, bytes: usize, stream: usize) {
        set!(address, allocate_async(bytes, stream, None)?)
    }
    fn cuMemAllocFromPoolAsync(address: Out<u64>, bytes: usize, pool: usize, stream: usize) {
        let pool = world()?.pools.get(pool)?;
        set!(address, allocate_async(bytes, stream, Some(&pool))?)
    }
    fn cuMemFreeAsync(address: u64, stream: usize) {
        if address == 0 { Ok(()) } else { free_async(address, stream) }
    }
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let memory = &here()?.device().memory;
        set!(free, (memory.capacity() - memory.used()) as usize)?;
        set!(total, memory.capacity() as usize)
    }
    fn cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<usize>, address: u64) {
        let found = world()?.device_of(address).and_then(|device| device.memory.allocation(address));
        let (start, size) = found.ok_or_else(|| Status::NOT_FOUND.because(format!("{address:#x} is not allocated")))?;
        if !base.is_null() {
            set!(base, start)?;
        }
        if bytes.is_null() { Ok(()) } else { present(bytes.set(size as usize), "bytes") }
    }
}
