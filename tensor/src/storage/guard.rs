//! [`Read`] and [`Write`]: a storage's elements, as long as the guard is there.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use super::{Storage, Users};

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
    /// Of a storage whose users count it as a reader, by the token of the thread that took it.
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
    /// What `users` counts for this guard: nothing for one that nobody can meet.
    entered: u64,
    elements: PhantomData<&'a mut [T]>,
}

impl<'a, T> Write<'a, T> {
    /// Of a storage whose users count it as the writer, or that nobody else can meet.
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
