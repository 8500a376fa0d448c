//! Packing: copies panels of A (some rows each) or of B (some columns each) into the order the microkernel reads them,
//! widening half types on the way, or putting two steps of bf16 in one place where the CPU has a dot product for those.
//!
//! A panel is `width` lanes by so many places: lane i of place k at `k * width + i`, lanes beyond the matrix zero; panels
//! follow each other. A's lanes are rows, B's are columns; beyond that the two are the same job. A's rows may also be
//! copied as they are, apart from each other by what keeps them out of each other's way in the cache.

#![allow(unsafe_code)]

use std::ops::Range;

use super::element::{GemmElem, PanelElem};
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector};

/// How many places are copied for a panel before the next panel's, and how far ahead of a copy its rows are prefetched.
const PLACES_AT_ONCE: usize = 8;
/// How many squares ahead of a transposition its rows are prefetched.
const AHEAD_ALONG: usize = 4;

/// Panels to pack.
pub(super) struct Panels<'a, T: GemmElem> {
    /// Starts at lane 0, step 0.
    pub(super) src: &'a [T],
    pub(super) line_stride: usize,
    pub(super) step_stride: usize,
    /// Lanes that exist.
    pub(super) lanes: usize,
    /// Steps that exist.
    pub(super) steps: usize,
    /// Places that they fill, the last perhaps with `beyond`.
    pub(super) places: usize,
    /// Lanes of a panel.
    pub(super) width: usize,
    /// Elements of `dst` from a lane to the next: 1 in a panel. More, at least `places` in whole vectors, for rows whose
    /// steps lie side by side, and stay so.
    pub(super) line_pitch: usize,
    /// What stands for a step after the last.
    pub(super) beyond: T,
    /// `width` places for each place of each panel, or each row's.
    pub(super) dst: &'a mut [T::Acc],
}

impl<T: GemmElem> Kernel for Panels<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        if self.dst.is_empty() {
            return; // a product without steps has nothing to pack
        }
        if self.line_pitch > 1 {
            self.copy_lanes::<S, <T::Acc as Float>::Vec<S>>();
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
    /// The lanes of a step lie side by side: some steps at a time are read once, for all panels.
    #[inline(always)]
    fn copy_rows<S: Isa, V: Vector<Elem = T::Acc>>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let (per_place, len) = (T::PanelElem::steps::<S>(), self.width * self.places);
        let beyond = [self.beyond; LANES_MAX];
        for group in (0..self.places).step_by(PLACES_AT_ONCE) {
            let group = group..(group + PLACES_AT_ONCE).min(self.places);
            for (panel, first) in self.dst.chunks_mut(len).zip((0..self.lanes).step_by(self.width)) {
                let lanes = first..(first + self.width).min(self.lanes);
                for place in group.clone() {
                    let step = place * per_place;
                    let row = |step: usize| &self.src[step * self.step_stride..][lanes.clone()];
                    let (src, next) = (row(step), (step + 1 < self.steps).then(|| row(step + 1)));
                    let dst = &mut panel[place * self.width..];
                    for lane in (0..self.width).step_by(V::LANES) {
                        let lanes = lane.min(src.len())..(lane + V::LANES).min(src.len());
                        let next = next.map_or(&beyond[..lanes.len()], |next| &next[lanes.clone()]);
                        for step in 0..per_place {
                            let ahead = (PLACES_AT_ONCE * per_place + step) * self.step_stride;
                            V::prefetch(src[lanes.clone()].as_ptr().wrapping_add(ahead).cast());
                        }
                        // What it writes too much is the place after, whose turn comes.
                        put(T::load_lines::<S>(&src[lanes], next), &mut dst[lane..], self.width - lane, true);
                    }
                }
            }
        }
    }

    /// The steps of a lane lie side by side, and stay so.
    #[inline(always)]
    fn copy_lanes<S: Isa, V: Vector<Elem = T::Acc>>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let square = T::PanelElem::steps::<S>() * V::LANES;
        // Near come the next lane's steps: within a lane the CPU sees by itself what comes next.
        for (lane, dst) in self.dst.chunks_mut(self.line_pitch).enumerate() {
            let src = &self.src[lane * self.line_stride..][..self.steps];
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
                    let lane = p * self.width + i;
                    let at =
                        |step: usize| self.src[lane * self.line_stride + (first + step) * self.step_stride];
                    let next = || if count > 1 { at(1) } else { self.beyond };
                    *dst = if lane < self.lanes { at(0).pair_up::<S>(next()) } else { T::Acc::ZERO };
                }
            }
        }
    }

    /// Some steps of a lane that lie side by side.
    #[inline(always)]
    fn along<S: Isa, V: Vector<Elem = T::Acc>>(&self, lane: usize, steps: Range<usize>) -> V
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let steps = &self.src[lane * self.line_stride..][steps];
        V::prefetch(steps.as_ptr().wrapping_add(AHEAD_ALONG * V::LANES * T::PanelElem::steps::<S>()).cast());
        T::load_steps::<S>(steps, self.beyond)
    }

    /// The steps of a lane lie side by side: squares of LANES x LANES are transposed in registers.
    #[inline(always)]
    fn transpose<S: Isa, V: Vector<Elem = T::Acc>>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let per_place = T::PanelElem::steps::<S>();
        let dst = std::mem::take(&mut self.dst);
        for (p, panel) in dst.chunks_mut(self.width * self.places).enumerate() {
            // Lanes are often a power of two apart, so that those of several squares would drive each other out of the cache.
            for first in (0..self.width).step_by(V::LANES) {
                let width = (self.width - first).min(V::LANES);
                let lane = p * self.width + first;
                let rows = width.min(self.lanes.saturating_sub(lane));
                for place in (0..self.places).step_by(V::LANES) {
                    let count = (self.places - place).min(V::LANES);
                    let steps = place * per_place..((place + count) * per_place).min(self.steps);
                    let mut square = [V::zero(); LANES_MAX];
                    if rows == V::LANES {
                        for (i, row) in square[..V::LANES].iter_mut().enumerate() {
                            *row = self.along::<S, V>(lane + i, steps.clone());
                        }
                    } else {
                        for (i, row) in square[..rows].iter_mut().enumerate() {
                            *row = self.along::<S, V>(lane + i, steps.clone());
                        }
                    }
                    V::transpose(&mut square);
                    for (i, row) in square[..count].iter().enumerate() {
                        let dst = &mut panel[(place + i) * self.width + first..];
                        put(*row, dst, width, self.width == width);
                    }
                }
            }
        }
    }
}

/// Writes the first `width` lanes, and others after them where that is faster and they `may_spill`.
#[inline(always)]
fn put<V: Vector>(lanes: V, dst: &mut [V::Elem], width: usize, may_spill: bool) {
    if width >= V::LANES || may_spill && dst.len() >= V::LANES {
        lanes.store(dst);
    } else {
        lanes.store_partial(&mut dst[..width]);
    }
}
