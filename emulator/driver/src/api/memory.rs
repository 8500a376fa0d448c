//! Device memory and its pools, page-locked memory, what an address is, copies and fills.

use std::sync::Arc;

use phalanx_emulator_link::pointer::{Host, In, Out};

use crate::capture::forbidden;
use crate::context::here;
use crate::copy::{End, Rows, Shape, copy, copy_async, end, fill, fill_async};
use crate::device::{device, device_of, devices};
use crate::host;
use crate::ledger::{self, Kind};
use crate::memory::{
    POOLS, Pool, READ_WRITE, allocate, allocate_async, default_pools, free, free_async, freed,
    set_current_pool,
};
use crate::status::{Result, Status, present};

/// A place that memory is used from.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    kind: i32,
    ordinal: i32,
}

/// The access that a device has to a pool: none (0), reads (1), or [`READ_WRITE`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolAccess {
    location: Location,
    flags: i32,
}

/// The first fields of `CUmemPoolProps`; the emulator does not read the others.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Properties {
    allocation: i32,
    handles: i32,
    location: i32,
    ordinal: i32,
}

fn get_attribute(pool: usize, attribute: i32, value: Host) -> Result<()> {
    let pool = POOLS.get(pool)?;
    let device = &devices()?[pool.ordinal];
    let unknown = || Status::INVALID_VALUE.because(format!("pool attribute {attribute}"));
    let found = pool.get(attribute, device).ok_or_else(unknown)?;
    // The first three are `int`, the others `cuuint64_t`.
    let done = if attribute <= 3 { value.set(found as i32) } else { value.set(found) };
    present(done, "value")
}

fn set_attribute(pool: usize, attribute: i32, value: Host) -> Result<()> {
    let pool = POOLS.get(pool)?;
    let given = if attribute <= 3 { value.get::<i32>().map(|v| v as u64) } else { value.get::<u64>() };
    pool.set(attribute, present(given, "value")?)
}

fn set_access(pool: usize, all: &[PoolAccess]) -> Result<()> {
    const DEVICE: i32 = 1;
    let pool = POOLS.get(pool)?;
    for PoolAccess { location, flags } in all {
        let there = device(location.ordinal)?.ordinal;
        if location.kind != DEVICE || ![0, 1, READ_WRITE].contains(flags) {
            let why = format!("access {flags} for a location of kind {}", location.kind);
            return Err(Status::INVALID_VALUE.because(why));
        }
        if there == pool.ordinal && *flags != READ_WRITE {
            return Err(Status::INVALID_VALUE.because("a device always reads and writes its own pools"));
        }
        pool.allow(location.ordinal, *flags);
    }
    Ok(())
}

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

fn query(value: Host, attribute: i32, address: u64) -> Result<()> {
    let on_device = device_of(address).and_then(|d| Some((d, d.memory.allocation(address)?)));
    let (kind, ordinal, start, bytes) = match (on_device, host::around(address as usize)) {
        (Some((device, (start, bytes))), _) => (DEVICE, device.ordinal, start, bytes),
        (None, Some((start, bytes, _))) => (HOST, here()?.ordinal, start as u64, bytes as u64),
        (None, None) => {
            return Err(Status::INVALID_VALUE.because(format!("the driver does not know {address:#x}")));
        }
    };
    let done = match attribute {
        2 => value.set(kind),
        3 if kind == DEVICE => value.set(address),
        4 if kind == HOST => value.set(address),
        7 => value.set(start),
        8 => value.set(0_u8),
        9 => value.set(ordinal as i32),
        11 => value.set(start),
        12 => value.set(bytes as usize),
        13 => value.set(1_u8),
        _ => {
            return Err(
                Status::INVALID_VALUE.because(format!("pointer attribute {attribute} of {address:#x}"))
            );
        }
    };
    present(done, "value")
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rectangle {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Side {
    x: usize,
    y: usize,
    kind: i32,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

impl Side {
    fn end(self) -> Result<End> {
        let offset = self.y * self.pitch + self.x;
        match self.kind {
            1 => Ok(End::Host(self.host + offset)),
            2 => Ok(End::Device(self.device + offset as u64)),
            4 => end(self.device + offset as u64),
            _ => Err(Status::NOT_SUPPORTED.because("arrays are not emulated")),
        }
    }
}

fn rectangle(copy: In<Rectangle>) -> Result<(End, End, Shape)> {
    let Rectangle { from, to, width, height } = present(copy.get(), "copy")?;
    let pitch = |side: Side| if side.pitch == 0 { width } else { side.pitch };
    let shape = Shape { width, height, to_pitch: pitch(to), from_pitch: pitch(from) };
    if shape.to_pitch < width || shape.from_pitch < width {
        return Err(Status::INVALID_VALUE.because("rows are wider than they are apart"));
    }
    Ok((to.end()?, from.end()?, shape))
}

export! {
    @always {
        fn cuDeviceGetDefaultMemPool(pool: Out<usize>, ordinal: i32) {
            set!(pool, default_pools(device(ordinal)?.ordinal).0)
        }
        fn cuDeviceGetMemPool(pool: Out<usize>, ordinal: i32) {
            set!(pool, default_pools(device(ordinal)?.ordinal).1)
        }
        fn cuDeviceSetMemPool(ordinal: i32, pool: usize) {
            let device = device(ordinal)?;
            if POOLS.get(pool)?.ordinal != device.ordinal {
                return Err(Status::INVALID_VALUE.because("the pool is another device's"));
            }
            set_current_pool(device.ordinal, pool);
            Ok(())
        }
    }
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        forbidden("cuMemAlloc")?;
        let start = allocate(here()?.device(), bytes as u64)?;
        ledger::made(Kind::Allocation, start as usize, bytes as u64, "cuMemAlloc");
        set!(address, start)
    }
    fn cuMemAllocPitch_v2(address: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        forbidden("cuMemAllocPitch")?;
        let row = width.next_multiple_of(512);
        set!(pitch, row)?;
        let start = allocate(here()?.device(), row as u64 * height as u64)?;
        ledger::made(Kind::Allocation, start as usize, row as u64 * height as u64, "cuMemAllocPitch");
        set!(address, start)
    }
    fn cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: u32) {
        Err(Status::NOT_SUPPORTED.because("managed memory is not emulated"))
    }
    fn cuMemFree_v2(address: u64) {
        if address == 0 {
            return Ok(());
        }
        freed(forbidden("cuMemFree").and_then(|()| free(address, &*here()?)), "cuMemFree")
    }
    fn cuMemAllocAsync(address: Out<u64>, bytes: usize, stream: usize) {
        set!(address, allocate_async(bytes, stream, None)?)
    }
    fn cuMemAllocFromPoolAsync(address: Out<u64>, bytes: usize, pool: usize, stream: usize) {
        let pool = POOLS.get(pool)?;
        set!(address, allocate_async(bytes, stream, Some(&pool))?)
    }
    fn cuMemFreeAsync(address: u64, stream: usize) {
        if address == 0 { Ok(()) } else { freed(free_async(address, stream), "cuMemFreeAsync") }
    }
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let memory = &here()?.device().memory;
        set!(free, (memory.capacity() - memory.used()) as usize)?;
        set!(total, memory.capacity() as usize)
    }
    fn cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<usize>, address: u64) {
        let found = device_of(address).and_then(|device| device.memory.allocation(address));
        let (start, size) = found.ok_or_else(|| Status::NOT_FOUND.because(format!("{address:#x} is not allocated")))?;
        if !base.is_null() {
            set!(base, start)?;
        }
        if bytes.is_null() { Ok(()) } else { present(bytes.set(size as usize), "bytes") }
    }
    fn cuMemPoolCreate(pool: Out<usize>, properties: In<Properties>) {
        let wanted = present(properties.get(), "properties")?;
        let device = device(wanted.ordinal)?;
        set!(pool, POOLS.add(Arc::new(Pool::new(device.ordinal))))
    }
    fn cuMemPoolDestroy(pool: usize) {
        let found = POOLS.get(pool)?;
        if default_pools(found.ordinal).0 == pool {
            return Err(Status::INVALID_VALUE.because("a device's default pool cannot be destroyed"));
        }
        Ok(POOLS.remove(pool).map(drop)?)
    }
    fn cuMemPoolGetAttribute(pool: usize, attribute: i32, value: Host) { get_attribute(pool, attribute, value) }
    fn cuMemPoolSetAttribute(pool: usize, attribute: i32, value: Host) { set_attribute(pool, attribute, value) }
    fn cuMemPoolTrimTo(pool: usize, bytes: usize) { Ok(POOLS.get(pool).map(drop)?) }
    fn cuMemPoolSetAccess(pool: usize, access: In<PoolAccess>, count: usize) {
        set_access(pool, &access.list(count))
    }
    fn cuMemPoolGetAccess(flags: Out<i32>, pool: usize, location: In<Location>) {
        let (pool, location) = (POOLS.get(pool)?, present(location.get(), "location")?);
        set!(flags, pool.allowed(location.ordinal))
    }
    fn cuMemHostAlloc(out: Out<usize>, bytes: usize, flags: u32) { set!(out, host::allocate(bytes, flags)?) }
    fn cuMemAllocHost_v2(out: Out<usize>, bytes: usize) { set!(out, host::allocate(bytes, 0)?) }
    fn cuMemFreeHost(address: usize) { host::unlock(address, true, "cuMemFreeHost") }
    fn cuMemHostRegister_v2(address: Host, bytes: usize, flags: u32) {
        here()?;
        if address.is_null() || bytes == 0 {
            return Err(Status::INVALID_VALUE.because("nothing to register"));
        }
        host::register(address.address(), bytes, flags)
    }
    fn cuMemHostUnregister(address: usize) { host::unlock(address, false, "cuMemHostUnregister") }
    fn cuMemHostGetDevicePointer_v2(out: Out<u64>, address: usize, flags: u32) {
        Err(Status::NOT_SUPPORTED.because("kernels cannot reach memory of the host here: copy it"))
    }
    fn cuMemHostGetFlags(flags: Out<u32>, address: usize) {
        let (_, _, found) = present(host::around(address), "address")?;
        set!(flags, found)
    }
    fn cuPointerGetAttribute(value: Host, attribute: i32, address: u64) { query(value, attribute, address) }
    fn cuPointerGetAttributes(count: u32, attributes: In<i32>, values: In<Host>, address: u64) {
        for (attribute, value) in attributes.list(count as usize).into_iter().zip(values.list(count as usize)) {
            // Unknown addresses are of no type, which is no error here.
            if query(value, attribute, address).is_err() {
                present(value.set(0_u32), "a value")?;
            }
        }
        Ok(())
    }
    fn cuMemcpy(to: u64, from: u64, bytes: usize) { copy(end(to)?, end(from)?, Shape::line(bytes)) }
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize) {
        copy_async(end(to)?, end(from)?, Shape::line(bytes), stream)
    }
    fn cuMemcpyHtoD_v2(to: u64, from: Host, bytes: usize) {
        copy(End::Device(to), End::Host(from.address()), Shape::line(bytes))
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: Host, bytes: usize, stream: usize) {
        copy_async(End::Device(to), End::Host(from.address()), Shape::line(bytes), stream)
    }
    fn cuMemcpyDtoH_v2(to: Host, from: u64, bytes: usize) {
        copy(End::Host(to.address()), End::Device(from), Shape::line(bytes))
    }
    fn cuMemcpyDtoHAsync_v2(to: Host, from: u64, bytes: usize, stream: usize) {
        copy_async(End::Host(to.address()), End::Device(from), Shape::line(bytes), stream)
    }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        copy(End::Device(to), End::Device(from), Shape::line(bytes))
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        copy_async(End::Device(to), End::Device(from), Shape::line(bytes), stream)
    }
    fn cuMemcpyPeer(to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize) {
        copy(End::Device(to), End::Device(from), Shape::line(bytes))
    }
    fn cuMemcpyPeerAsync(
        to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize, stream: usize,
    ) {
        copy_async(End::Device(to), End::Device(from), Shape::line(bytes), stream)
    }
    fn cuMemcpy2D_v2(wanted: In<Rectangle>) {
        let (to, from, shape) = rectangle(wanted)?;
        copy(to, from, shape)
    }
    fn cuMemcpy2DUnaligned_v2(wanted: In<Rectangle>) {
        let (to, from, shape) = rectangle(wanted)?;
        copy(to, from, shape)
    }
    fn cuMemcpy2DAsync_v2(wanted: In<Rectangle>, stream: usize) {
        let (to, from, shape) = rectangle(wanted)?;
        copy_async(to, from, shape, stream)
    }
    fn cuMemsetD8_v2(address: u64, value: u8, count: usize) { fill(address, vec![value], Rows::line(count)) }
    fn cuMemsetD16_v2(address: u64, value: u16, count: usize) {
        fill(address, value.to_le_bytes().to_vec(), Rows::line(count))
    }
    fn cuMemsetD32_v2(address: u64, value: u32, count: usize) {
        fill(address, value.to_le_bytes().to_vec(), Rows::line(count))
    }
    fn cuMemsetD8Async(address: u64, value: u8, count: usize, stream: usize) {
        fill_async(address, vec![value], Rows::line(count), stream)
    }
    fn cuMemsetD16Async(address: u64, value: u16, count: usize, stream: usize) {
        fill_async(address, value.to_le_bytes().to_vec(), Rows::line(count), stream)
    }
    fn cuMemsetD32Async(address: u64, value: u32, count: usize, stream: usize) {
        fill_async(address, value.to_le_bytes().to_vec(), Rows::line(count), stream)
    }
    fn cuMemsetD2D8_v2(address: u64, pitch: usize, value: u8, width: usize, height: usize) {
        fill(address, vec![value], Rows { pitch, width, height })
    }
    fn cuMemsetD2D16_v2(address: u64, pitch: usize, value: u16, width: usize, height: usize) {
        fill(address, value.to_le_bytes().to_vec(), Rows { pitch, width, height })
    }
    fn cuMemsetD2D32_v2(address: u64, pitch: usize, value: u32, width: usize, height: usize) {
        fill(address, value.to_le_bytes().to_vec(), Rows { pitch, width, height })
    }
    fn cuMemsetD2D8Async(address: u64, pitch: usize, value: u8, width: usize, height: usize, stream: usize) {
        fill_async(address, vec![value], Rows { pitch, width, height }, stream)
    }
    fn cuMemsetD2D16Async(address: u64, pitch: usize, value: u16, width: usize, height: usize, stream: usize) {
        fill_async(address, value.to_le_bytes().to_vec(), Rows { pitch, width, height }, stream)
    }
    fn cuMemsetD2D32Async(address: u64, pitch: usize, value: u32, width: usize, height: usize, stream: usize) {
        fill_async(address, value.to_le_bytes().to_vec(), Rows { pitch, width, height }, stream)
    }
}
