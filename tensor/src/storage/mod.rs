//! [`Storage`]: a tensor's bytes, with guards on them, a version that counts writes, and a category for the ledger.
//!
//! Views share a storage, and a storage may be used from several threads. Reading and writing go through guards
//! that keep the rule of Rust's references at run time: any number of readers, or one writer. A guard that would
//! break it waits for operations of other threads to finish. One that waits longer than any operation takes, or for
//! a guard of its own thread, gives up with [`Error::Busy`].
#![allow(unsafe_code)]

pub(crate) mod arrival;
pub(crate) mod guard;

use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::allocator::Block;
use crate::cuda::DeviceBlock;
use crate::host_memory::Place;
use crate::resources::State;
use crate::sync::lock;
use crate::{Category, Context, Device, Error, HostMemory, Layout, Result};

pub use arrival::{Delivering, delivering};
use guard::{Handles, Hold, InUse, Users, token};
pub use guard::{Read, Write};

/// How long a guard waits for another thread's.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// How long it waits where only guards taken by its own thread stand in the way: those can go only if they were
/// moved to another thread.
const WAIT_SELF_MAX: Duration = Duration::from_millis(100);

/// Memory of one device, counted in its ledger.
pub struct Storage {
    handles: Handles,
    users: InUse,
    version: AtomicU64,
    block: Option<Memory>,
    bytes: usize,
    device: Device,
    state: &'static State,
    category: AtomicU8,
    /// Where its memory goes when it is freed.
    origin: Origin,
    /// A number that no other memory has, and how often that memory was used before.
    identity: (u64, u64),
    /// The layout of a tensor that covers the whole storage.
    layout: Layout,
}

/// Where a storage's memory comes from and goes back to.
#[derive(Clone, Copy)]
enum Origin {
    /// Its device's allocator.
    Allocator,
    /// Its device's allocator of pinned memory.
    Pinned,
    /// A mapped file, whose bytes are no category's.
    File,
    /// A GPU's driver.
    Driver,
}

/// Where the bytes are.
enum Memory {
    Host(Block),
    Device(DeviceBlock),
}

/// A counted reference to a storage: an [`std::sync::Arc`] whose last one recycles the storage, header and bytes, for
/// the next tensor.
pub(crate) struct Handle(NonNull<Storage>);

// SAFETY: a handle gives out `&Storage`, which may be shared (`Storage: Sync`), and drops the storage on whichever
// thread is last, which its fields allow (`Storage: Send`).
unsafe impl Send for Handle {}
// SAFETY: as for `Send`.
unsafe impl Sync for Handle {}
const _: fn() = || {
    fn shareable<T: Send + Sync>() {}
    shareable::<Storage>();
};

impl Handle {
    /// Whether it is the only one. Then another can only be made from this one.
    #[inline]
    pub(crate) fn is_sole(&self) -> bool {
        self.handles.is_sole()
    }

    /// Keeps the bytes as they are until the result is dropped, on any thread. A writer waits for that, also on this thread.
    pub(crate) fn hold(&self, op: &'static str) -> Result<Hold> {
        if !self.users.enter_reader(NO_THREAD) {
            self.wait(op, "a writer", NO_THREAD, |users| users.and_reader(NO_THREAD))?;
        }
        Ok(Hold::new(self.clone(), NO_THREAD))
    }

    /// All of the storage, to write.
    #[inline]
    pub(crate) fn write<T: bytemuck::Pod>(&mut self, op: &'static str) -> Result<Write<'_, T>> {
        // While the only handle is borrowed mutably no other guard can exist, so the writer need not be counted.
        // Values that are on their way are waited for, also by the only handle.
        let alone = self.is_sole() && !self.users.now().is_arriving();
        let (entered, counts) = if alone { (0, true) } else { self.enter_writer(op)? };
        if counts {
            // Alone with the storage, so that no atomic addition is needed.
            self.version.store(self.version.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
        Ok(Write::new(self, entered))
    }
}

impl Deref for Handle {
    type Target = Storage;

    #[inline]
    fn deref(&self) -> &Storage {
        // SAFETY: the storage lives until the last handle is dropped, and is not borrowed mutably before.
        unsafe { self.0.as_ref() }
    }
}

impl Clone for Handle {
    #[inline]
    fn clone(&self) -> Handle {
        self.handles.add();
        Handle(self.0)
    }
}

impl Drop for Handle {
    #[inline]
    fn drop(&mut self) {
        if self.handles.remove() {
            // SAFETY: this was the last handle, no other can be made, and guards borrow handles. The pointer came
            // from a box, and every use of the storage has happened before.
            unsafe { Box::from_raw(self.0.as_ptr()) }.recycle();
        }
    }
}

impl Storage {
    /// A storage of `bytes` bytes for a tensor of this shape. The content is unspecified, but initialized memory.
    pub(crate) fn allocate(
        op: &'static str,
        shape: &[usize],
        bytes: usize,
        device: Device,
    ) -> Result<Handle> {
        Storage::make(op, bytes, device, device.state()?, |layout| layout.set_contiguous(shape))
    }

    /// Another of the same size and shape.
    pub(crate) fn like(&self, op: &'static str) -> Result<Handle> {
        Storage::make(op, self.bytes, self.device, self.state, |layout| layout.set_like(&self.layout))
    }

    #[inline]
    fn make(
        op: &'static str,
        bytes: usize,
        device: Device,
        state: &'static State,
        lay_out: impl FnOnce(&mut Layout),
    ) -> Result<Handle> {
        let held = if device.is_meta() { 0 } else { bytes };
        let Context { category, host_memory: HostMemory(place), .. } = Context::current();
        let waiting = match place {
            _ if state.gpu.is_some() => None,
            Place::Pageable => state.allocator.take(held),
            _ => Storage::take_elsewhere(held, state, place),
        };
        let mut storage = match waiting {
            Some(waiting) => waiting,
            None => Storage::obtain(op, held, device, state, place)?,
        };
        match storage.origin {
            Origin::File => state.ledger.on_disk_add(bytes),
            _ => state.ledger.allocated(category, bytes),
        }
        storage.identity.1 += 1;
        storage.bytes = bytes;
        lay_out(&mut storage.layout);
        storage.category = AtomicU8::new(category as u8);
        storage.version = AtomicU64::new(0);
        storage.users = InUse::default();
        storage.handles = Handles::one();
        Ok(Handle(NonNull::from(Box::leak(storage))))
    }

    /// A storage that waits for its next use, if there is one of the size, in memory that is not the usual one.
    #[cold]
    fn take_elsewhere(bytes: usize, state: &'static State, place: Place) -> Option<Box<Storage>> {
        if matches!(place, Place::Pinned(_)) { state.pinned.take(bytes) } else { None }
    }

    /// A storage of newly obtained memory, or of none.
    #[cold]
    fn obtain(
        op: &'static str,
        bytes: usize,
        device: Device,
        state: &'static State,
        place: Place,
    ) -> Result<Box<Storage>> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let identity = (NEXT.fetch_add(1, Ordering::Relaxed), 0);
        let block = match &state.gpu {
            _ if bytes == 0 => None,
            Some(gpu) => Some(Memory::Device(gpu.allocate(op, bytes).map_err(Error::of_gpu)?)),
            None => {
                let block = match place {
                    Place::Pageable => Block::obtain(bytes, &state.ledger),
                    Place::Pinned(index) => Block::pinned(bytes, Device::Cuda(index).gpu()?, &state.ledger)?,
                    Place::File(file) => Block::in_file(bytes, file)?,
                };
                Some(Memory::Host(block.ok_or_else(|| Error::out_of_memory(op, device, bytes))?))
            }
        };
        let (handles, users, version, category) =
            (Handles::one(), InUse::default(), AtomicU64::new(0), AtomicU8::new(0));
        let layout = Layout::contiguous(&[]);
        let origin = match place {
            _ if state.gpu.is_some() => Origin::Driver,
            Place::File(_) => Origin::File,
            Place::Pinned(_) if bytes > 0 => Origin::Pinned,
            _ => Origin::Allocator,
        };
        Ok(Box::new(Storage {
            handles,
            users,
            version,
            block,
            bytes,
            device,
            state,
            category,
            origin,
            identity,
            layout,
        }))
    }

    /// Counts it as freed and keeps it for the next tensor of about its size.
    fn recycle(self: Box<Storage>) {
        let state = self.state;
        if self.users.now().is_arriving() {
            arrival::forget(&self);
        }
        if let Origin::Allocator = self.origin {
            state.ledger.freed(self.category(), self.bytes);
            return state.allocator.recycle(self);
        }
        self.recycle_elsewhere();
    }

    #[cold]
    fn recycle_elsewhere(self: Box<Storage>) {
        let State { ledger, pinned, .. } = self.state;
        match self.origin {
            Origin::File => ledger.on_disk_sub(self.bytes),
            _ => ledger.freed(self.category(), self.bytes),
        }
        // A GPU's memory goes back to the driver's pool, which keeps it in the order of its stream.
        if let Origin::Pinned = self.origin {
            pinned.recycle(self);
        }
    }

    /// Row-major, of the shape that it was made for.
    #[inline]
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Its memory, if it is the host's.
    pub(crate) fn block(&self) -> Option<&Block> {
        match &self.block {
            Some(Memory::Host(block)) => Some(block),
            _ => None,
        }
    }

    /// Where its memory begins on a GPU; 0 if it has none there.
    pub(crate) fn device_address(&self) -> u64 {
        self.device_block().map_or(0, DeviceBlock::address)
    }

    /// Its memory, if it is a GPU's.
    pub(crate) fn device_block(&self) -> Option<&DeviceBlock> {
        match &self.block {
            Some(Memory::Device(block)) => Some(block),
            _ => None,
        }
    }

    /// Whether it is pinned memory of the host.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.origin, Origin::Pinned)
    }

    /// Whether its bytes are in a mapped file ([`HostMemory`](crate::HostMemory)).
    pub fn is_on_disk(&self) -> bool {
        matches!(self.origin, Origin::File)
    }

    /// Takes the bytes of a mapped file out of the process's memory; the system reads them again when they are used. Other memory stays
    /// as it is.
    pub fn release_pages(&self) {
        self.block().into_iter().for_each(Block::release_pages);
    }

    /// Two numbers that no other storage of the process has or had.
    pub fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// Size in bytes.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it lives.
    #[inline]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether both live on the same device.
    #[inline]
    pub(crate) fn is_on_device_of(&self, other: &Storage) -> bool {
        std::ptr::eq(self.state, other.state) // a device has one
    }

    /// How often it was opened for writing. Autograd compares versions to find a saved value that was changed.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Its category in the ledger.
    pub fn category(&self) -> Category {
        Category::from_u8(self.category.load(Ordering::Relaxed))
    }

    /// Counts it in another category from now on.
    pub fn set_category(&self, category: Category) {
        let before = Category::from_u8(self.category.swap(category as u8, Ordering::Relaxed));
        if before != category && !self.is_on_disk() {
            self.state.ledger.moved(before, category, self.bytes);
        }
    }

    #[inline]
    pub(crate) fn read<T: bytemuck::Pod>(&self, op: &'static str) -> Result<Read<'_, T>> {
        const { assert!(align_of::<T>() <= 64 && size_of::<T>() > 0) };
        let token = token();
        if !self.users.enter_reader(token) {
            self.wait(op, "a writer", token, |users| users.and_reader(token))?;
        }
        Ok(Read::new(self, token))
    }

    /// Counts a writer; returns what its guard subtracts when it ends, and whether the version goes up: when values are on their way
    /// it did so before.
    fn enter_writer(&self, op: &'static str) -> Result<(u64, bool)> {
        let token = token();
        let alone = |users: Users| users.and_writer(token);
        let entered = Users::writer(token);
        if self.users.enter(&alone, false) {
            return Ok((entered, true));
        }
        self.wait(op, "another reader or writer", token, alone)?;
        Ok((entered, !self.users.now().is_arriving()))
    }

    /// Counts a write on a device without bytes, where there is nothing to write.
    pub(crate) fn bump_version(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// [`InUse::enter`], waiting for such a state.
    #[cold]
    fn wait(
        &self,
        op: &'static str,
        by: &'static str,
        token: u32,
        admit: impl Fn(Users) -> Option<u64>,
    ) -> Result<()> {
        if let Some(why) = self.why_withheld() {
            return Err(Error::invalid(op, why));
        }
        let delivers = arrival::is_delivering();
        let mut start = Instant::now();
        for attempt in 0.. {
            if !delivers && self.users.now().is_arriving() {
                arrival::wait(self, op)?;
                start = Instant::now();
            }
            if self.users.enter(&admit, delivers) {
                return Ok(());
            }
            // Most operations end soon; for the others a core is not kept busy.
            if attempt < 1000 {
                std::thread::yield_now()
            } else {
                std::thread::sleep(Duration::from_micros(50))
            }
            let waited = start.elapsed();
            if waited > WAIT_SELF_MAX && self.users.now().all_of(token) {
                return Err(Error::Busy { op, by: "a guard that this very thread took" });
            }
            if waited > WAIT_MAX {
                break;
            }
        }
        Err(Error::Busy { op, by })
    }

    #[inline]
    fn start(&self) -> *mut u8 {
        // Without bytes: dangling but aligned for every element type.
        self.block().map_or(std::ptr::without_provenance_mut(64), |b| b.start().as_ptr())
    }

    #[inline]
    fn elements<T>(&self) -> usize {
        if self.block().is_some() { self.bytes / size_of::<T>() } else { 0 }
    }
}

impl std::fmt::Debug for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Storage { bytes, device, .. } = self;
        write!(f, "Storage({bytes} bytes on {device}, version {})", self.version())
    }
}

/// Storages of tensors whose elements are elsewhere, one for each device and reason. Each access to one is an error that gives the reason.
///
/// Such a storage has no bytes, and a writer that never leaves. So guards on other storages need no check for it: a guard that meets a
/// writer takes the slow path in any case, and finds there that this one will not leave. The list keeps a handle for good, so no handle
/// that a user has is the only one.
static WITHHELD: Mutex<Vec<(Device, &'static str, Handle)>> = Mutex::new(Vec::new());

/// No thread has this token.
const NO_THREAD: u32 = 0;

impl Storage {
    /// A device's storage without elements, for a reason.
    pub(crate) fn withhold(device: Device, why: &'static str) -> Result<Handle> {
        let mut withheld = lock(&WITHHELD);
        if let Some((_, _, known)) = withheld.iter().find(|(at, said, _)| (*at, *said) == (device, why)) {
            return Ok(known.clone());
        }
        let storage = Storage::allocate("withheld", &[0], 0, device)?;
        storage.users.enter(&|users| users.and_writer(NO_THREAD), false);
        withheld.push((device, why, storage.clone()));
        Ok(storage)
    }

    /// Why its elements are not here, if they are withheld.
    pub(crate) fn why_withheld(&self) -> Option<&'static str> {
        if !self.users.now().has_writer() {
            return None;
        }
        lock(&WITHHELD).iter().find(|(_, _, kept)| ptr::eq::<Storage>(&**kept, self)).map(|(_, why, _)| *why)
    }
}
