//! The weight's gradient of small planes, images last: what lies outside for a kernel element at a point does so for all images of
//! a band, and is left out. The points of a band come in their order, and at each point its images in theirs.

use std::ops::Range;

use super::Summed;
use super::axis::{Axis, Tap};
use super::images::Lay;
use super::order::Order;
use super::weight::{Band, WINDOW_MAX, WeightGrad};
use crate::gemm::{
    GemmElem, MatMut, MatRef, Place, Rows, Run, Write, gemm_by_rows, pack_columns, with_scratch,
};
use crate::simd::Runner;

/// Points of a plane at most, images at least, and the part of all multiplications that may be left over, in sixteenths, for this
/// to pay. The order of sums depends on it.
const POINTS_MAX: usize = 128;
const IMAGES_MIN: usize = 16;
const LEFT_MAX: usize = 14;

impl WeightGrad<'_> {
    /// Whether images are last. The shapes alone decide.
    pub(super) fn by_images(&self) -> bool {
        let ([rows, cols], [images, _, height, width]) =
            (&self.axes, [0, 1, 2, 3].map(|d| self.image.shape()[d]));
        let met =
            |axis: &Axis, size| -> usize { axis.taps.iter().map(|tap| axis.met(tap, size).len()).sum() };
        let all = rows.count * rows.taps.len() * cols.count * cols.taps.len();
        let left = met(rows, height) * met(cols, width);
        images >= IMAGES_MIN && rows.count * cols.count <= POINTS_MAX && left * 16 <= all * LEFT_MAX
    }

    /// [`WeightGrad::add_band`] with images last.
    pub(super) fn add_images<T: GemmElem<Acc: Summed>>(
        &self,
        image: &[T],
        dy: &[T::Acc],
        first: usize,
        band: &Band,
        (write, sums): (Write, &mut [T::Acc]),
    ) {
        let ([rows, cols], row_len) = (&self.axes, self.row_len::<T>());
        let lanes = Order::of::<T>(band.images.len()).planes(band.images.len());
        let plane = self.image.shape()[2] * self.image.shape()[3] * lanes;
        let (runs, all) = (self.runs(lanes), self.groups * self.channels_in);
        let (steps, of_channel) = (rows.count * cols.count * lanes, runs.len() * row_len);
        let here = sums.len() / of_channel;
        let channels = here.div_ceil(here.div_ceil((WINDOW_MAX / plane.max(1)).max(1)));
        for (i, sums) in sums.chunks_mut(channels * of_channel).enumerate() {
            let count = sums.len() / of_channel;
            let at: Vec<usize> = (0..count).map(|channel| channel * plane).collect();
            with_scratch(count * plane, |window| {
                for (channel, to) in window.chunks_exact_mut(plane.max(1)).enumerate() {
                    lay(image, all, first + i * channels + channel, &band.images, (lanes, to));
                }
                for (tap, runs) in runs.iter().enumerate() {
                    let rows = Rows::new(window, &at, runs, steps);
                    let sums = MatMut::new(&mut sums[tap * row_len..], count, row_len, of_channel, 1);
                    gemm_by_rows::<T::Place>(&rows, dy, sums, write);
                }
            });
        }
    }

    /// For each kernel element the pixels that it meets, of so many lanes each.
    fn runs(&self, lanes: usize) -> Vec<Vec<Run>> {
        let ([rows, cols], [height, width]) = (&self.axes, [2, 3].map(|d| self.image.shape()[d]));
        let pixel = |point: usize, step: usize, offset: isize| (point * step).wrapping_add_signed(offset);
        let taps = rows.taps.iter().flat_map(|y| cols.taps.iter().map(move |x| (y, x)));
        let of_tap = |(y, x): (&Tap, &Tap)| {
            let (mut runs, mut met): (Vec<Run>, usize) = (Vec::new(), 0);
            for (i, j) in rows.met(y, height).flat_map(|i| cols.met(x, width).map(move |j| (i, j))) {
                let from = (pixel(i, rows.step, y.offset) * width + pixel(j, cols.step, x.offset)) * lanes;
                let skip = (i * cols.count + j) * lanes - met;
                match runs.last_mut() {
                    Some(last) if skip == 0 && last.from + last.len == from => last.len += lanes,
                    _ => runs.push(Run { skip, from, len: lanes }),
                }
                met += skip + lanes;
            }
            runs
        };
        taps.map(of_tap).collect()
    }

    /// [`WeightGrad::pack_grid`] with images last.
    pub(super) fn pack_images<T: GemmElem<Acc: Summed>>(
        &self,
        grid: &[T],
        group: usize,
        band: &Band,
        dy: &mut [T::Acc],
    ) {
        let (outputs, [rows, cols]) = (self.channels_out, &self.axes);
        let lanes = Order::of::<T>(band.images.len()).planes(band.images.len());
        let plane = rows.count * cols.count * lanes;
        with_scratch(outputs * plane, |by_output| {
            for (i, to) in by_output.chunks_exact_mut(plane).enumerate() {
                lay(grid, self.groups * outputs, group * outputs + i, &band.images, (lanes, to));
            }
            pack_columns(MatRef::row_major(by_output, outputs, plane).transposed(), dy);
        });
    }
}

/// Lays a channel of some images out, so many lanes a pixel.
fn lay<T: GemmElem>(
    planes: &[T],
    channels: usize,
    channel: usize,
    images: &Range<usize>,
    (lanes, to): (usize, &mut [T::Acc]),
) {
    let (pixels, in_lane) = (to.len() / lanes, Order::of::<T>(images.len()).in_lane);
    let apart = channels * pixels;
    let source = &planes[images.start * apart + channel * pixels..];
    let second = (in_lane > 1).then_some(apart);
    let lay = Lay { source, second, pixels, apart: in_lane * apart, images: lanes, room: lanes, to };
    T::Place::run(Runner::current(), lay);
}
