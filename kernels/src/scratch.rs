//! Scratch memory of kernels: [`with_scratch`] lends a slice of f32 or f64 that the thread keeps for the next call.

use std::cell::RefCell;

use crate::simd::Float;

/// Elements to skip at most to reach the start of a cache line.
const SLACK: usize = 16;
const LINE_BYTES: usize = 64;

thread_local! {
    static F32: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
    static F64: RefCell<Vec<Vec<f64>>> = const { RefCell::new(Vec::new()) };
}

/// A float type for which each thread keeps buffers.
pub(crate) trait Scratch: Float {
    /// Takes a buffer from this thread's store; an empty one if it has none.
    fn take() -> Vec<Self>;
    /// Puts a buffer back.
    fn put(buffer: Vec<Self>);
}

impl Scratch for f32 {
    fn take() -> Vec<f32> {
        F32.with_borrow_mut(|store| store.pop().unwrap_or_default())
    }

    fn put(buffer: Vec<f32>) {
        F32.with_borrow_mut(|store| store.push(buffer));
    }
}

impl Scratch for f64 {
    fn take() -> Vec<f64> {
        F64.with_borrow_mut(|store| store.pop().unwrap_or_default())
    }

    fn put(buffer: Vec<f64>) {
        F64.with_borrow_mut(|store| store.push(buffer));
    }
}

/// Calls `f` with `len` elements of any content, at the start of a cache line. Calls may nest.
pub(crate) fn with_scratch<T: Scratch, R>(len: usize, f: impl FnOnce(&mut [T]) -> R) -> R {
    if len == 0 {
        return f(&mut []);
    }
    let mut buffer = T::take();
    if buffer.len() < len + SLACK {
        // A new buffer: growing the old one would copy its contents.
        buffer = vec![T::ZERO; len + SLACK];
    }
    let start = buffer.as_ptr().align_offset(LINE_BYTES).min(SLACK);
    let result = f(&mut buffer[start..start + len]);
    T::put(buffer);
    result
}
