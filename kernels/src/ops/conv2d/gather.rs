//! The copies around a convolution's products: filling a window with pixels ([`FillWindow`]), gathering a panel of points from it as im2col does
//! ([`GatherPanel`]), and writing sums to the output ([`StoreSums`]).

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use super::window::{Segment, WindowLayout};
use crate::gemm::GemmElem;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector};

/// A segment's length in whole vectors; the last one may reach beyond the segment.
#[inline(always)]
fn padded<V: Vector>(segment: &Segment) -> usize {
    segment.len.next_multiple_of(V::LANES)
}

/// Loads a vector of the window; zeros beyond its end.
#[inline(always)]
fn load<V: Vector>(window: &[V::Elem], at: usize) -> V {
    match window.get(at..at + V::LANES) {
        Some(whole) => V::load(whole),
        None => V::load_partial(window.get(at..).unwrap_or(&[]), V::Elem::ZERO),
    }
}

/// Writes a vector into a row, as much of it as the row has room for.
#[inline(always)]
fn store<V: Vector>(value: V, row: &mut [V::Elem], at: usize) {
    match row.get_mut(at..at + V::LANES) {
        Some(whole) => value.store(whole),
        None => value.store_partial(&mut row[at..]),
    }
}

/// Copies a channel's pixels into its window, or those of two channels that share places (bf16 pairs). Without a channel the window is zero.
pub(super) struct FillWindow<'a, T: GemmElem> {
    pub(super) layout: &'a WindowLayout,
    pub(super) planes: [&'a [T]; 2],
    pub(super) size: [usize; 2],
    pub(super) window: &'a mut [T::Acc],
}

impl<T: GemmElem> Kernel for FillWindow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let ([height, width], layout) = (self.size, self.layout);
        if self.planes[0].is_empty() {
            return self.window.fill(T::Acc::ZERO);
        }
        for y in 0..self.window.len() / layout.row_len() {
            let row = &mut self.window[y * layout.row_len()..];
            let Some(from) = usize::try_from(layout.top + y as isize).ok().filter(|&y| y < height) else {
                row[..layout.row_len()].fill(T::Acc::ZERO);
                continue;
            };
            let row_of =
                |plane: &'_ [T]| if plane.is_empty() { 0..0 } else { from * width..(from + 1) * width };
            let from = self.planes.map(|plane| &plane[row_of(plane)]);
            let left = usize::try_from(layout.left).ok();
            let inside = left.filter(|left| left + layout.row_len() <= width);
            if let Some(left) = inside.filter(|_| layout.phases >= TRANSPOSED_MIN) {
                transpose_row::<T, S>(from, left, [layout.phases, layout.phase_len], row);
                continue;
            }
            for phase in 0..layout.phases {
                let to = &mut row[phase * layout.phase_len..];
                fill_row::<T, S>(from, layout.left + phase as isize, layout.phases, layout.phase_len, to);
            }
        }
    }
}

/// With so many phases (column remainders to the stride), transposing squares is faster than strided reads.
const TRANSPOSED_MIN: usize = 4;

/// [`fill_row`] for all phases of a row inside the image: squares of pixels are transposed.
#[inline(always)]
fn transpose_row<T: GemmElem, S: Isa>(
    [from, second]: [&[T]; 2],
    left: usize,
    [phases, len]: [usize; 2],
    to: &mut [T::Acc],
) {
    let lanes = <<T::Acc as Float>::Vec<S> as Vector>::LANES;
    for first in (0..phases).step_by(lanes) {
        for at in (0..len).step_by(lanes) {
            let (here, count) = (lanes.min(phases - first), lanes.min(len - at));
            let mut square = [<T::Acc as Float>::Vec::<S>::zero(); LANES_MAX];
            for i in 0..count {
                let start = left + (at + i) * phases + first;
                square[i] = match second.get(start..start + here) {
                    Some(second) => T::load_lines::<S>(&from[start..start + here], second),
                    None => T::load::<S>(&from[start..start + here]),
                };
            }
            Vector::transpose(&mut square);
            for i in 0..here {
                let to = &mut to[(first + i) * len + at..][..count];
                if count < lanes { square[i].store_partial(to) } else { square[i].store(to) }
            }
        }
    }
}

/// Copies every `step`-th pixel of a row from `left` on, zero outside. Whole vectors may overwrite what follows, which is written next.
#[inline(always)]
fn fill_row<T: GemmElem, S: Isa>(
    [from, second]: [&[T]; 2],
    left: isize,
    step: usize,
    len: usize,
    to: &mut [T::Acc],
) {
    // The first index not left of the row, and the first beyond its end.
    let begin = left.min(0).unsigned_abs().div_ceil(step).min(len);
    let end = (from.len() as isize - left).max(0) as usize;
    let end = end.div_ceil(step).clamp(begin, len);
    to[..begin].fill(T::Acc::ZERO);
    to[end..len].fill(T::Acc::ZERO);
    let first = left + (begin * step) as isize;
    let Some(from) = usize::try_from(first).ok().and_then(|first| from.get(first..)) else { return };
    let second = second.get(first as usize..).unwrap_or(&[]);
    if step > 1 {
        let seconds = second.iter().copied().chain(std::iter::repeat(T::zeroed())).step_by(step);
        let pixels = from.iter().step_by(step).zip(seconds);
        to[begin..end].iter_mut().zip(pixels).for_each(|(to, (&x, y))| *to = x.pair_up::<S>(y));
        return;
    }
    let lanes = <<T::Acc as Float>::Vec<S> as Vector>::LANES;
    for at in (0..end - begin).step_by(lanes) {
        let here = at..(end - begin).min(at + lanes);
        let to = &mut to[begin + at..];
        // Without a second channel, its half of each place is zero.
        let x = match second.get(here.clone()) {
            Some(second) => T::load_lines::<S>(&from[here], second),
            None => T::load::<S>(&from[here]),
        };
        if to.len() < lanes { x.store_partial(to) } else { x.store(to) }
    }
}

/// Writes the sums of a segment's points to the output, for each row (output channel), plus the row's bias.
pub(super) struct StoreSums<'a, T: GemmElem> {
    pub(super) sums: &'a [T::Acc],
    pub(super) row_len: usize,
    pub(super) segment: Segment,
    pub(super) bias: Option<&'a [T::Acc]>,
    pub(super) rows: usize,
    /// The output from the segment's first point in the first row's plane on; from a plane to the next, and from a point to the next.
    pub(super) out: &'a mut [T],
    pub(super) plane: usize,
    pub(super) step: usize,
}

impl<T: GemmElem> Kernel for StoreSums<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <<T::Acc as Float>::Vec<S> as Vector>::LANES;
        for row in 0..self.rows {
            let sums = &self.sums[row * self.row_len + self.segment.at..][..self.segment.len];
            let out = &mut self.out[row * self.plane..];
            let bias = self.bias.map(|bias| bias[row]);
            for (nth, sums) in sums.chunks(lanes).enumerate() {
                let whole = sums.len() == lanes;
                let sum = if whole { Vector::load(sums) } else { Vector::load_partial(sums, T::Acc::ZERO) };
                let bias = bias.map(<T::Acc as Float>::Vec::<S>::splat);
                let sum = bias.map_or(sum, |bias| sum + bias);
                let out = &mut out[nth * lanes * self.step..];
                if self.step == 1 {
                    T::store::<S>(sum, &mut out[..sums.len()]);
                    continue;
                }
                let mut apart = [T::zeroed(); LANES_MAX];
                T::store::<S>(sum, &mut apart[..lanes]);
                for i in 0..sums.len() {
                    out[i * self.step] = apart[i];
                }
            }
        }
    }
}

/// Gathers a panel of points (im2col): row k holds the pixel of step k at each point. Places beyond the segments are
/// unspecified.
pub(super) struct GatherPanel<'a, V> {
    pub(super) window: &'a [V],
    pub(super) taps: &'a [usize],
    pub(super) segments: &'a [Segment],
    pub(super) panel: &'a mut [V],
    pub(super) row_len: usize,
}

impl<V: Float> Kernel for GatherPanel<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        // Each segment is written in whole vectors. Elements past its end are overwritten by the next segment; those past the row's
        // end are not written. Rows are written one after the other, so that the processor prefetches them.
        for (row, &tap) in self.panel.chunks_exact_mut(self.row_len).zip(self.taps) {
            for segment in self.segments {
                for i in (0..padded::<V::Vec<S>>(segment)).step_by(<V::Vec<S> as Vector>::LANES) {
                    store(load::<V::Vec<S>>(self.window, tap + segment.from + i), row, segment.at + i);
                }
            }
        }
    }
}
