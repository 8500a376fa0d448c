//! Implicit GEMM: C = A B for a B that is no matrix in memory. B's steps lie in planes, at the same offsets in each
//! plane, and elements outside a plane are zero. `ops/conv2d` multiplies weights (A) with images (B) so, without copying
//! their windows (im2col).
//!
//! ```text
//!  a 3 x 3 kernel with padding 1 over an image of width 4; a tile's columns are 8 neighbouring points
//!    step (0, 0): offset -5, lanes of the first row and column masked     A: weights, a packed panel
//!    step (0, 1): offset -4                                               B: plane[offset + column] for each channel's plane
//!    ..           one [`OffsetStep`] for each kernel element
//! ```

#![allow(unsafe_code)]

use std::ops::Range;

use super::element::PanelElem;
use super::mat::{MatMut, MatRef};
use super::micro_kernel::run_tile;
use super::tile::{OffsetStep, Tile, TileShape};
use crate::simd::{Float, Runner};

/// Where all steps of B lie: at the offsets `each` in every plane, `apart` elements from one plane to the next.
#[derive(Clone, Copy)]
pub(crate) struct OffsetTable<'a, T> {
    data: &'a [T],
    /// Where the first plane begins.
    start: usize,
    each: &'a [OffsetStep],
    /// A's steps for a plane. A step of A for which `each` has none is left out, as if B were zero there.
    steps: usize,
    planes: usize,
    apart: usize,
    /// One past the last element that is there.
    end: usize,
}

impl<'a, T: Float> OffsetTable<'a, T> {
    /// The first plane begins with `data`; A has `steps` steps for each plane.
    ///
    /// # Panics
    ///
    /// If an element that is there lies outside `data`, a vector has fewer lanes, or A fewer steps.
    pub(crate) fn new(
        data: &'a [T],
        each: &'a [OffsetStep],
        steps: usize,
        planes: usize,
        apart: usize,
    ) -> Self {
        assert!(each.iter().all(|step| step.nth < steps), "a step beyond A");
        let lanes = TileShape::of::<T>(Runner::current()).lanes;
        let last = planes.saturating_sub(1).checked_mul(apart);
        let mut end = 0;
        for step in each {
            for (j, &here) in step.lanes.iter().enumerate().filter(|(_, here)| **here != 0) {
                let at = |lane: u32| {
                    usize::try_from(step.at.checked_add_unsigned(j * lanes + lane as usize)?).ok()
                };
                let beyond = at(here.ilog2()).and_then(|at| at.checked_add(last?)?.checked_add(1));
                let inside =
                    at(here.trailing_zeros()).is_some() && beyond.is_some_and(|end| end <= data.len());
                assert!(inside && here.ilog2() < lanes as u32, "a step beyond B");
                end = end.max(beyond.unwrap_or(end));
            }
        }
        OffsetTable { data, start: 0, each, steps, planes, apart, end }
    }

    /// The table with all planes `by` elements later: that of other columns.
    ///
    /// # Panics
    ///
    /// If an element that is there lies outside the data then.
    pub(crate) fn shifted(self, by: usize) -> Self {
        let end = self.end.checked_add(by).filter(|&end| end <= self.data.len());
        assert!(end.is_some(), "a step beyond B");
        OffsetTable { start: self.start + by, end: end.unwrap_or(self.end), ..self }
    }
}

impl<T> OffsetTable<'_, T> {
    /// The table of these planes alone.
    pub(crate) fn planes(self, range: Range<usize>) -> Self {
        assert!(range.end <= self.planes, "planes beyond B");
        OffsetTable { start: self.start + range.start * self.apart, planes: range.len(), ..self }
    }
}

/// C = A B for a C of one tile of whole vectors. If it `goes_on`, the chains begin with what C holds. A's rows and C's columns are
/// neighbours.
///
/// # Panics
///
/// If the shapes or strides are not as stated, or [`TileShape::reads_offsets`] says no.
pub(crate) fn gemm_by_offsets<P: PanelElem>(
    a: MatRef<'_, P::Acc>,
    b: &OffsetTable<'_, P::Acc>,
    c: MatMut<'_, P::Acc>,
    goes_on: bool,
) {
    let runner = Runner::current();
    let shape = TileShape::of::<P::Acc>(runner);
    let rows = c.rows();
    assert!(a.cols() == b.planes * b.steps, "matrices that do not fit together");
    assert!(shape.reads_offsets(rows) && c.cols() == shape.cols(), "not a whole tile");
    let mut tile = Tile {
        b: b.data.as_ptr().wrapping_add(b.start),
        b_step: b.apart,
        offsets: b.each.as_ptr(),
        steps: b.planes * b.each.len(),
        planes: b.planes,
        a_plane: b.steps * a.strides().1,
        ..packed_tile(a, c, goes_on)
    };
    // SAFETY: A and C were proven when they were made, C is borrowed mutably; the places were proven, too, for lanes of this
    // instruction set, which never changes; and so is the tile's size.
    unsafe { run_tile::<P>(runner, shape.lanes, rows, &mut tile) }
}

/// [`gemm_by_offsets`] for a B that is a packed panel of a tile's width; C may have fewer columns, whole vectors.
///
/// # Panics
///
/// If the shapes or strides are not as stated, or C is larger than a tile.
pub(crate) fn gemm_by_panel<P: PanelElem>(
    a: MatRef<'_, P::Acc>,
    b: &[P::Acc],
    c: MatMut<'_, P::Acc>,
    goes_on: bool,
) {
    let runner = Runner::current();
    let shape = TileShape::of::<P::Acc>(runner);
    let (rows, cols) = (c.rows(), c.cols());
    assert!((1..=shape.rows).contains(&rows) && cols > 0 && cols <= shape.cols(), "not a tile");
    assert!(cols.is_multiple_of(shape.lanes) && a.cols() * shape.cols() <= b.len(), "steps beyond B");
    let mut tile = Tile { b: b.as_ptr(), b_step: shape.cols(), ..packed_tile(a, c, goes_on) };
    // SAFETY: A and C were proven when they were made, C is borrowed mutably; B has so many steps; the tile's size was
    // proven.
    unsafe { run_tile::<P>(runner, shape.lanes, rows, &mut tile) }
}

/// The part of [`Tile`] that both have in common.
fn packed_tile<T: Float>(a: MatRef<'_, T>, mut c: MatMut<'_, T>, goes_on: bool) -> Tile<T> {
    let ((a_row, a_step), (c_row, c_col)) = (a.strides(), c.strides());
    assert!(a.rows() == c.rows(), "matrices that do not fit together");
    assert!((a_row == 1 || a.rows() == 1) && c_col == 1, "rows or columns that are no neighbours");
    let (cols, out) = (c.cols(), c.data().as_mut_ptr());
    Tile {
        steps: a.cols(),
        a: a.data().as_ptr(),
        a_step,
        cols,
        from: if goes_on { out } else { std::ptr::null() },
        from_row: c_row,
        out,
        out_row: c_row,
        prefetch: out,
        prefetch_row: c_row,
        ..Tile::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::element::OneStep;
    use super::super::tile::VECTORS;
    use super::*;

    #[test]
    fn every_element_is_one_chain_over_planes_and_places_with_zeros_outside() {
        let shape = TileShape::of::<f32>(Runner::current());
        let (planes, apart, cols) = (3, 50 + shape.cols(), shape.cols());
        let data: Vec<f32> = (0..planes * apart).map(|i| (i as f32 * 0.7).sin()).collect();
        let all = u32::MAX >> (32 - shape.lanes);
        // The first lane lies before the data, the last behind it; some between are left out.
        let last = apart as isize - cols as isize + 1;
        let each = [(-1, [all - 1, all]), (7, [all; 2]), (last, [all, all >> 1]), (9, [all & 0x5555, 0])];
        // One of A's steps, the third, is left out.
        let mut nth = [0, 1, 3, 4].into_iter();
        let each = each.map(|(at, lanes)| OffsetStep { at, lanes, nth: nth.next().unwrap() });
        let in_plane = each.len() + 1;
        for rows in [shape.rows.div_ceil(2), shape.rows - 2, shape.rows] {
            let steps = planes * in_plane;
            let a: Vec<f32> = (0..rows * steps).map(|i| (i as f32 * 1.3).cos()).collect();
            let mut c = vec![0.0; rows * cols];
            let b = OffsetTable::new(&data, &each, in_plane, planes, apart);
            for (range, goes_on) in [(0..1, false), (1..planes, true)] {
                let steps = range.start * in_plane..range.end * in_plane;
                let a = MatRef::new(&a[steps.start * rows..], rows, steps.len(), 1, rows);
                let c = MatMut::row_major(&mut c, rows, cols);
                gemm_by_offsets::<OneStep<f32>>(a, &b.planes(range), c, goes_on);
            }
            for (i, &got) in c.iter().enumerate() {
                let (row, col) = (i / cols, i % cols);
                let mut sum = 0.0;
                for k in 0..steps {
                    let Some(step) = each.iter().find(|step| step.nth == k % in_plane) else { continue };
                    let is_there = step.lanes[col / shape.lanes] >> (col % shape.lanes) & 1 == 1;
                    let at = (k / in_plane * apart + col).wrapping_add_signed(step.at);
                    let x = if is_there { data[at] } else { 0.0 };
                    sum = a[k * rows + row].mul_add(x, sum);
                }
                assert_eq!(got.to_bits(), sum.to_bits(), "row {row}, column {col}");
            }
        }
    }

    #[test]
    fn steps_beyond_the_data_are_refused() {
        let refused = |at: isize, lanes: [u32; VECTORS], planes: usize| {
            std::panic::catch_unwind(|| {
                OffsetTable::new(&[0.0_f32; 64], &[OffsetStep { at, lanes, nth: 0 }], 1, planes, 10);
            })
            .is_err()
        };
        assert!(refused(-1, [1, 0], 1) && refused(64, [1, 0], 1) && refused(54, [1, 0], 2));
        assert!(
            refused(isize::MAX, [1, 0], 1) && refused(0, [1, 0], usize::MAX) && refused(0, [1 << 31, 0], 1)
        );
        let shifted = |by: usize| {
            let refused = std::panic::catch_unwind(|| {
                OffsetTable::new(&[0.0_f32; 64], &[OffsetStep { at: 0, lanes: [1, 0], nth: 0 }], 1, 1, 10)
                    .shifted(60)
                    .shifted(by);
            });
            refused.is_err()
        };
        assert!(!shifted(3) && shifted(4));
        assert!(
            !refused(63, [1, 0], 1) && !refused(53, [1, 0], 2) && !refused(isize::MIN, [0; 2], usize::MAX)
        );
    }
}
