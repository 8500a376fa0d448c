//! Packing: copies a panel of A (some rows) or of B (some columns) into the order the microkernel reads it, widening
//! half types on the way.
//!
//! A panel is `width` lanes by k: lane i of step k at `dst[k * width + i]`, lanes beyond the matrix zero. A's lanes are
//! rows, B's are columns; beyond that the two are the same job.

#![allow(unsafe_code)]

use std::marker::PhantomData;

use super::element::GemmElem;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector};

/// A panel to pack.
pub(super) struct Panel<'a, T: GemmElem> {
    /// Starts at lane 0, step 0.
    pub(super) src: &'a [T],
    pub(super) lane_stride: usize,
    pub(super) step_stride: usize,
    /// Lanes that exist.
    pub(super) lanes: usize,
    /// Lanes to write.
    pub(super) width: usize,
    /// `width` elements for each step.
    pub(super) dst: &'a mut [T::Acc],
}

impl<T: GemmElem> Kernel for Panel<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        if self.lane_stride == 1 {
            self.copy_rows::<<T::Acc as Float>::Vec<S>>();
        } else if self.step_stride == 1 {
            self.transpose::<<T::Acc as Float>::Vec<S>>();
        } else {
            self.gather();
        }
    }
}

impl<T: GemmElem> Panel<'_, T> {
    /// The lanes of a step lie side by side.
    #[inline(always)]
    fn copy_rows<V: Vector<Elem = T::Acc>>(&mut self) {
        for (step, dst) in self.dst.chunks_exact_mut(self.width).enumerate() {
            let src = &self.src[step * self.step_stride..][..self.lanes];
            for (i, dst) in dst.chunks_mut(V::LANES).enumerate() {
                let first = (i * V::LANES).min(src.len());
                let lanes = &src[first..(first + V::LANES).min(src.len())];
                if dst.len() == V::LANES {
                    load_widened::<T, V>(lanes).store(dst);
                } else {
                    load_widened::<T, V>(lanes).store_partial(dst);
                }
            }
        }
    }

    /// Any strides.
    #[inline(always)]
    fn gather(&mut self) {
        for (step, dst) in self.dst.chunks_exact_mut(self.width).enumerate() {
            let (used, padding) = dst.split_at_mut(self.lanes);
            for (lane, dst) in used.iter_mut().enumerate() {
                *dst = self.src[lane * self.lane_stride + step * self.step_stride].widen();
            }
            padding.fill(T::Acc::ZERO);
        }
    }

    /// The steps of a lane lie side by side: squares of LANES x LANES are transposed in registers.
    #[inline(always)]
    fn transpose<V: Vector<Elem = T::Acc>>(&mut self) {
        let steps = self.dst.len() / self.width;
        for step in (0..steps).step_by(V::LANES) {
            let count = (steps - step).min(V::LANES);
            for first in (0..self.width).step_by(V::LANES) {
                let width = (self.width - first).min(V::LANES);
                let mut square = [V::zero(); LANES_MAX];
                for (i, row) in square[..V::LANES].iter_mut().enumerate() {
                    let lane = first + i;
                    if lane < self.lanes {
                        *row = load_widened(&self.src[lane * self.lane_stride + step..][..count]);
                    }
                }
                transpose_square(&mut square);
                for (i, row) in square[..count].iter().enumerate() {
                    let dst = &mut self.dst[(step + i) * self.width + first..][..width];
                    if width == V::LANES {
                        row.store(dst);
                    } else {
                        row.store_partial(dst);
                    }
                }
            }
        }
    }
}

/// A vector of `src`, at most LANES elements.
#[inline(always)]
pub(super) fn load_widened<T: GemmElem, V: Vector<Elem = T::Acc>>(src: &[T]) -> V {
    match T::as_acc(src) {
        Some(src) if src.len() == V::LANES => V::load(src),
        Some(src) => V::load_partial(src, T::Acc::ZERO),
        None => {
            let mut wide = [T::Acc::ZERO; LANES_MAX];
            T::widen_slice(src, &mut wide[..src.len()]);
            V::load(&wide)
        }
    }
}

/// Transposes the square of the first LANES vectors. Zipping row i with row i + half moves a bit of the row number into
/// the lane number and one of the lane's into the row's; after log2(LANES) rounds all have moved.
#[inline(always)]
fn transpose_square<V: Vector>(square: &mut [V; LANES_MAX]) {
    let half = V::LANES / 2;
    let mut rounds = V::LANES;
    while rounds > 1 {
        let rows = *square;
        for i in 0..half {
            (square[2 * i], square[2 * i + 1]) = rows[i].zip(rows[i + half]);
        }
        rounds /= 2;
    }
}

/// A slice whose parts several threads fill.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a, T> {
    ptr: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it gives access to elements only through unsafe calls, whose callers keep threads apart.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Shared { ptr: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// The start, for pointer arithmetic within `len`.
    pub(super) fn ptr(&self) -> *mut T {
        self.ptr
    }

    /// # Safety
    ///
    /// Nothing else may touch the range while the result lives.
    #[allow(clippy::mut_from_ref)] // disjointness is the caller's proof
    pub(super) unsafe fn part(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: within the slice, and the caller keeps everyone else out.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), len) }
    }
}
