//! Arrays of vectors, made in the kernel's own body.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// `[f(0), .., f(N - 1)]`. [`std::array::from_fn`] wraps `f` in functions of its own, which are not compiled with the
/// instruction set's features unless the compiler happens to inline them; vectors then go by way of memory.
#[inline(always)]
pub(crate) fn each<T: Copy, const N: usize>(mut f: impl FnMut(usize) -> T) -> [T; N] {
    let mut array = MaybeUninit::<[T; N]>::uninit();
    for i in 0..N {
        // SAFETY: the array has N places. One whose `f` panics is left without a value, and never read.
        unsafe { array.as_mut_ptr().cast::<T>().add(i).write(f(i)) };
    }
    // SAFETY: all places were written.
    unsafe { array.assume_init() }
}
