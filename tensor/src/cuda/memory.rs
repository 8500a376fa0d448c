//! Stream-ordered memory and the copies to, from and between GPUs.
//!
//! Memory comes from the driver's pool, which keeps what was freed. A block is obtained and freed in the order of the
//! stream that was current when it was obtained, so that one operation's scratch is the next one's without anybody
//! waiting.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::calls::{count_allocation, count_wait};
use super::driver::{self, CUstream};
use super::gather::gather;
use super::{Gpu, GpuEvent, graph};
use crate::{Error, Result, Tensor};

/// A piece of a GPU's memory.
pub(crate) struct DeviceBlock {
    gpu: &'static Gpu,
    address: u64,
    bytes: usize,
    stream: CUstream,
}

// SAFETY: an address and a stream's handle mean the same on every thread.
unsafe impl Send for DeviceBlock {}
// SAFETY: `&DeviceBlock` gives out nothing but the address.
unsafe impl Sync for DeviceBlock {}

impl DeviceBlock {
    pub(super) fn obtain(op: &'static str, bytes: usize, gpu: &'static Gpu) -> Result<DeviceBlock> {
        gpu.bind(op)?;
        let stream = gpu.stream();
        count_allocation();
        // SAFETY: the stream exists.
        let address = unsafe { driver::allocate(bytes, stream) };
        let address = address.map_err(|failure| match failure.is_out_of_memory() {
            true => Error::out_of_memory(op, gpu.device(), bytes),
            false => gpu.failed(op, &failure),
        })?;
        gpu.device().ledger()?.obtained_add(bytes);
        Ok(DeviceBlock { gpu, address, bytes, stream })
    }

    /// Where it begins, on the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        if let Ok(ledger) = self.gpu.device().ledger() {
            ledger.obtained_sub(self.bytes);
        }
        // A failure means that the device is lost, and its memory with it.
        if self.gpu.bind("free").is_ok() {
            // SAFETY: the block came from this stream, whose work is all that uses it: other streams' users keep the
            // tensor until their work is done (`record_stream`).
            let _ = unsafe { driver::free(self.address, self.stream) };
        }
    }
}

/// Memory of the host that a GPU copies from and to without the driver's help, so that the copy runs beside everything
/// else.
pub struct Pinned {
    start: NonNull<u8>,
    bytes: usize,
    gpu: &'static Gpu,
}

// SAFETY: it owns its memory alone.
unsafe impl Send for Pinned {}
// SAFETY: shared access only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` zeros.
    ///
    /// # Errors
    /// If the system has no more memory that can be pinned.
    pub fn zeros(gpu: &'static Gpu, bytes: usize) -> Result<Pinned> {
        gpu.bind("pinned")?;
        count_allocation();
        let start = gpu.called("pinned", driver::host_allocate(bytes.max(1)))?;
        let lost = || Error::out_of_memory("pinned", gpu.device(), bytes);
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(lost)?;
        // SAFETY: the driver gave at least `bytes`.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Pinned { start, bytes, gpu })
    }
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `bytes` initialised bytes, which live as long as this.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `Deref`, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.bind("pinned").is_ok() {
            // SAFETY: it came from `host_allocate`; copies by way of it are waited for where they are made.
            let _ = unsafe { driver::host_free(self.start.as_ptr().cast()) };
        }
    }
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pinned({} bytes)", self.bytes)
    }
}

/// Copies `from`'s elements into the contiguous `to`, of one shape and dtype; at least one of them is on a GPU.
pub(crate) fn copy_strided(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let (source, target) = (from.device(), to.device());
    match (source.is_cuda(), target.is_cuda()) {
        (true, true) if source == target => within(op, to, from),
        _ if !from.is_contiguous() => copy_strided(op, to, &from.contiguous()?),
        (true, true) => between(op, to, from),
        (true, false) => to_host(op, to, from),
        (false, _) => from_host(op, to, from),
    }
}

/// Sets all bytes of a tensor that covers its storage.
pub(crate) fn zero(op: &'static str, to: &mut Tensor) -> Result<()> {
    let gpu = to.device().gpu()?;
    gpu.bind(op)?;
    let bytes = to.numel() * to.dtype().size();
    if bytes == 0 {
        return Ok(());
    }
    let address = to.device_address();
    let _lock = to.lock_write(op)?;
    // SAFETY: the stream and the memory exist.
    gpu.called(op, unsafe { driver::fill(address, 0, bytes, gpu.stream()) })
}

fn bytes_of(tensor: &Tensor) -> (usize, usize) {
    let size = tensor.dtype().size();
    (tensor.offset() * size, tensor.numel() * size)
}

fn from_host(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let gpu = to.device().gpu()?;
    gpu.bind(op)?;
    let (start, len) = bytes_of(from);
    let source = from.read_bytes(op)?;
    let address = to.device_address();
    let _lock = to.lock_write(op)?;
    graph::from_host(gpu, &source[start..][..len], |bytes| {
        // SAFETY: the tensor's memory is as large, and is freed in the stream's order.
        unsafe { gpu.upload(op, address, bytes) }
    })
}

fn to_host(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let gpu = from.device().gpu()?;
    gpu.bind(op)?;
    let (start, len) = bytes_of(to);
    count_wait();
    {
        let _lock = from.lock_read(op)?;
        let mut target = to.write_bytes(op)?;
        // SAFETY: stream and memory exist, and the copy is waited for before either can go.
        unsafe {
            let target = &mut target[start..][..len];
            gpu.called(op, driver::to_host(target, from.device_address(), gpu.stream()))?;
            gpu.called(op, driver::synchronize(gpu.stream()))?;
        }
    }
    gpu.check_faults()
}

/// Between devices: the copy runs on the target's stream, after what the source's has been given, and what the source's
/// is given later waits for it.
fn between(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let (source, target) = (from.device().gpu()?, to.device().gpu()?);
    let (_, len) = bytes_of(from);
    GpuEvent::record(source)?.order(target)?;
    target.bind(op)?;
    {
        let (at, read_at, stream) = (to.device_address(), from.device_address(), target.stream());
        let _locks = (from.lock_read(op)?, to.lock_write(op)?);
        // SAFETY: stream, contexts and memory exist: the source's stream waits below before it frees anything.
        let copied = unsafe {
            match source.shares_gpu(target) {
                true => driver::copy(at, read_at, len, stream),
                false => {
                    let (to, from) = ((at, target.context()), (read_at, source.context()));
                    driver::copy_peer(to, from, len, stream)
                }
            }
        };
        target.called(op, copied)?;
    }
    GpuEvent::record(target)?.order(source)
}

/// On one device.
fn within(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let gpu = to.device().gpu()?;
    let (_, len) = bytes_of(from);
    if from.is_contiguous() {
        gpu.bind(op)?;
        let (at, read_at) = (to.device_address(), from.device_address());
        let _locks = (from.lock_read(op)?, to.lock_write(op)?);
        // SAFETY: the stream and the memory exist.
        return gpu.called(op, unsafe { driver::copy(at, read_at, len, gpu.stream()) });
    }
    gather(op, to, from)
}
