//! What is done with lines of elements that lie apart in memory.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use crate::real::Real;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector};

/// Rows of `width` elements that lie across memory, at most [`LANES_MAX`] of them: element i of all is at `from[i * stride..]`.
pub(super) struct Turned<'a, T: Real> {
    pub(super) from: &'a [T],
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) to: &'a mut [T::Wide],
}

impl<T: Real> Kernel for Turned<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        let lanes = <T::Wide as Float>::Vec::<S>::LANES;
        for row in (0..self.rows).step_by(lanes) {
            for column in (0..self.width).step_by(lanes) {
                let sizes = [lanes.min(self.rows - row), lanes.min(self.width - column)];
                // A square whose size is known stays in registers.
                match sizes == [lanes; 2] {
                    true => self.square::<S>([row, column], [lanes; 2]),
                    false => self.square::<S>([row, column], sizes),
                }
            }
        }
    }
}

impl<T: Real> Turned<'_, T> {
    #[inline(always)]
    fn square<S: Isa>(&mut self, [row, column]: [usize; 2], [rows, columns]: [usize; 2]) {
        let mut square = [<T::Wide as Float>::Vec::<S>::zero(); LANES_MAX];
        for (i, vector) in square.iter_mut().enumerate().take(columns) {
            *vector = T::load::<S>(&self.from[(column + i) * self.stride + row..][..rows]);
        }
        <T::Wide as Float>::Vec::<S>::turn(&mut square);
        for (i, vector) in square.iter().enumerate().take(rows) {
            vector.store_partial(&mut self.to[(row + i) * self.width + column..][..columns]);
        }
    }
}

/// Lines of `len` elements that begin `stride` apart, to be widened one after the other.
pub(super) struct Widened<'a, T: Real> {
    pub(super) from: &'a [T],
    pub(super) stride: usize,
    pub(super) len: usize,
    pub(super) to: &'a mut [T::Wide],
}

impl<T: Real> Kernel for Widened<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <T::Wide as Float>::Vec::<S>::LANES;
        let lines = self.to.len() / self.len.max(1);
        for (line, to) in self.to.chunks_exact_mut(self.len.max(1)).enumerate() {
            let from = &self.from[line * self.stride..][..self.len];
            for (from, to) in from.chunks(lanes).zip(to.chunks_mut(lanes)) {
                // The next lines come near meanwhile.
                let next = from.as_ptr().wrapping_add(lines * self.stride);
                <T::Wide as Float>::Vec::<S>::prefetch_far(next.cast());
                match from.len() == lanes {
                    true => T::load::<S>(from).store(to),
                    false => T::load::<S>(from).store_partial(to),
                }
            }
        }
    }
}

/// Single elements that lie `stride` apart, to be widened.
pub(super) struct Apart<'a, T: Real> {
    pub(super) from: &'a [T],
    pub(super) stride: usize,
    pub(super) to: &'a mut [T::Wide],
}

impl<T: Real> Kernel for Apart<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let Apart { from, stride, to } = self;
        // The compiler makes vectors where it knows the stride.
        match stride {
            2 => widen_apart::<T, 2>(from, to),
            3 => widen_apart::<T, 3>(from, to),
            4 => widen_apart::<T, 4>(from, to),
            _ => {
                for (to, &x) in to.iter_mut().zip(from.iter().step_by(stride)) {
                    *to = x.widen();
                }
            }
        }
    }
}

#[inline(always)]
fn widen_apart<T: Real, const N: usize>(from: &[T], to: &mut [T::Wide]) {
    let (whole, rest) = from.as_chunks::<N>();
    let count = whole.len().min(to.len());
    let (to, last) = to.split_at_mut(count);
    for (to, x) in to.iter_mut().zip(whole) {
        *to = x[0].widen();
    }
    for (to, x) in last.iter_mut().zip(rest) {
        *to = x.widen();
    }
}
