//! Kernels that only move elements: [`fill`], [`reverse`] and [`choose`], compiled once for each element size and not
//! for each dtype; and the runs of a strided destination ([`for_each_run_mut`]). `fill_`, `cast`, `flip`, `where_` and the block reader use them.

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use phalanx_tensor::{Layout, Loops};

use crate::simd::{Isa, Kernel, dispatch};

/// Runs `$body` with `$B` standing for the unsigned integer that has as many bytes as `$T`.
macro_rules! by_size {
    ($T:ty, $B:ident => $body:expr) => {
        match size_of::<$T>() {
            1 => {
                type $B = u8;
                $body
            }
            2 => {
                type $B = u16;
                $body
            }
            4 => {
                type $B = u32;
                $body
            }
            _ => {
                type $B = u64;
                $body
            }
        }
    };
}

pub(crate) use by_size;

/// Sets every element.
pub(crate) fn fill<T: Pod>(to: &mut [T], value: T) {
    by_size!(T, B => dispatch(Fill::<B> { to: cast_slice_mut(to), value: bytemuck::cast(value) }));
}

/// Copies rows of `width` elements, each in the opposite order, into a slice of the same length.
pub(crate) fn reverse<T: Pod>(from: &[T], to: &mut [T], width: usize) {
    by_size!(T, B => dispatch(Reverse::<B> { from: cast_slice(from), to: cast_slice_mut(to), width }));
}

/// Sets each element to that of `a` where the condition is not 0, else to that of `b`; all slices are of one length.
pub(crate) fn choose<T: Pod>(condition: &[u8], a: &[T], b: &[T], to: &mut [T]) {
    by_size!(T, B => {
        let (a, b, to) = (cast_slice(a), cast_slice(b), cast_slice_mut(to));
        dispatch(Choose::<B> { condition, a, b, to });
    });
}

struct Fill<'a, B> {
    to: &'a mut [B],
    value: B,
}

impl<B: Copy> Kernel for Fill<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for to in self.to {
            *to = self.value;
        }
    }
}

struct Reverse<'a, B> {
    from: &'a [B],
    to: &'a mut [B],
    width: usize,
}

impl<B: Copy> Kernel for Reverse<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (from, to) in self.from.chunks(self.width).zip(self.to.chunks_mut(self.width)) {
            for (to, &from) in to.iter_mut().zip(from.iter().rev()) {
                *to = from;
            }
        }
    }
}

struct Choose<'a, B> {
    condition: &'a [u8],
    a: &'a [B],
    b: &'a [B],
    to: &'a mut [B],
}

impl<B: Copy> Kernel for Choose<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (((to, &c), &a), &b) in self.to.iter_mut().zip(self.condition).zip(self.a).zip(self.b) {
            *to = if c != 0 { a } else { b };
        }
    }
}

/// A run of a destination: every `stride`-th element of a slice that begins at the run's first.
pub(crate) struct RunMut<'a, T> {
    elements: &'a mut [T],
    stride: usize,
    len: usize,
}

impl<T: bytemuck::Pod> RunMut<'_, T> {
    /// Sets every element.
    pub(crate) fn set(self, value: T) {
        match self.stride {
            1 => fill(&mut self.elements[..self.len], value),
            _ => self.for_each(|_, x| *x = value),
        }
    }

    /// Calls `f` with each element's index in row-major order, counted from the run's first, and the element.
    pub(crate) fn for_each(self, mut f: impl FnMut(usize, &mut T)) {
        if self.stride == 1 {
            self.elements[..self.len].iter_mut().enumerate().for_each(|(i, x)| f(i, x));
        } else {
            let strided = self.elements.iter_mut().step_by(self.stride.max(1));
            strided.take(self.len).enumerate().for_each(|(i, x)| f(i, x));
        }
    }
}

/// Calls `f` with each run of a strided layout (the elements of its innermost loop), in row-major order. The layout must not overlap itself.
pub(crate) fn for_each_run_mut<T>(elements: &mut [T], layout: &Layout, mut f: impl FnMut(RunMut<'_, T>)) {
    if layout.numel() == 0 {
        return;
    }
    let loops = Loops::new(layout.shape(), [layout.strides()]);
    let (len, [stride]) = (loops.inner(), loops.inner_strides());
    for run in 0..loops.runs() {
        let start = layout.offset() + loops.start(run)[0];
        f(RunMut { elements: &mut elements[start..], stride, len });
    }
}

#[cfg(test)]
mod tests {
    use super::{choose, fill, reverse};

    fn check<T: bytemuck::Pod + PartialEq + std::fmt::Debug>(number: fn(usize) -> T) {
        for len in [0, 1, 7, 33, 129, 1000] {
            let x: Vec<T> = (0..len).map(number).collect();
            let mut to = x.clone();
            fill(&mut to, number(5));
            assert!(to.iter().all(|&to| to == number(5)));
            for width in [1, 3, 32, 70, 129, 1000] {
                reverse(&x, &mut to, width);
                let wanted = x.chunks(width).flat_map(|row| row.iter().rev());
                assert!(to.iter().eq(wanted));
            }
            let back = to.clone();
            let condition: Vec<u8> = (0..len).map(|i| (i % 3) as u8).collect();
            choose(&condition, &x, &back, &mut to);
            let wanted = (0..len).map(|i| if i % 3 > 0 { x[i] } else { back[i] });
            assert!(to.iter().copied().eq(wanted));
        }
    }

    #[test]
    fn elements_of_every_size_are_moved() {
        check(|i| i as u8);
        check(|i| half::bf16::from_bits(i as u16));
        check(|i| i as f32);
        check(|i| i as i64);
    }
}
