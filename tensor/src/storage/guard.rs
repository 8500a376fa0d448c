//! [`Read`] and [`Write`]: guards on a storage's elements. [`InUse`] and [`Handles`]: which guards and how many handles a storage has.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicU32;

use super::{Handle, Storage};
use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence};

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

impl<'a, T> Read<'a, T> {
    /// A read guard. The caller has already counted it among the storage's users, by the `token` of the thread that
    /// took it.
    pub(super) fn new(storage: &'a Storage, token: u32) -> Read<'a, T> {
        Read { storage, token, elements: PhantomData }
    }

    /// Whether it is a guard of this storage.
    pub(crate) fn is_of(&self, storage: &Storage) -> bool {
        std::ptr::eq(self.storage, storage)
    }
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
    #[inline]
    fn drop(&mut self) {
        self.storage.users.leave(Users::reader(self.token));
    }
}

/// A read guard that keeps the storage too, for work that goes on when the call that began it has returned.
pub(crate) struct Hold {
    storage: Handle,
    token: u32,
}

impl Hold {
    /// As [`Read::new`].
    pub(super) fn new(storage: Handle, token: u32) -> Hold {
        Hold { storage, token }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.storage.users.leave(Users::reader(self.token));
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
    /// What `users` counts for this guard: nothing while it borrows the only handle.
    entered: u64,
    elements: PhantomData<&'a mut [T]>,
}

impl<'a, T> Write<'a, T> {
    /// Of a storage whose users count it as the writer, or whose only handle it borrows.
    pub(super) fn new(storage: &'a Storage, entered: u64) -> Write<'a, T> {
        Write { storage, entered, elements: PhantomData }
    }

    /// Whether it is a guard of this storage.
    pub(crate) fn is_of(&self, storage: &Storage) -> bool {
        std::ptr::eq(self.storage, storage)
    }
}

impl<T: bytemuck::Pod> Deref for Write<'_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: as for `Read`; this guard is the only one, says `users`, or there is only the handle it borrows.
        unsafe { std::slice::from_raw_parts(self.storage.start().cast(), self.storage.elements::<T>()) }
    }
}

impl<T: bytemuck::Pod> DerefMut for Write<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `Deref`, and the guard is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.storage.start().cast(), self.storage.elements::<T>()) }
    }
}

impl<T> Drop for Write<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.entered != 0 {
            self.storage.users.leave(self.entered);
        }
    }
}

/// The guards on a storage, in one word. The lower half holds the number of readers, or [`Users::WRITER`] and the number of readers that
/// are just trying; and [`Users::ARRIVING`] while values are on their way, which bars all guards but those that bring them. The upper half
/// holds the sum of the tokens of the threads that took the guards. So a thread can tell whether all
/// guards are its own: of one guard for certain, of several up to a chance of 2^-32.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Users(u64);

impl Users {
    const WRITER: u32 = 1 << 31;
    const ARRIVING: u32 = 1 << 30;

    #[inline]
    pub(crate) fn count(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(crate) fn has_writer(self) -> bool {
        self.count() & Users::WRITER != 0
    }

    /// Whether values are on their way.
    #[inline]
    pub(crate) fn is_arriving(self) -> bool {
        self.count() & Users::ARRIVING != 0
    }

    #[inline]
    fn bars_readers(self) -> bool {
        self.count() & (Users::WRITER | Users::ARRIVING) != 0
    }

    /// The number that a reader adds.
    #[inline]
    pub(crate) fn reader(token: u32) -> u64 {
        u64::from(token) << 32 | 1
    }

    /// The number that a writer adds.
    pub(crate) fn writer(token: u32) -> u64 {
        u64::from(token) << 32 | u64::from(Users::WRITER)
    }

    /// With a further reader, if there is no writer.
    pub(crate) fn and_reader(self, token: u32) -> Option<u64> {
        (!self.bars_readers()).then(|| self.0.wrapping_add(Users::reader(token)))
    }

    /// With a writer, if there is no other guard.
    pub(crate) fn and_writer(self, token: u32) -> Option<u64> {
        (self.count() == 0).then(|| Users::writer(token))
    }

    /// Whether all guards were taken by the thread of this token.
    pub(crate) fn all_of(self, token: u32) -> bool {
        let guards = (self.count() & !(Users::WRITER | Users::ARRIVING)) + u32::from(self.has_writer());
        guards > 0 && (self.0 >> 32) as u32 == token.wrapping_mul(guards)
    }
}

/// The [`Users`] of a storage at the moment: any number of readers, or one writer. A guard that enters sees the writes of the guards that
/// had to leave before it.
#[derive(Default)]
pub(crate) struct InUse(AtomicU64);

impl InUse {
    #[inline]
    pub(crate) fn now(&self) -> Users {
        Users(self.0.load(Ordering::Relaxed))
    }

    /// Counts a reader, if there is no writer.
    #[inline]
    pub(crate) fn enter_reader(&self, token: u32) -> bool {
        let admitted = !Users(self.0.fetch_add(Users::reader(token), Ordering::Acquire)).bars_readers();
        if !admitted {
            self.0.fetch_sub(Users::reader(token), Ordering::Relaxed);
        }
        admitted
    }

    /// Notes that values are on their way, unless others are; returns whether it did. Guards that are there stay until they are dropped.
    pub(crate) fn begin_arrival(&self) -> bool {
        !Users(self.0.fetch_or(u64::from(Users::ARRIVING), Ordering::Relaxed)).is_arriving()
    }

    /// Undoes [`InUse::begin_arrival`].
    pub(crate) fn end_arrival(&self) {
        self.0.fetch_and(!u64::from(Users::ARRIVING), Ordering::Release);
    }

    /// Goes from a state that `admit` accepts to the one that it returns, if it is in one. A guard that `delivers` values on their way
    /// enters beside their mark.
    #[inline]
    pub(crate) fn enter(&self, admit: &impl Fn(Users) -> Option<u64>, delivers: bool) -> bool {
        let passed = if delivers { u64::from(Users::ARRIVING) } else { 0 };
        let admit = |users| Some(admit(Users(users & !passed))? | users & passed);
        self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, admit).is_ok()
    }

    /// Subtracts what a guard has added.
    #[inline]
    pub(crate) fn leave(&self, added: u64) {
        self.0.fetch_sub(added, Ordering::Release);
    }
}

/// This thread's token: no other thread's, and no simple sum of others'.
#[inline]
pub(crate) fn token() -> u32 {
    thread_local! {
        static TOKEN: Cell<u32> = const { Cell::new(0) };
    }
    #[cold]
    fn next() -> u32 {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        // A bijection that is far from linear (the finalizer of MurmurHash3).
        let mut x = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        x = (x ^ x >> 16).wrapping_mul(0x85eb_ca6b);
        x = (x ^ x >> 13).wrapping_mul(0xc2b2_ae35);
        x ^ x >> 16
    }
    if TOKEN.get() == 0 {
        TOKEN.set(next());
    }
    TOKEN.get()
}

/// The number of handles on a storage. 2^64 would not fit into memory, and to leak as many takes centuries.
pub(crate) struct Handles(AtomicUsize);

impl Handles {
    pub(crate) fn one() -> Handles {
        Handles(AtomicUsize::new(1))
    }

    /// Whether there is only one. Its thread then sees all writes made through the others.
    #[inline]
    pub(crate) fn is_sole(&self) -> bool {
        self.0.load(Ordering::Acquire) == 1
    }

    /// Counts a clone.
    #[inline]
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether it was the last. Its thread then sees all writes made through the others.
    #[inline]
    pub(crate) fn remove(&self) -> bool {
        let last = self.is_sole() || self.0.fetch_sub(1, Ordering::Release) == 1;
        if last {
            fence(Ordering::Acquire);
        }
        last
    }
}
