//! The part of a source that some points of the output meet, laid out so that what neighbouring points meet lies side by
//! side: zeros around it, and columns sorted by their remainder to the step.

use std::ops::Range;

use super::axis::Axis;
use crate::gemm::{Step, TileShape};

/// How a window lies: pixel (y, x) of channel c of the i-th image, counted from the window's corner, is at
/// `i * image_len + c * channel_len + y * row_len + (x % phases) * phase_len + x / phases`.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    /// The source pixel at the window's corner.
    pub(super) top: isize,
    pub(super) left: isize,
    pub(super) phases: usize,
    pub(super) phase_len: usize,
    first_point: usize,
    row_step: usize,
    pub(super) channel_len: usize,
    pub(super) image_len: usize,
}

impl Frame {
    /// The window that these rows of output points meet, for so many channels.
    pub(super) fn new(rows: &Axis, cols: &Axis, points: &Range<usize>, channels: usize) -> Frame {
        let (top, bottom) = rows.span(points.start, points.len());
        let (left, right) = cols.span(0, cols.count);
        let height = (bottom - top + 1) as usize;
        let phase_len = ((right - left + 1) as usize).div_ceil(cols.step);
        let channel_len = height * cols.step * phase_len;
        let image_len = channels * channel_len;
        let (first_point, row_step, phases) = (points.start, rows.step, cols.step);
        Frame { top, left, phases, phase_len, first_point, row_step, channel_len, image_len }
    }

    /// Some whole rows, one after the other.
    pub(super) fn of_rows(rows: &Range<usize>, width: usize) -> Frame {
        let (top, channel_len) = (rows.start as isize, rows.len() * width);
        Frame {
            top,
            left: 0,
            phases: 1,
            phase_len: width,
            first_point: 0,
            row_step: 1,
            channel_len,
            image_len: channel_len,
        }
    }

    /// The source itself as a window, if these points meet nothing outside it and columns need no sorting.
    pub(super) fn of_source(
        rows: &Axis,
        cols: &Axis,
        points: &Range<usize>,
        source: [usize; 2],
        channels: usize,
    ) -> Option<Frame> {
        let ((top, bottom), (left, right)) = (rows.span(0, points.end), cols.span(0, cols.count));
        let inside = top >= 0 && bottom < source[0] as isize && left >= 0 && right < source[1] as isize;
        (inside && cols.step == 1).then(|| Frame {
            top: 0,
            left: 0,
            phases: 1,
            phase_len: source[1],
            first_point: 0,
            row_step: rows.step,
            channel_len: source[0] * source[1],
            image_len: channels * source[0] * source[1],
        })
    }

    pub(super) fn row_len(&self) -> usize {
        self.phases * self.phase_len
    }

    /// What a point in row `row` and column `col` of the output adds to a kernel element's place.
    pub(super) fn point(&self, row: usize, col: usize) -> usize {
        (row - self.first_point) * self.row_step * self.row_len() + col
    }

    /// The places of each kernel element for the window's first point, in so many planes one after the other; those of all
    /// groups of planes, group by group.
    pub(super) fn taps(&self, rows: &Axis, cols: &Axis, groups: usize, planes: usize) -> Vec<usize> {
        let first_row = (self.first_point * self.row_step) as isize;
        let mut places = Vec::with_capacity(groups * planes * rows.taps.len() * cols.taps.len());
        for group in 0..groups {
            for row in &rows.taps {
                for col in &cols.taps {
                    // Not negative: the window's corner is the least that any point and element meet.
                    let (y, x) =
                        ((first_row + row.offset - self.top) as usize, (col.offset - self.left) as usize);
                    let place = (x % self.phases) * self.phase_len + x / self.phases + y * self.row_len();
                    places.extend((0..planes).map(|i| (group * planes + i) * self.channel_len + place));
                }
            }
        }
        places
    }
}

/// Points that lie side by side in a window, the output and a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Position in the panel.
    pub(super) at: usize,
    pub(super) len: usize,
    /// Position in the window, to be added to a kernel element's place.
    pub(super) from: usize,
    /// Which image, and where in a plane of the output, a step apart.
    pub(super) image: usize,
    pub(super) to: usize,
}

/// The segments of points `range`, counted row by row through the images.
pub(super) fn segments(
    frame: &Frame,
    (rows, cols): (&Axis, &Axis),
    points: &Range<usize>,
    width: usize,
    range: Range<usize>,
    out: &mut Vec<Segment>,
) {
    out.clear();
    let start = range.start;
    let mut next = range.start;
    while next < range.end {
        let (row, col) = (next / cols.count, next % cols.count);
        let (image, row) = (row / points.len(), points.start + row % points.len());
        let len = (cols.count - col).min(range.end - next);
        let from = image * frame.image_len + frame.point(row, col);
        let to = (rows.out_start + row * rows.out_step) * width + cols.out_start + col * cols.out_step;
        match out.last_mut() {
            Some(last)
                if last.image == image
                    && last.from + last.len == from
                    && last.to + last.len * cols.out_step == to =>
            {
                last.len += len;
            }
            _ => out.push(Segment { at: next - start, len, from, image, to }),
        }
        next += len;
    }
}

/// The steps of a tile for some points of the output, counted row by row, in a source whose rows are as long: where each
/// kernel element's pixels lie in a plane of so many rows and columns.
pub(super) fn steps_in_plane(
    [rows, cols]: &[Axis; 2],
    [height, width]: [usize; 2],
    points: Range<usize>,
    tile: TileShape,
) -> Vec<Step> {
    // Which points a kernel element's row, or column, leaves inside.
    let (mut in_rows, mut in_cols) = (vec![0_u64; rows.taps.len()], vec![0_u64; cols.taps.len()]);
    let (mut row, mut col) = (points.start / width, points.start % width);
    for i in 0..points.len() {
        for (axis, place, size, inside) in
            [(rows, row, height, &mut in_rows), (cols, col, width, &mut in_cols)]
        {
            for (tap, inside) in axis.taps.iter().zip(inside) {
                let is_in = place.checked_add_signed(tap.offset).is_some_and(|at| at < size);
                *inside |= u64::from(is_in) << i;
            }
        }
        col += 1;
        (row, col) = if col == width { (row + 1, 0) } else { (row, col) };
    }
    let lanes = |inside: u64, first: usize| (inside >> first & (u64::MAX >> (64 - tile.lanes))) as u32;
    let mut steps = Vec::with_capacity(in_rows.len() * in_cols.len());
    for (row, in_row) in rows.taps.iter().zip(&in_rows) {
        for (col, in_col) in cols.taps.iter().zip(&in_cols) {
            // Where no point is inside, it does not matter what this wraps to.
            let at = row.offset.wrapping_mul(width as isize).wrapping_add(col.offset);
            let at = at.wrapping_add_unsigned(points.start);
            let lanes = [0, tile.lanes].map(|first| lanes(in_row & in_col, first));
            steps.push(Step { at, lanes, nth: steps.len() });
        }
    }
    steps
}
