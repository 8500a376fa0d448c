//! Index arithmetic of convolutions on a CPU: which source pixels an output pixel reads along one axis ([`Axis`]), the layout
//! of a window, which is a padded copy of a part of the source ([`WindowLayout`]), runs of points in it ([`Segment`]), and the order of the
//! additions ([`StepOrder`]).

use std::ops::Range;

use crate::gemm::{GemmElem, OffsetStep, PanelElem, TileShape, steps_in_place};
use crate::ops::tap_range::TapRange;

/// Output pixel `out_start + i * out_step`, for `i` below `count`, is made of source pixels
/// `i * step + tap.offset`; those outside the source count as zero.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    pub(super) count: usize,
    pub(super) step: usize,
    pub(super) taps: Vec<Tap>,
    pub(super) out_start: usize,
    pub(super) out_step: usize,
}

/// A kernel element along one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tap {
    pub(super) kernel: usize,
    pub(super) offset: isize,
}

/// The axis of a plain convolution: every output is made of all kernel elements. A single point has step 1, however large the stride.
pub(super) fn direct(count: usize, kernel: usize, stride: usize, padding: usize, dilation: usize) -> Axis {
    let tap = |k: usize| Tap { kernel: k, offset: (k * dilation) as isize - padding as isize };
    let step = if count > 1 { stride } else { 1 };
    Axis { count, step, taps: (0..kernel).map(tap).collect(), out_start: 0, out_step: 1 }
}

/// The axes of a transposed convolution, one for each remainder of the output's pixels to the stride. The output pixels of one remainder are
/// made of the same kernel elements. So a transposed convolution is `stride` plain convolutions of step 1 along each axis.
pub(super) fn transposed(
    size: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
) -> Vec<Axis> {
    // Offsets are below 2^63, so that a larger stride makes no difference.
    let stride = stride.min(isize::MAX as usize);
    let axis = |start: usize| {
        let tap = |k: usize| {
            let distance = (start + padding) as isize - (k * dilation) as isize;
            let exact = distance.rem_euclid(stride as isize) == 0;
            exact.then(|| Tap { kernel: k, offset: distance.div_euclid(stride as isize) })
        };
        let taps = (0..kernel).filter_map(tap).collect();
        Axis { count: (size - start).div_ceil(stride), step: 1, taps, out_start: start, out_step: stride }
    };
    (0..stride.min(size)).map(axis).collect()
}

impl Axis {
    /// The output pixel of a point.
    pub(super) fn place(&self, point: usize) -> usize {
        self.out_start + point * self.out_step
    }

    /// The kernel elements that lie inside the source at a point: each one's number in `taps` and its pixel, of `size`.
    pub(super) fn taps_inside(&self, point: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
        let pixel =
            move |tap: &Tap| (point * self.step).checked_add_signed(tap.offset).filter(|&at| at < size);
        self.taps.iter().enumerate().filter_map(move |(nth, tap)| Some((nth, pixel(tap)?)))
    }

    /// The points at which a kernel element lies inside the source, which has `size` pixels.
    pub(super) fn points_inside(&self, tap: &Tap, size: usize) -> Range<usize> {
        TapRange::new(tap.offset, self.step, self.count, size).steps()
    }

    /// The lowest and highest source pixel that `count` points from `start` on read; any if there are no taps.
    pub(super) fn span(&self, start: usize, count: usize) -> (isize, isize) {
        let offsets = || self.taps.iter().map(|tap| tap.offset);
        let (low, high) = (offsets().min().unwrap_or(0), offsets().max().unwrap_or(0));
        let last = (start + count - 1) * self.step;
        ((start * self.step) as isize + low, last as isize + high)
    }
}

/// The layout of a window: pixel (y, x) of channel c of the i-th image, counted from the window's corner, is at
/// `i * image_len + c * channel_len + y * row_len + (x % phases) * phase_len + x / phases`.
#[derive(Clone, Debug)]
pub(super) struct WindowLayout {
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

impl WindowLayout {
    /// The window that these rows of output points read, for so many channels.
    pub(super) fn new(rows: &Axis, cols: &Axis, points: &Range<usize>, channels: usize) -> WindowLayout {
        let (top, bottom) = rows.span(points.start, points.len());
        let (left, right) = cols.span(0, cols.count);
        let height = (bottom - top + 1) as usize;
        let phase_len = ((right - left + 1) as usize).div_ceil(cols.step);
        let channel_len = height * cols.step * phase_len;
        let image_len = channels * channel_len;
        let (first_point, row_step, phases) = (points.start, rows.step, cols.step);
        WindowLayout { top, left, phases, phase_len, first_point, row_step, channel_len, image_len }
    }

    /// The layout of some whole rows, one after the other.
    pub(super) fn of_rows(rows: &Range<usize>, width: usize) -> WindowLayout {
        let (top, channel_len) = (rows.start as isize, rows.len() * width);
        WindowLayout {
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

    /// The layout of the source itself, if these points read nothing outside it and the columns' step is 1, so that no window has to be copied.
    pub(super) fn of_source(
        rows: &Axis,
        cols: &Axis,
        points: &Range<usize>,
        source: [usize; 2],
        channels: usize,
    ) -> Option<WindowLayout> {
        let ((top, bottom), (left, right)) = (rows.span(0, points.end), cols.span(0, cols.count));
        let inside = top >= 0 && bottom < source[0] as isize && left >= 0 && right < source[1] as isize;
        (inside && cols.step == 1).then(|| WindowLayout {
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

    /// The offset of the point in row `row` and column `col`, to be added to a kernel element's place.
    pub(super) fn point(&self, row: usize, col: usize) -> usize {
        (row - self.first_point) * self.row_step * self.row_len() + col
    }

    /// The places of all steps of k for the window's first point: for each of `groups` groups of channels each kernel element, and for that each of
    /// the group's `planes` planes.
    pub(super) fn taps(&self, rows: &Axis, cols: &Axis, groups: usize, planes: usize) -> Vec<usize> {
        let first_row = (self.first_point * self.row_step) as isize;
        let mut places = Vec::with_capacity(groups * planes * rows.taps.len() * cols.taps.len());
        for group in 0..groups {
            for row in &rows.taps {
                for col in &cols.taps {
                    // Not negative: the window's corner is the lowest pixel that any point and element read.
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

/// Points that lie side by side in a window, in the output and in a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Position in the panel.
    pub(super) at: usize,
    pub(super) len: usize,
    /// Position in the window, to be added to a kernel element's place.
    pub(super) from: usize,
    /// The image, and the first point's place in a plane of the output. Points are `out_step` apart there.
    pub(super) image: usize,
    pub(super) to: usize,
}

/// Sets `out` to the segments of points `range`, counted row by row through the images.
pub(super) fn segments(
    layout: &WindowLayout,
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
        let from = image * layout.image_len + layout.point(row, col);
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
) -> Vec<OffsetStep> {
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
            steps.push(OffsetStep { at, lanes, nth: steps.len() });
        }
    }
    steps
}

/// The order in which the steps of k are added: group by group of channels that alternate; in a group kernel element by kernel element; for each
/// of these the group's channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepOrder {
    /// Channels whose steps alternate: 1, or 2 for bf16. A last channel without a partner has zeros for it.
    pub(super) together: usize,
    /// Channels of which a place (a 32-bit lane) holds an element: 2 where the CPU has a dot product of bf16 pairs.
    pub(super) in_lane: usize,
}

impl StepOrder {
    /// Channel by channel.
    pub(super) const PLAIN: StepOrder = StepOrder { together: 1, in_lane: 1 };

    /// The order of products of `T`.
    pub(super) fn of<T: GemmElem>(channels: usize) -> StepOrder {
        let together = if T::PanelElem::IN_PANELS { channels.clamp(1, 2) } else { 1 };
        StepOrder { together, in_lane: steps_in_place::<T>().min(together) }
    }

    /// Places that a kernel element takes in a group of channels.
    pub(super) fn places(self) -> usize {
        self.together / self.in_lane
    }

    /// Groups of channels that alternate.
    pub(super) fn groups(self, channels: usize) -> usize {
        channels.div_ceil(self.together)
    }

    /// Planes of places that so many channels fill.
    pub(super) fn planes(self, channels: usize) -> usize {
        self.groups(channels) * self.places()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposed_axes_are_the_converse_of_the_direct_one() {
        for (image, kernel, stride, padding, dilation) in
            [(7, 3, 1, 1, 1), (8, 3, 2, 1, 1), (9, 2, 3, 0, 2), (5, 4, 4, 2, 1), (3, 1, 5, 0, 1)]
        {
            let grid = (image + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
            let mut pairs = Vec::new();
            let there = direct(grid, kernel, stride, padding, dilation);
            for i in 0..grid {
                for tap in &there.taps {
                    pairs.push(((i * stride) as isize + tap.offset, i as isize, tap.kernel));
                }
            }
            let mut converse = Vec::new();
            for axis in transposed(image, kernel, stride, padding, dilation) {
                for i in 0..axis.count {
                    let pixel = (axis.out_start + i * axis.out_step) as isize;
                    converse.extend(axis.taps.iter().map(|tap| (pixel, i as isize + tap.offset, tap.kernel)));
                }
            }
            pairs.retain(|p| (0..image as isize).contains(&p.0));
            converse.retain(|p| (0..grid as isize).contains(&p.1));
            pairs.sort_unstable();
            converse.sort_unstable();
            assert_eq!(pairs, converse);
        }
    }
}
