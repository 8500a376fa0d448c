//! A padded plane regrouped by (row mod stride, column mod stride), as space-to-depth does: [`PhaseLayout`] and the copy, [`SpaceToDepth`].
//!
//! The pixels of one such pair of remainders are a *phase*. The pixels that neighbouring outputs read at one kernel element lie side by
//! side in a phase, from row to row too: the outputs of a whole plane are one long run of vectors, in which each row is followed by a gap
//! that holds no output.
//!
//! ```text
//!  stride 2, kernel 3, padding 1, a row of pixels 0..4, margins _:
//!
//!    padded row    _ 0 1 2 3 4 _                outputs 0, 1, 2 read at kernel element
//!    phase 0       _   1   3   _                  0: _ 1 3  phase 0 from place 0
//!    phase 1         0   2   4                    1: 0 2 4  phase 1 from place 0
//!                                                 2: 1 3 _  phase 0 from place 1
//! ```
//!
//! Direct convolution (`conv2d/thin.rs`), its weight's gradient and max pooling read their pixels so.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector};

/// Vectors that one step over a run reads at most, and so may read beyond its end.
pub(super) const VECTORS_MAX: usize = 4;

/// The receptive field of `count` outputs along an axis: output i reads pixel `i * step + offset` for each of some offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReceptiveField {
    step: usize,
    count: usize,
    /// The lowest offset.
    low: isize,
    /// The highest pixel that the last output reads.
    high: isize,
}

impl ReceptiveField {
    /// That of `count` outputs and these offsets, of which there is one at least.
    pub(super) fn new(
        step: usize,
        count: usize,
        offsets: impl Iterator<Item = isize> + Clone,
    ) -> ReceptiveField {
        let last = (count.max(1) - 1) * step;
        let (low, high) = (offsets.clone().min().unwrap_or(0), offsets.max().unwrap_or(0));
        ReceptiveField { step, count, low, high: last as isize + high }
    }

    fn len(&self) -> usize {
        (self.high - self.low + 1) as usize
    }

    /// The phase of the pixel that output 0 reads at an offset, and the pixel's place in it.
    fn place(&self, offset: isize) -> (usize, usize) {
        let from_low = (offset - self.low) as usize;
        (from_low % self.step, from_low / self.step)
    }
}

/// The layout of the phases of a plane, or of the rows that some rows of outputs read.
#[derive(Clone, Copy, Debug)]
pub(super) struct PhaseLayout {
    axes: [ReceptiveField; 2],
    /// Places of a phase's row.
    pub(super) row_len: usize,
    phase_len: usize,
    /// Places of all phases.
    pub(super) len: usize,
}

impl PhaseLayout {
    pub(super) fn new(mut axes: [ReceptiveField; 2]) -> PhaseLayout {
        if axes[1].count <= 1 {
            // Each pixel of a row has a phase: then the outputs of all rows lie side by side.
            axes[1].step = axes[1].len();
        }
        let [rows, cols] = [0, 1].map(|i| axes[i].len().div_ceil(axes[i].step));
        // A row is written by whole vectors, the last of which may reach beyond a phase.
        let phase_len = rows * cols + LANES_MAX;
        let beyond = VECTORS_MAX * LANES_MAX;
        PhaseLayout { axes, row_len: cols, phase_len, len: axes[0].step * axes[1].step * phase_len + beyond }
    }

    /// The place of the pixel that the first output reads at an offset. That of the output in another row and column is
    /// `row * row_len + column` further on.
    pub(super) fn place(&self, [row, col]: [isize; 2]) -> usize {
        let ((down, y), (right, x)) = (self.axes[0].place(row), self.axes[1].place(col));
        (down * self.axes[1].step + right) * self.phase_len + y * self.row_len + x
    }

    /// The most that [`PhaseLayout::rows`] are.
    pub(super) fn rows_max(&self, height: usize) -> usize {
        self.axes[0].len().min(height)
    }

    /// The rows that outputs from row `first` on read, of a plane of `height` rows.
    pub(super) fn rows(&self, first: usize, height: usize) -> std::ops::Range<usize> {
        let top = (first * self.axes[0].step) as isize + self.axes[0].low;
        let inside = |row: isize| row.clamp(0, height as isize) as usize;
        inside(top)..inside(top + self.axes[0].len() as isize)
    }
}

/// Where blocks of `block` places begin that hold all outputs of some rows, `row_len` places apart: blocks of one long run, or of
/// a run for each row if those are fewer.
#[inline(always)]
pub(super) fn runs([rows, cols]: [usize; 2], row_len: usize, block: usize) -> impl Iterator<Item = usize> {
    let all = (rows - 1) * row_len + cols;
    let (count, len) = match all.div_ceil(block) <= rows * cols.div_ceil(block) {
        true => (1, all),
        false => (rows, cols),
    };
    (0..count).flat_map(move |row| (row * row_len..row * row_len + len).step_by(block))
}

/// Copies planes into phases. Planes are `apart` elements of `source` from each other.
pub(super) struct SpaceToDepth<'a, V> {
    pub(super) layout: &'a PhaseLayout,
    pub(super) source: &'a [V],
    pub(super) apart: usize,
    /// The source begins with this row of the plane, and has so many rows and columns.
    pub(super) top: usize,
    pub(super) size: [usize; 2],
    /// The first row of outputs.
    pub(super) first: usize,
    /// What the margin holds.
    pub(super) margin: V,
    /// Room for the phases of each plane.
    pub(super) to: &'a mut [V],
}

impl<V: Float> Kernel for SpaceToDepth<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let PhaseLayout { axes: [rows, cols], row_len, phase_len, len } = *self.layout;
        let [height, width] = self.size;
        let top = (self.first * rows.step) as isize + rows.low - self.top as isize;
        // A padded row is a margin, pixels from `left` on, and a margin.
        let (margin, left) = ((-cols.low).max(0) as usize, cols.low.max(0) as usize);
        let margin = margin.min(cols.len());
        let pixels = width.saturating_sub(left).min(cols.len() - margin);
        for (plane, to) in self.to.chunks_exact_mut(len).enumerate() {
            // The row's phase and its number there are counted: divisions would take longer than a short row.
            let (mut phase, mut line) = (0, 0);
            for y in 0..rows.len() {
                let at = phase * cols.step * phase_len + line * row_len;
                phase += 1;
                (phase, line) = if phase == rows.step { (0, line + 1) } else { (phase, line) };
                let from = top + y as isize;
                let is_inside = from >= 0 && (from as usize) < height;
                let from = match is_inside {
                    true => {
                        &self.source[plane * self.apart + from as usize * width + left.min(width)..][..pixels]
                    }
                    false => &[],
                };
                if cols.step == 1 {
                    copy_row::<V::Vec<S>>(from, margin, self.margin, row_len, &mut to[at..]);
                } else {
                    let row = &mut to[at..];
                    for right in 0..cols.step {
                        let to = &mut row[right * phase_len..][..row_len];
                        let before = margin.saturating_sub(right).div_ceil(cols.step).min(row_len);
                        let skipped = before * cols.step + right - margin;
                        let there = from.len().saturating_sub(skipped).div_ceil(cols.step);
                        to[..before].fill(self.margin);
                        to[before + there..].fill(self.margin);
                        let from = from.get(skipped..).unwrap_or(&[]);
                        let to = &mut to[before..before + there];
                        // The compiler makes vectors where it knows the step.
                        match cols.step {
                            2 => {
                                let (pairs, last) = from.as_chunks::<2>();
                                let whole = pairs.len().min(to.len());
                                for i in 0..whole {
                                    to[i] = pairs[i][0];
                                }
                                if whole < to.len() {
                                    to[whole] = last[0];
                                }
                            }
                            step => {
                                for i in 0..to.len() {
                                    to[i] = from[i * step];
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A row of `len` places: a margin, the pixels, and a margin. By whole vectors, so that places behind it are written too.
#[inline(always)]
fn copy_row<X: Vector>(from: &[X::Elem], margin: usize, beyond: X::Elem, len: usize, to: &mut [X::Elem]) {
    let empty = X::splat(beyond);
    (0..margin).step_by(X::LANES).for_each(|i| empty.store(&mut to[i..]));
    (margin + from.len()..len).step_by(X::LANES).for_each(|i| empty.store(&mut to[i..]));
    let to = &mut to[margin..];
    let whole = from.len() / X::LANES * X::LANES;
    (0..whole).step_by(X::LANES).for_each(|i| X::load(&from[i..]).store(&mut to[i..]));
    if whole < from.len() {
        X::load_partial(&from[whole..], beyond).store(&mut to[whole..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{available_isas, dispatch_on};

    #[test]
    fn every_output_meets_its_pixels_side_by_side_and_the_margin_outside() {
        let (height, width) = (7, 37);
        let plane: Vec<f32> = (0..2 * height * width).map(|i| i as f32).collect();
        for (steps, lows, kernel) in [
            ([1, 1], [-1, -1], [3, 3]),
            ([2, 2], [-1, -1], [3, 3]),
            ([1, 1], [2, 3], [2, 5]),
            ([3, 2], [0, -20], [2, 30]),
            ([2, 5], [-9, 0], [12, 3]),
            ([4, 7], [0, 0], [1, 2]),
        ] {
            for (first, count) in [(0, [3, 5]), (1, [2, 12]), (2, [1, 1])] {
                let axis = |i: usize| {
                    ReceptiveField::new(steps[i], count[i], (0..kernel[i]).map(move |k| lows[i] + k as isize))
                };
                let layout = PhaseLayout::new([axis(0), axis(1)]);
                for isa in available_isas() {
                    for rows in [0..height, layout.rows(first, height)] {
                        let mut to = vec![f32::NAN; 2 * layout.len];
                        let lay = SpaceToDepth {
                            layout: &layout,
                            source: &plane[rows.start * width..],
                            apart: height * width,
                            top: rows.start,
                            size: [rows.len(), width],
                            first,
                            margin: -1.0,
                            to: &mut to,
                        };
                        dispatch_on(isa, lay);
                        for i in 0..2 * count[0] * count[1] * kernel[0] * kernel[1] {
                            let (k, i) = (i % (kernel[0] * kernel[1]), i / (kernel[0] * kernel[1]));
                            let (x, y, c) = (i % count[1], i / count[1] % count[0], i / count[1] / count[0]);
                            let offset = [0, 1].map(|d| lows[d] + [k / kernel[1], k % kernel[1]][d] as isize);
                            let row = ((first + y) * steps[0]) as isize + offset[0];
                            let col = (x * steps[1]) as isize + offset[1];
                            let is_inside =
                                (0..height as isize).contains(&row) && (0..width as isize).contains(&col);
                            let wanted = match is_inside {
                                true => plane[(c * height + row as usize) * width + col as usize],
                                false => -1.0,
                            };
                            let got = to[c * layout.len + layout.place(offset) + y * layout.row_len + x];
                            assert_eq!(got, wanted, "{isa} {steps:?} {lows:?} {kernel:?} {first} {offset:?}");
                        }
                    }
                }
            }
        }
    }
}
