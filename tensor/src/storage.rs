//! A tensor's bytes: who may touch them when, how often they were written, what they count as.
//!
//! Views share a storage, and a storage may be used from several threads. Reading and writing go through guards
//! that keep the rule of Rust's references at run time: any number of readers, or one writer. A guard that would
//! break it waits for operations of other threads to finish; one that waits longer than any operation takes, or for
//! its own thread, gives up with [`Error::Busy`].
#![allow(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::allocator::Block;
use crate::device::State;
use crate::{Category, Context, Device, Error, Result};

/// How long a guard waits for another thread's.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// How long it waits where only guards taken by its own thread stand in the way: those can go only if they were
/// moved to another thread.
const WAIT_SELF_MAX: Duration = Duration::from_millis(100);

/// Who uses a storage: the number of readers, or [`Users::WRITER`], in the lower half, and in the upper half the sum
/// of the tokens of the threads that took the guards. So it is told without any bookkeeping whether all guards are a
/// thread's own: of one guard for certain, of several up to a chance of 2^-32.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Users(u64);

impl Users {
    const WRITER: u32 = u32::MAX;

    fn count(self) -> u32 {
        self.0 as u32
    }

    /// With one more reader, unless there is a writer.
    fn with_reader(self, token: u32) -> Option<Users> {
        (self.count() < Users::WRITER - 1).then(|| Users(self.0.wrapping_add(Users::reader(token))))
    }

    /// With a writer, unless there is anybody.
    fn with_writer(self, token: u32) -> Option<Users> {
        (self.count() == 0).then_some(Users(u64::from(token) << 32 | u64::from(Users::WRITER)))
    }

    /// What a reader adds.
    fn reader(token: u32) -> u64 {
        u64::from(token) << 32 | 1
    }

    fn all_of(self, token: u32) -> bool {
        let guards = if self.count() == Users::WRITER { 1 } else { self.count() };
        guards > 0 && (self.0 >> 32) as u32 == token.wrapping_mul(guards)
    }
}

/// This thread's token: no other thread's, and no simple sum of others'.
fn token() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        static TOKEN: Cell<u32> = const { Cell::new(0) };
    }
    if TOKEN.get() == 0 {
        // A bijection that is far from linear (the finalizer of MurmurHash3).
        let mut x = NEXT.fetch_add(1, Ordering::Relaxed);
        x = (x ^ x >> 16).wrapping_mul(0x85eb_ca6b);
        x = (x ^ x >> 13).wrapping_mul(0xc2b2_ae35);
        TOKEN.set(x ^ x >> 16);
    }
    TOKEN.get()
}

/// Memory of one device, counted in its ledger.
pub struct Storage {
    block: Option<Block>,
    bytes: usize,
    device: Device,
    state: &'static State,
    category: AtomicU8,
    version: AtomicU64,
    /// A [`Users`].
    users: AtomicU64,
}

impl Storage {
    /// Uninitialized for the user, initialized for the compiler: whatever the memory held before.
    pub(crate) fn new(op: &'static str, bytes: usize, device: Device) -> Result<Arc<Storage>> {
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
        // Made where it stays: a move would cost as much as the bookkeeping.
        Ok(Arc::new(Storage {
            block,
            bytes,
            device,
            state,
            category: AtomicU8::new(category as u8),
            version: AtomicU64::new(0),
            users: AtomicU64::new(0),
        }))
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

    /// How often it was opened for writing. Autograd compares it to find out that a saved value has changed.
    #[inline]
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
        const { assert!(align_of::<T>() <= 64 && size_of::<T>() > 0) };
        let token = token();
        self.wait(op, "a writer", token, |users| users.with_reader(token))?;
        Ok(Read { storage: self, token, elements: PhantomData })
    }

    pub(crate) fn write<T: bytemuck::Pod>(&self, op: &'static str) -> Result<Write<'_, T>> {
        const { assert!(align_of::<T>() <= 64 && size_of::<T>() > 0) };
        let token = token();
        self.wait(op, "another reader or writer", token, |users| users.with_writer(token))?;
        // Alone with the storage, so that no atomic addition is needed.
        self.version.store(self.version.load(Ordering::Relaxed) + 1, Ordering::Release);
        Ok(Write { storage: self, elements: PhantomData })
    }

    /// Counts a write that had nothing to do, on a device without bytes.
    pub(crate) fn bump_version(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Takes `users` from a state that `admit` accepts to the one it returns, waiting for one to come.
    #[inline]
    fn wait(
        &self,
        op: &'static str,
        by: &'static str,
        token: u32,
        admit: impl Fn(Users) -> Option<Users>,
    ) -> Result<()> {
        if self.enter(&admit) { Ok(()) } else { self.wait_long(op, by, token, &admit) }
    }

    #[inline]
    fn enter(&self, admit: &impl Fn(Users) -> Option<Users>) -> bool {
        let admit = |users| admit(Users(users)).map(|users| users.0);
        self.users.fetch_update(Ordering::Acquire, Ordering::Relaxed, admit).is_ok()
    }

    #[cold]
    fn wait_long(
        &self,
        op: &'static str,
        by: &'static str,
        token: u32,
        admit: &impl Fn(Users) -> Option<Users>,
    ) -> Result<()> {
        let start = Instant::now();
        for attempt in 0.. {
            // Most operations end soon; for the others a core is not kept busy.
            if attempt < 1000 {
                std::thread::yield_now()
            } else {
                std::thread::sleep(Duration::from_micros(50))
            }
            if self.enter(admit) {
                return Ok(());
            }
            let waited = start.elapsed();
            if waited > WAIT_SELF_MAX && Users(self.users.load(Ordering::Relaxed)).all_of(token) {
                return Err(Error::Busy { op, by: "a guard that this very thread took" });
            }
            if waited > WAIT_MAX {
                break;
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
            self.state.allocator.release(block);
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
///
/// A guard cannot outlive its tensor, and gives no way to write:
///
/// ```compile_fail,E0505
/// # use phalanx_tensor::{DType, Device, Tensor};
/// let x = Tensor::zeros(&[2], DType::F32, Device::CPU).unwrap();
/// let elements = x.read::<f32>("example").unwrap();
/// drop(x);
/// assert_eq!(elements[0], 0.);
/// ```
///
/// ```compile_fail,E0594
/// # use phalanx_tensor::{DType, Device, Tensor};
/// let x = Tensor::zeros(&[2], DType::F32, Device::CPU).unwrap();
/// let mut elements = x.read::<f32>("example").unwrap();
/// elements[0] = 1.;
/// ```
pub struct Read<'a, T> {
    storage: &'a Storage,
    token: u32,
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
        self.storage.users.fetch_sub(Users::reader(self.token), Ordering::Release);
    }
}

/// The elements of a whole storage, to write.
///
/// While it is there the same tensor cannot be read, and slices of it cannot outlive it:
///
/// ```compile_fail,E0502
/// # use phalanx_tensor::{DType, Device, Tensor};
/// let mut x = Tensor::zeros(&[2], DType::F32, Device::CPU).unwrap();
/// let mut writing = x.write::<f32>("example").unwrap();
/// let reading = x.read::<f32>("example").unwrap();
/// writing[0] = reading[1];
/// ```
///
/// ```compile_fail,E0597
/// # use phalanx_tensor::{DType, Device, Tensor};
/// let mut x = Tensor::zeros(&[2], DType::F32, Device::CPU).unwrap();
/// let elements: &mut [f32] = {
///     let mut writing = x.write::<f32>("example").unwrap();
///     &mut writing[..]
/// };
/// elements[0] = 1.;
/// ```
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
