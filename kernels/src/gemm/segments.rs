//! C = A B for an A that is no matrix in memory: its rows begin anywhere, and the steps of each row lie in the same
//! segments of memory. The gradient of a convolution's weight multiplies images (A) with the output's gradient (B) so, without copying
//! their windows.
//!
//! ```text
//!  row 0 of A:  at[0] + | 2 3 4 |  | 12 13 14 |  | 22 23 24 |      a row for each kernel element and channel
//!  row 1 of A:  at[1] + | 2 3 4 |  | 12 13 14 |  | 22 23 24 |      segments: the image's rows under the points
//! ```

#![allow(unsafe_code)]

use phalanx_tensor::even_piece;

use super::element::{GemmElem, PanelElem, steps_on};
use super::epilogue::Write;
use super::mat::{MatMut, MatRef};
use super::micro_kernel::{ROWS_MAX, run_tile};
use super::pack::Panels;
use super::tile::{StepSegment, Tile, TileShape};
use crate::scratch::{Scratch, with_scratch};
use crate::simd::Runner;

/// A: rows that begin at `at`, each with the same segments of steps.
#[derive(Clone, Copy)]
pub(crate) struct SegmentedRows<'a, T> {
    data: &'a [T],
    at: &'a [usize],
    segments: &'a [StepSegment],
    /// B's steps.
    steps: usize,
}

impl<'a, T> SegmentedRows<'a, T> {
    /// For a B of so many steps.
    ///
    /// # Panics
    ///
    /// If a step lies outside `data`, or beyond B's.
    pub(crate) fn new(data: &'a [T], at: &'a [usize], segments: &'a [StepSegment], steps: usize) -> Self {
        let end = |segment: &StepSegment| segment.from.checked_add(segment.len);
        let ends = segments.iter().map(end).try_fold(0, |most, end| Some(most.max(end?)));
        let last = at.iter().copied().max().unwrap_or(0);
        let inside = ends.and_then(|end| last.checked_add(end)).is_some_and(|end| end <= data.len());
        assert!(at.is_empty() || inside, "a step beyond A");
        let met = segments
            .iter()
            .try_fold(0, |sum: usize, segment| sum.checked_add(segment.skip)?.checked_add(segment.len));
        assert!(met.is_some_and(|met| met <= steps), "a step beyond B's {steps}");
        SegmentedRows { data, at, segments, steps }
    }
}

/// The number of elements that [`pack_columns`] writes for a B of so many steps and columns.
pub(crate) fn packed_len<T: Scratch>(steps: usize, cols: usize) -> usize {
    steps * cols.next_multiple_of(TileShape::of::<T>(Runner::current()).cols())
}

/// Packs B into the panels that [`gemm_segmented`] reads.
pub(crate) fn pack_columns<T: Scratch + GemmElem<Acc = T>>(b: MatRef<'_, T>, dst: &mut [T]) {
    pack_panels(b, TileShape::of::<T>(Runner::current()).cols(), dst);
}

/// Packs a matrix `[steps, lines]` into panels of `width` lines, [`steps_in_place`] steps a place. Lines beyond the matrix are zero.
///
/// # Panics
///
/// If `dst` has no room.
pub(crate) fn pack_panels<T: GemmElem>(steps: MatRef<'_, T>, width: usize, dst: &mut [T::Acc]) {
    let (runner, (step_stride, line_stride)) = (Runner::current(), steps.strides());
    let (src, lines, steps, beyond) = (steps.data(), steps.cols(), steps.rows(), T::zeroed());
    let places = steps.div_ceil(steps_in_place::<T>());
    let dst = &mut dst[..lines.next_multiple_of(width) * places];
    let panels = Panels {
        src,
        line_stride,
        step_stride,
        lines,
        steps,
        places,
        width,
        line_pitch: 1,
        beyond,
        near: false,
        dst,
    };
    T::PanelElem::run(runner, panels);
}

/// How many steps a place of a panel holds.
pub(crate) fn steps_in_place<T: GemmElem>() -> usize {
    steps_on::<T::PanelElem>(Runner::current())
}

/// C = A B, or C += A B where all of k is summed before it is added. B is packed. C's columns are neighbours and fill whole vectors; columns
/// that B does not have get unspecified values.
///
/// # Panics
///
/// If the shapes or strides are not as stated.
pub(crate) fn gemm_segmented<P: PanelElem<Acc: Scratch>>(
    a: &SegmentedRows<'_, P::Acc>,
    b: &[P::Acc],
    mut c: MatMut<'_, P::Acc>,
    write: Write,
) {
    let runner = Runner::current();
    let (shape, adds) = (TileShape::of::<P::Acc>(runner), write == Write::Accumulate);
    let ((m, n), (c_row, c_col), width) = ((c.rows(), c.cols()), c.strides(), shape.cols());
    assert!(
        a.at.len() == m && c_col == 1 && n.is_multiple_of(shape.lanes),
        "matrices that do not fit together"
    );
    assert!(n.next_multiple_of(width) * a.steps <= b.len(), "steps beyond B");
    let panels = m.div_ceil(shape.rows);
    // The micro-kernel reads segments in tiles of about full height only: panels of fewer rows repeat the last row, and their sums go to scratch
    // memory.
    let least = shape.rows - 2;
    with_scratch(shape.rows * width, |spare: &mut [P::Acc]| {
        for panel in 0..panels {
            let rows = even_piece(m, panels, panel);
            let mut at = [0; ROWS_MAX];
            at.iter_mut().enumerate().for_each(|(i, at)| *at = a.at[(rows.start + i).min(rows.end - 1)]);
            for col in (0..n).step_by(width) {
                let cols = width.min(n - col);
                let start = rows.start * c_row + col;
                let whole = rows.len() >= least;
                let (out, out_row) = match whole {
                    true => (c.data()[start..].as_mut_ptr(), c_row),
                    false => (spare.as_mut_ptr(), width),
                };
                let mut tile = Tile {
                    a: a.data.as_ptr(),
                    rows: at.as_ptr(),
                    segments: a.segments.as_ptr(),
                    segment_count: a.segments.len(),
                    b: b[col * a.steps..].as_ptr(),
                    b_step: width,
                    cols,
                    out,
                    out_row,
                    prefetch: out,
                    prefetch_row: out_row,
                    add: whole && adds,
                    ..Tile::default()
                };
                // SAFETY: the rows' segments were proven; B has whole panels of so many steps; C was proven when it was made,
                // is borrowed mutably, and `spare` has room for a tile, whose size is at most `shape`'s.
                unsafe { run_tile::<P>(runner, shape.lanes, rows.len().max(least), &mut tile) }
                if !whole {
                    for (i, sums) in spare.chunks(width).take(rows.len()).enumerate() {
                        let to = &mut c.data()[start + i * c_row..][..cols];
                        match adds {
                            true => to.iter_mut().zip(sums).for_each(|(to, &sum)| *to += sum),
                            false => to.copy_from_slice(&sums[..cols]),
                        }
                    }
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::element::OneStep;
    use super::*;

    #[test]
    fn every_element_is_one_chain_over_the_segments_added_once() {
        let (skipped, beyond) = ([2, 0, 1, 3], 4);
        let shape = TileShape::of::<f32>(Runner::current());
        let data: Vec<f32> = (0..400).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut segments =
            [(3, 5), (20, 0), (1, 33), (60, 1)].map(|(from, len)| StepSegment { skip: 0, from, len });
        segments.iter_mut().zip(skipped).for_each(|(segment, skip)| segment.skip = skip);
        // A's step for each of B's, if there is one.
        let of_segment = |segment: &StepSegment| {
            std::iter::repeat_n(None, segment.skip)
                .chain((segment.from..segment.from + segment.len).map(Some))
                .collect::<Vec<_>>()
        };
        let steps: Vec<Option<usize>> =
            segments.iter().flat_map(of_segment).chain(std::iter::repeat_n(None, beyond)).collect();
        for (m, outputs) in
            [(1, 5), (shape.rows, 33), (2 * shape.rows + 1, 2 * shape.cols()), (60, 7), (0, 3)]
        {
            let at: Vec<usize> = (0..m).map(|i| i * 37 % 340).collect();
            let b: Vec<f32> = (0..outputs * steps.len()).map(|i| (i as f32 * 1.3).cos()).collect();
            let columns = MatRef::row_major(&b, outputs, steps.len()).transposed();
            let mut packed = vec![0.0; packed_len::<f32>(steps.len(), outputs)];
            pack_columns(columns, &mut packed);
            let row_len = outputs.next_multiple_of(shape.lanes);
            let mut c = vec![0.5; m * row_len];
            let rows = SegmentedRows::new(&data, &at, &segments, steps.len());
            let both = [Write::Store, Write::Accumulate];
            for write in both {
                gemm_segmented::<OneStep<f32>>(&rows, &packed, MatMut::row_major(&mut c, m, row_len), write);
            }
            for (i, j) in (0..m).flat_map(|i| (0..outputs).map(move |j| (i, j))) {
                let term = |sum: f32, (k, step): (usize, &Option<usize>)| match step {
                    Some(step) => data[at[i] + step].mul_add(b[j * steps.len() + k], sum),
                    None => sum,
                };
                let sum = steps.iter().enumerate().fold(0.0, term);
                assert_eq!(c[i * row_len + j].to_bits(), (sum + sum).to_bits(), "row {i}, column {j}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "beyond A")]
    fn a_step_beyond_the_data_is_refused() {
        let _ = SegmentedRows::new(&[0.0; 10], &[0, 7], &[StepSegment { skip: 0, from: 1, len: 3 }], 3);
    }

    #[test]
    #[should_panic(expected = "beyond B")]
    fn a_step_beyond_b_is_refused() {
        let _ = SegmentedRows::new(&[0.0; 10], &[0], &[StepSegment { skip: 1, from: 1, len: 3 }], 3);
    }
}
