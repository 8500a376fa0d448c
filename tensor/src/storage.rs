//! A tensor's bytes: who may touch them when, how often they were written, what they count as.
//!
//! Views share a storage, and a storage may be used from several threads. Reading and writing go through guards
//! that keep the rule of Rust's references at run time: any number of readers, or one writer. A guard that would
//! break it waits for operations of other threads to finish; one that waits longer than any operation takes gives
//! up with [`Error::Busy`].
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::allocator::Block;
use crate::device::State;
use crate::{Category, Context, Device, Error, Result};

/// How long a guard waits for another thread's.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// `users` while a writer holds the storage; else the number of readers.
const WRITER: u32 = u32::MAX;

/// Memory of one device, counted in its ledger.
pub struct Storage {
    block: Option<Block>,
    bytes: usize,
    device: Device,
    state: &'static State,
    category: AtomicU8,
    version: AtomicU64,
    users: AtomicU32,
}

impl Storage {
    /// Uninitialized for the user, initialized for the compiler: whatever the memory held before.
    pub(crate) fn new(op: &'static str, bytes: usize, device: Device) -> Result<Storage> {
        let state = device.state()?;
        let block = match device {
            Device::Meta(_) => None,
            _ if bytes == 0 => None,
            _ => {
                let block = state.allocator.allocate(bytes, &state.ledger);
                Some(block.ok_or(Error::OutOfMemory { op, device, bytes })?)
            }
        };
        let category = Context::current().category;
        state.ledger.allocated(category, bytes);
        Ok(Storage {
            block,
            bytes,
            device,
            state,
            category: AtomicU8::new(category as u8),
            version: AtomicU64::new(0),
            users: AtomicU32::new(0),
        })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        self.device
    }

    /// How often it was opened for writing. Autograd compares it to find out that a saved value has changed.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// What it counts as.
    pub fn category(&self) -> Category {
        Category::from_u8(self.category.load(Ordering::Relaxed))
    }

    /// Counts it as something else from now on.
    pub fn set_category(&self, category: Category) {
        let before = Category::from_u8(self.category.swap(category as u8, Ordering::Relaxed));
        if before != category {
            self.state.ledger.moved(before, category, self.bytes);
        }
    }

    pub(crate) fn read<T: bytemuck::Pod>(&self, op: &'static str) -> Result<Read<'_, T>> {
        self.wait(op, "a writer", |users| (users < WRITER - 1).then_some(users + 1))?;
        Ok(Read { storage: self, elements: PhantomData })
    }

    pub(crate) fn write<T: bytemuck::Pod>(&self, op: &'static str) -> Result<Write<'_, T>> {
        self.wait(op, "another reader or writer", |users| (users == 0).then_some(WRITER))?;
        self.bump_version();
        Ok(Write { storage: self, elements: PhantomData })
    }

    /// Counts a write that had nothing to do, on a device without bytes.
    pub(crate) fn bump_version(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Takes `users` from a state that `admit` accepts to the one it returns, waiting for one to come.
    #[inline]
    fn wait(&self, op: &'static str, by: &'static str, admit: impl Fn(u32) -> Option<u32>) -> Result<()> {
        if self.users.fetch_update(Ordering::Acquire, Ordering::Relaxed, &admit).is_ok() {
            return Ok(());
        }
        let start = Instant::now();
        while start.elapsed() < WAIT_MAX {
            std::thread::yield_now();
            if self.users.fetch_update(Ordering::Acquire, Ordering::Relaxed, &admit).is_ok() {
                return Ok(());
            }
        }
        Err(Error::Busy { op, by })
    }

    fn start(&self) -> *mut u8 {
        // Without bytes: dangling but aligned for every element type.
        self.block.as_ref().map_or(std::ptr::without_provenance_mut(64), |b| b.start().as_ptr())
    }

    fn elements<T>(&self) -> usize {
        if self.block.is_some() { self.bytes / size_of::<T>() } else { 0 }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.state.ledger.freed(self.category(), self.bytes);
        if let Some(block) = self.block.take() {
            self.state.allocator.release(block, &self.state.ledger);
        }
    }
}

impl std::fmt::Debug for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Storage { bytes, device, .. } = self;
        write!(f, "Storage({bytes} bytes on {device}, version {})", self.version())
    }
}

/// The elements of a whole storage, to read.
pub struct Read<'a, T> {
    storage: &'a Storage,
    elements: PhantomData<&'a [T]>,
}

impl<T: bytemuck::Pod> Deref for Read<'_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the block holds `bytes` initialized bytes, aligned to 64; `T` is plain old data, so any bytes
        // are values. `users` counts this guard as a reader, so no `Write` exists while it does.
        unsafe { std::slice::from_raw_parts(self.storage.start().cast(), self.storage.elements::<T>()) }
    }
}

impl<T> Drop for Read<'_, T> {
    fn drop(&mut self) {
        self.storage.users.fetch_sub(1, Ordering::Release);
    }
}

/// The elements of a whole storage, to write.
pub struct Write<'a, T> {
    storage: &'a Storage,
    elements: PhantomData<&'a mut [T]>,
}

impl<T: bytemuck::Pod> Deref for Write<'_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: as for `Read`; `users` says that this guard is the only one.
        unsafe { std::slice::from_raw_parts(self.storage.start().cast(), self.storage.elements::<T>()) }
    }
}

impl<T: bytemuck::Pod> DerefMut for Write<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `Read`; `users` says that this guard is the only one, and it is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.storage.start().cast(), self.storage.elements::<T>()) }
    }
}

impl<T> Drop for Write<'_, T> {
    fn drop(&mut self) {
        self.storage.users.store(0, Ordering::Release);
    }
}
