//! Packing: copies panels of A (mr rows each) or of B (nr columns each) into the order in which the micro-kernel reads them,
//! and widens half types meanwhile, or puts two steps of bf16 into one place where the CPU has a dot product for those.
//!
//! ```text
//!  a panel of `width` lines, places in memory from left to right:      a line is a row of A, a column of B;
//!                                                                      lines beyond the matrix are zero
//!    line 0  line 1 .. line width-1 | line 0  line 1 .. | ..
//!    `----------- place 0 ---------'  `-- place 1 --'
//! ```
//!
//! Panels follow each other. The macro-kernel, `thin.rs` and `segments.rs` pack by [`Panels`]. A's rows may also be
//! copied as they are, `line_pitch` places apart so that they do not fall into the same sets of the cache. A panel that B
//! lies in is only widened ([`WidenedPanel`]).

#![allow(unsafe_code)]

use super::element::{GemmElem, PanelElem};
use crate::simd::{Float, Isa, Kernel, LANES_MAX, PARTS_MAX, Vector, each};

/// How many places are copied for a panel before those of the next panel, and how many places ahead rows are prefetched.
const PLACES_AT_ONCE: usize = 8;
/// How many bytes ahead a panel that lies as it is packed is prefetched.
const AHEAD_BYTES: usize = 1024;

/// Panels to pack.
pub(super) struct Panels<'a, T: GemmElem> {
    /// Starts at line 0, step 0.
    pub(super) src: &'a [T],
    pub(super) line_stride: usize,
    pub(super) step_stride: usize,
    /// Lines that exist.
    pub(super) lines: usize,
    /// Steps that exist.
    pub(super) steps: usize,
    /// Places that the steps fill; the last may be completed by `beyond`.
    pub(super) places: usize,
    /// Lines of a panel.
    pub(super) width: usize,
    /// Elements of `dst` from a line to the next: 1 in a panel. For rows that are copied as they are it is larger, at least `places` in whole
    /// vectors.
    pub(super) line_pitch: usize,
    /// What stands for a step after the last.
    pub(super) beyond: T,
    /// Whether the lines have been prefetched.
    pub(super) near: bool,
    /// Where the panels, or the rows, are written.
    pub(super) dst: &'a mut [T::Acc],
}

/// A panel of B that lies [in panels](super::MatRef::in_panels), to be widened.
pub(super) struct WidenedPanel<'a, T: GemmElem> {
    /// From the first step on.
    pub(super) src: &'a [T],
    /// Columns, in whole vectors.
    pub(super) width: usize,
    /// So many places for each of its steps, which begin with a group.
    pub(super) dst: &'a mut [T::Acc],
}

impl<T: GemmElem> Kernel for WidenedPanel<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (width, lanes) = (self.width, <T::Acc as Float>::Vec::<S>::LANES);
        let places = T::GROUP / T::PanelElem::steps::<S>();
        for (group, dst) in self.dst.chunks_mut(places * width).enumerate() {
            let columns = &self.src[group * T::GROUP * width..][..T::GROUP * width];
            for lane in (0..width).step_by(lanes) {
                let columns = &columns[lane * T::GROUP..][..lanes * T::GROUP];
                <T::Acc as Float>::Vec::<S>::prefetch(columns.as_ptr().wrapping_byte_add(AHEAD_BYTES).cast());
                let [first, second] = T::load_group::<S>(columns);
                first.store(&mut dst[lane..]);
                if dst.len() > width {
                    second.store(&mut dst[width + lane..]);
                }
            }
        }
    }
}

impl<T: GemmElem> Kernel for Panels<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        if self.dst.is_empty() {
            return; // a product without steps has nothing to pack
        }
        if self.line_pitch > 1 {
            self.copy_lines::<S, <T::Acc as Float>::Vec<S>>();
        } else if self.line_stride == 1 {
            self.copy_rows::<S, <T::Acc as Float>::Vec<S>>();
        } else if self.step_stride == 1 {
            self.transpose::<S, <T::Acc as Float>::Vec<S>>();
        } else {
            self.gather::<S>();
        }
    }
}

impl<T: GemmElem> Panels<'_, T> {
    /// The lines of a step lie side by side: each group of steps is read once, for all panels.
    #[inline(always)]
    fn copy_rows<S: Isa, V: Vector<Elem = T::Acc>>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let (per_place, len) = (T::PanelElem::steps::<S>(), self.width * self.places);
        let beyond = [self.beyond; LANES_MAX];
        for group in (0..self.places).step_by(PLACES_AT_ONCE) {
            let group = group..(group + PLACES_AT_ONCE).min(self.places);
            for (panel, first) in self.dst.chunks_mut(len).zip((0..self.lines).step_by(self.width)) {
                let lines = first..(first + self.width).min(self.lines);
                for place in group.clone() {
                    let step = place * per_place;
                    let row = |step: usize| &self.src[step * self.step_stride..][lines.clone()];
                    let (src, next) = (row(step), (step + 1 < self.steps).then(|| row(step + 1)));
                    let dst = &mut panel[place * self.width..];
                    for lane in (0..self.width).step_by(V::LANES) {
                        let lanes = lane.min(src.len())..(lane + V::LANES).min(src.len());
                        let next = next.map_or(&beyond[..lanes.len()], |next| &next[lanes.clone()]);
                        for step in 0..per_place {
                            let ahead = (PLACES_AT_ONCE * per_place + step) * self.step_stride;
                            V::prefetch(src[lanes.clone()].as_ptr().wrapping_add(ahead).cast());
                        }
                        // A whole vector may overwrite the place after, which is written next.
                        store_lanes(
                            T::load_lines::<S>(&src[lanes], next),
                            &mut dst[lane..],
                            self.width - lane,
                            true,
                        );
                    }
                }
            }
        }
    }

    /// The steps of a line lie side by side, and are copied so.
    #[inline(always)]
    fn copy_lines<S: Isa, V: Vector<Elem = T::Acc>>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let square = T::PanelElem::steps::<S>() * V::LANES;
        // The next line is prefetched; within a line the hardware prefetches.
        for (line, dst) in self.dst.chunks_mut(self.line_pitch).enumerate() {
            let src = &self.src[line * self.line_stride..][..self.steps];
            for (steps, dst) in src.chunks(square).zip(dst.chunks_exact_mut(V::LANES)) {
                V::prefetch(steps.as_ptr().wrapping_add(self.line_stride).cast());
                T::load_steps::<S>(steps, self.beyond).store(dst);
            }
        }
    }

    /// Any strides.
    #[inline(always)]
    fn gather<S: Isa>(&mut self) {
        let per_place = T::PanelElem::steps::<S>();
        for (p, panel) in self.dst.chunks_mut(self.width * self.places).enumerate() {
            for (place, dst) in panel.chunks_mut(self.width).enumerate() {
                let first = place * per_place;
                let count = (self.steps - first).min(per_place);
                for (i, dst) in dst.iter_mut().enumerate() {
                    let line = p * self.width + i;
                    let at =
                        |step: usize| self.src[line * self.line_stride + (first + step) * self.step_stride];
                    let next = || if count > 1 { at(1) } else { self.beyond };
                    *dst = if line < self.lines { at(0).pair_up::<S>(next()) } else { T::Acc::ZERO };
                }
            }
        }
    }

    /// The steps of a line lie side by side: squares of LANES x LANES are transposed in registers.
    #[inline(always)]
    fn transpose<S: Isa, V: Vector<Elem = T::Acc>>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let per_place = T::PanelElem::steps::<S>();
        let dst = std::mem::take(&mut self.dst);
        for (p, panel) in dst.chunks_mut(self.width * self.places).enumerate() {
            // One square of lines at a time: lines are often a power of two apart, so that those of several squares would evict each other.
            for first in (0..self.width).step_by(V::LANES) {
                let width = (self.width - first).min(V::LANES);
                let line = p * self.width + first;
                let rows = width.min(self.lines.saturating_sub(line));
                let whole = if rows == width { self.transpose_whole::<S, V>(panel, line, first) } else { 0 };
                for place in (whole * V::LANES..self.places).step_by(V::LANES) {
                    let count = (self.places - place).min(V::LANES);
                    let steps = place * per_place..((place + count) * per_place).min(self.steps);
                    let mut square = [V::zero(); LANES_MAX];
                    for (i, row) in square[..rows].iter_mut().enumerate() {
                        let steps = &self.src[(line + i) * self.line_stride..][steps.clone()];
                        *row = T::load_steps::<S>(steps, self.beyond);
                    }
                    V::transpose(&mut square);
                    for (i, row) in square[..count].iter().enumerate() {
                        let dst = &mut panel[(place + i) * self.width + first..];
                        store_lanes(*row, dst, width, self.width == width);
                    }
                }
            }
        }
    }

    /// The squares that have all of their steps, of lines that exist, but for one whose last vector may not be written whole. Returns how many.
    #[inline(always)]
    fn transpose_whole<S: Isa, V: Vector<Elem = T::Acc>>(
        &self,
        panel: &mut [T::Acc],
        line: usize,
        first: usize,
    ) -> usize
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let square = V::LANES * T::PanelElem::steps::<S>();
        let (stride, pitch) = (self.line_stride, self.width);
        let width = (pitch - first).min(V::LANES);
        if const { V::LANES == LANES_MAX && V::PARTS == PARTS_MAX } && pitch == V::LANES / 2 {
            // A vector holds two places.
            for (i, dst) in panel.chunks_exact_mut(V::LANES * pitch).enumerate().take(self.steps / square) {
                let rows = each(|row| {
                    let steps = &self.src[(line + row) * stride + i * square..][..square];
                    V::prefetch_far(steps.as_ptr().wrapping_add(pitch * stride).cast());
                    T::load_steps::<S>(steps, self.beyond)
                });
                for (dst, lanes) in dst.chunks_exact_mut(V::LANES).zip(V::interleave(rows)) {
                    lanes.store(dst);
                }
            }
            return self.steps / square;
        }
        if width < V::LANES && width < pitch {
            return 0; // beside lanes that are written already
        }
        // A vector that has lanes beyond the panel's lines overwrites the place after, which is written next.
        let places = (panel.len() - first + pitch).saturating_sub(V::LANES) / pitch;
        let count = (self.steps / square).min(places / V::LANES);
        if count == 0 {
            return 0;
        }
        let src = &self.src[line * stride..][..(width - 1) * stride + count * square];
        let dst = &mut panel[first..][..(count * V::LANES - 1) * pitch + V::LANES];
        for i in 0..count {
            let src = src.as_ptr().wrapping_add(i * square);
            let mut rows = [V::zero(); LANES_MAX];
            for (i, row) in rows[..V::LANES].iter_mut().enumerate() {
                let steps = src.wrapping_add(i.min(width - 1) * stride);
                // The same steps of the next square's line: all of a row of squares lies between, so memory has time to answer.
                if !self.near {
                    V::prefetch_far(steps.wrapping_add(V::LANES * stride).cast());
                }
                // SAFETY: within `src`, by its length.
                *row = T::load_steps::<S>(unsafe { std::slice::from_raw_parts(steps, square) }, self.beyond);
            }
            V::transpose(&mut rows);
            let dst = dst.as_mut_ptr().wrapping_add(i * V::LANES * pitch);
            for (i, row) in rows[..V::LANES].iter().enumerate() {
                // SAFETY: within `dst`, by its length.
                row.store(unsafe { std::slice::from_raw_parts_mut(dst.wrapping_add(i * pitch), V::LANES) });
            }
        }
        count
    }
}

/// Writes the first `width` lanes; all of the vector if that is faster and `may_spill` allows to overwrite what follows.
#[inline(always)]
fn store_lanes<V: Vector>(lanes: V, dst: &mut [V::Elem], width: usize, may_spill: bool) {
    if width >= V::LANES || may_spill && dst.len() >= V::LANES {
        lanes.store(dst);
    } else {
        lanes.store_partial(&mut dst[..width]);
    }
}
