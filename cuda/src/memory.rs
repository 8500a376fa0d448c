//! Stream-ordered device memory, pinned host memory, and the copies to, from and between GPUs.
//!
//! Device memory comes from the driver's pool, which keeps what was freed. A block is obtained and freed in the order of the stream
//! that was current when it was obtained. So the scratch memory of one operation is the next operation's, without a wait. A block
//! that other streams use too is freed on a stream that waits for all of them (`Context::free_after`).
//!
//! An upload of a batch's size goes through pinned memory, because the driver waits for a stream's work before it copies from
//! ordinary memory (CUDA driver API, "API synchronization behavior"). While a thread captures a graph, its uploads copy from pinned
//! memory that the graph keeps, since each launch of the graph repeats them.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ops::{Deref, DerefMut, RangeInclusive};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use crate::capture::{Free, capture_of, is_capturing};
use crate::context::{Context, GpuEvent, count_allocation, lock};
use crate::driver::{self, CUstream};
use crate::lane::LaneStream;
use crate::trace::Work;
use crate::vendor::Failure;
use crate::{Error, Result};

/// A piece of a GPU's memory.
pub struct DeviceBlock {
    context: &'static Context,
    address: u64,
    bytes: usize,
    /// The capture in which it was allocated; 0 for none.
    capture: u64,
    users: Mutex<Users>,
}

/// The streams that use a block.
struct Users {
    /// In whose order it is freed.
    home: CUstream,
    /// How far other streams have used it.
    others: Vec<GpuEvent>,
}

// SAFETY: an address and a stream's handle mean the same on every thread.
unsafe impl Send for DeviceBlock {}
// SAFETY: `&DeviceBlock` gives out nothing but the address; what changes is behind a lock.
unsafe impl Sync for DeviceBlock {}

impl DeviceBlock {
    /// The first byte's address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The block is freed after `event` too, up to which another stream uses it.
    pub fn used_until(&self, event: GpuEvent) {
        lock(&self.users).others.push(event);
    }

    /// The block is freed in the order of this thread's current stream from now on. That stream has been made to wait for all
    /// that others have done with the block.
    pub fn adopt(&self) {
        lock(&self.users).home = self.context.stream();
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        self.context.count_memory(-(self.bytes as isize));
        let Users { home, others } = self.users.get_mut().unwrap_or_else(PoisonError::into_inner);
        // A failure means that the device is lost, and its memory with it.
        if self.context.bind("free").is_ok() {
            let (home, others) = (LaneStream(*home), std::mem::take(others));
            self.context.free(Free { address: self.address, home, others, capture: self.capture });
        }
    }
}

/// Host memory that a GPU reads and writes without the driver's help, so that a copy runs beside other work.
pub struct Pinned {
    start: NonNull<u8>,
    bytes: usize,
    context: &'static Context,
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
    pub fn zeros(gpu: &'static Context, bytes: usize) -> Result<Pinned> {
        gpu.bind("pinned")?;
        count_allocation();
        let start = gpu.called("pinned", driver::host_allocate(bytes.max(1)))?;
        let lost = || Error::OutOfMemory { op: "pinned", index: gpu.index(), bytes };
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(lost)?;
        // SAFETY: the driver gave at least `bytes`.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Pinned { start, bytes, context: gpu })
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
        if self.context.bind("pinned").is_ok() {
            // SAFETY: it came from `host_allocate`; the code that copies from or to it waits for the copy before it drops this.
            let _ = unsafe { driver::host_free(self.start.as_ptr().cast()) };
        }
    }
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pinned({} bytes)", self.bytes)
    }
}

/// Memory and copies, in the order of this thread's current stream.
impl Context {
    /// `bytes` of device memory, whatever it holds.
    ///
    /// # Errors
    /// If the device has no more.
    pub fn allocate(&'static self, op: &'static str, bytes: usize) -> Result<DeviceBlock> {
        self.bind(op)?;
        let stream = self.stream();
        count_allocation();
        // SAFETY: the stream exists.
        let address = unsafe { driver::allocate(bytes, stream) };
        let address = address.map_err(|failure| match failure.is_out_of_memory() {
            true => Error::OutOfMemory { op, index: self.index(), bytes },
            false => self.failed(op, &failure),
        })?;
        self.count_memory(bytes as isize);
        let users = Mutex::new(Users { home: stream, others: Vec::new() });
        Ok(DeviceBlock { context: self, address, bytes, capture: capture_of(stream), users })
    }

    /// Frees memory of `home`, which other streams have used until `uses`, once all of them have come so far. None of them waits
    /// for another.
    ///
    /// # Safety
    /// The memory came from this device's pool, and nothing uses it any more but what was queued before.
    pub(crate) unsafe fn free_after(
        &self,
        address: u64,
        home: CUstream,
        uses: &[GpuEvent],
    ) -> Result<(), Failure> {
        let frees = match self.frees.get() {
            Some(frees) => frees.0,
            None => {
                let new = LaneStream(driver::stream()?);
                self.frees.get_or_init(|| new).0
            }
        };
        let last = driver::event(false)?;
        // SAFETY: streams and events exist, and the memory by the caller.
        unsafe {
            driver::record(last, home)?;
            for event in uses.iter().map(|event| event.event).chain([last]) {
                driver::wait(frees, event)?;
            }
            driver::event_destroy(last)?;
            driver::free(address, frees)
        }
    }

    /// Sets `bytes` bytes of device memory to `byte`.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Safety
    /// There is as much memory at `to`, and it lives until the stream has come so far.
    pub unsafe fn fill(&'static self, op: &'static str, to: u64, byte: u8, bytes: usize) -> Result<()> {
        self.bind(op)?;
        // SAFETY: the stream exists, and the memory by the caller.
        let queue = || self.called(op, unsafe { driver::fill(to, byte, bytes, self.stream()) });
        self.traced(op, Work::Copy { how: "set", bytes }, queue)
    }

    /// Copies device memory to the host, and waits for it.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Safety
    /// There is as much memory at `from`.
    pub unsafe fn copy_to_host(&'static self, op: &'static str, to: &mut [u8], from: u64) -> Result<()> {
        self.bind(op)?;
        // SAFETY: the stream exists, the memory does by the caller, and the copy is waited for before either can go.
        unsafe { self.start_copy_to_host(op, to, from)? };
        self.wait(op)
    }

    /// Copies `bytes` bytes to this device from a logical device, which may be another one. The caller orders the copy with the work
    /// of the other device's stream.
    ///
    /// # Errors
    /// If a device is lost.
    ///
    /// # Safety
    /// There is as much memory at `to` and `from`, and it lives until this device's stream has come so far.
    pub unsafe fn copy_from(
        &'static self,
        op: &'static str,
        to: u64,
        (source, from): (&Context, u64),
        bytes: usize,
    ) -> Result<()> {
        self.bind(op)?;
        let stream = self.stream();
        // SAFETY: stream and contexts exist, and the memory by the caller.
        let copy = || unsafe {
            match source.ordinal() == self.ordinal() {
                true => driver::copy(to, from, bytes, stream),
                false => driver::copy_peer((to, self.handle()), (from, source.handle()), bytes, stream),
            }
        };
        self.traced(op, Work::Copy { how: "device to device", bytes }, || self.called(op, copy()))
    }

    /// As [`Context::copy_to_host`] without the wait.
    ///
    /// # Safety
    /// As there, and `to` stays until the stream has come so far.
    pub(crate) unsafe fn start_copy_to_host(
        &'static self,
        op: &'static str,
        to: &mut [u8],
        from: u64,
    ) -> Result<()> {
        let work = Work::Copy { how: "device to host", bytes: to.len() };
        // SAFETY: the stream exists, and the memory by the caller.
        self.traced(op, work, || self.called(op, unsafe { driver::to_host(to, from, self.stream()) }))
    }

    /// Copies the host's bytes to `to`, which has room for them. The driver has read pageable memory when this returns.
    ///
    /// # Safety
    /// As [`Context::fill`]; pinned memory stays as it is until the stream has come so far.
    pub(crate) unsafe fn copy_from_host(&'static self, op: &'static str, to: u64, from: &[u8]) -> Result<()> {
        let work = Work::Copy { how: "host to device", bytes: from.len() };
        // SAFETY: the stream exists, and the memory by the caller.
        self.traced(op, work, || self.called(op, unsafe { driver::from_host(to, from, self.stream()) }))
    }
}

/// Sizes of uploads that go through pinned memory. The driver takes smaller ones without a wait; larger ones are rare and would keep
/// much memory.
const STAGED_BYTES: RangeInclusive<usize> = 64 << 10..=4 << 20;
/// Uploads in flight at a time.
const STAGED_MAX: usize = 4;

/// A device's pinned memory for uploads.
#[derive(Default)]
pub(crate) struct Uploads(Mutex<Vec<Staging>>);

struct Staging {
    memory: Pinned,
    /// The end of the copy out of it.
    done: GpuEvent,
}

impl Uploads {
    /// Copies the host's bytes to `to` on a device. They may change once this returns.
    ///
    /// # Safety
    /// As [`Context::fill`].
    pub(crate) unsafe fn copy(
        &self,
        context: &'static Context,
        op: &'static str,
        to: u64,
        bytes: &[u8],
    ) -> Result<()> {
        context.bind(op)?;
        if !is_capturing() {
            // SAFETY: by the caller.
            return unsafe { self.stage(context, op, to, bytes) };
        }
        let mut kept = Pinned::zeros(context, bytes.len())?;
        kept.copy_from_slice(bytes);
        // SAFETY: by the caller; the graph keeps the pinned memory as it is.
        unsafe { self.stage(context, op, to, &kept)? };
        CONSTANTS.with_borrow_mut(|constants| constants.push(kept));
        Ok(())
    }

    /// # Safety
    /// As [`Uploads::copy`].
    unsafe fn stage(&self, context: &'static Context, op: &'static str, to: u64, bytes: &[u8]) -> Result<()> {
        let mut staged = lock(&self.0);
        let fits = STAGED_BYTES.contains(&bytes.len());
        let memory = if fits { idle(context, &mut staged, bytes.len())? } else { None };
        let Some(mut memory) = memory else {
            drop(staged);
            // SAFETY: by the caller.
            return unsafe { context.copy_from_host(op, to, bytes) };
        };
        memory[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: by the caller; the pinned memory stays as it is until the event below, but where an error loses the device.
        unsafe { context.copy_from_host(op, to, &memory[..bytes.len()])? };
        staged.push(Staging { memory, done: GpuEvent::record(context)? });
        Ok(())
    }
}

/// Pinned memory from which no copy is in flight; none if as many copies are in flight as there may be.
fn idle(context: &'static Context, staged: &mut Vec<Staging>, bytes: usize) -> Result<Option<Pinned>> {
    let more = || Pinned::zeros(context, bytes.next_power_of_two()).map(Some);
    for i in 0..staged.len() {
        if staged[i].done.is_done()? {
            let memory = staged.swap_remove(i).memory;
            return if memory.len() >= bytes { Ok(Some(memory)) } else { more() };
        }
    }
    if staged.len() < STAGED_MAX { more() } else { Ok(None) }
}

thread_local! {
    /// Of a thread that captures: the memory from which the captured uploads copy.
    static CONSTANTS: RefCell<Vec<Pinned>> = const { RefCell::new(Vec::new()) };
}

/// The memory from which the uploads of this thread's capture copy, once it has ended.
pub(crate) fn take_constants() -> Vec<Pinned> {
    CONSTANTS.take()
}
