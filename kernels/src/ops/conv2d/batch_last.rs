//! Convolutions of small planes, many images at a time: a tile's columns are the same output pixel
//! of many images. A kernel element that lies outside the image does so for all of them and is left out; in small planes the border
//! is a third or a half of all multiplications. Source and sums are laid out with images last (CHWN).
//!
//! ```text
//!  source [n, c, h w]  --interleave-->  [c, h w, n]  --gemm_by_offsets for each point-->  [channel, point, n]  --deinterleave-->  output
//! ```
//!
//! `cpu.rs` calls [`BatchLast::run`] where [`pays`] says so; `weight_gradient.rs` uses the methods of [`WeightGrad`] below, where
//! [`WeightGrad::by_images`] says so.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use std::ops::Range;

use phalanx_tensor::{Pool, even_piece};

use super::implicit_gemm::SharedInputs;
use super::packed_weights::PackedWeights;
use super::problem::{Band, Correlation, Summed, WEIGHT_WINDOW_MAX, WeightGrad};
use super::window::{Axis, StepOrder, Tap};
use crate::gemm::{
    GemmElem, MatMut, MatRef, OffsetStep, OffsetTable, PanelElem, SegmentedRows, StepSegment, TileShape,
    Write, gemm_by_offsets, gemm_segmented, pack_columns,
};
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Runner, Vector, dispatch};

/// Conditions for this to pay: points of the output at most, and the share of all multiplications that may remain, in sixteenths. The share
/// depends on what the other way would be: images read in place, gathered ones, or ones whose columns are regrouped by a stride first.
const POINTS_MAX: usize = 1024;
const LEFT_MAX: [usize; 3] = [14, 15, 16];
/// Elements of the source that stay in the L2 cache while they are multiplied.
const SOURCE_MAX: usize = 1 << 16;
/// Images that are computed together.
const IMAGES_MAX: usize = 64;
/// Images whose sums are written to the output together: a cache line of them.
pub(super) const TOGETHER: usize = 16;
/// Elements of the output that a thread writes at least.
const PIECE: usize = 1 << 13;

/// A convolution with images last.
pub(super) struct BatchLast<'a, T: GemmElem> {
    pub(super) problem: &'a Correlation<'a>,
    pub(super) shared: &'a SharedInputs<'a, T>,
    /// The weights of each pass.
    pub(super) weights: &'a [PackedWeights<'a, T::Acc>],
}

/// Whether this pays, for a tile that can read offset tables.
pub(super) fn pays(problem: &Correlation<'_>, images: usize, tile: TileShape) -> bool {
    let [height, width] = [2, 3].map(|d| problem.source.shape()[d]);
    let inside =
        |axis: &Axis, size| -> usize { (0..axis.count).map(|i| axis.taps_inside(i, size).count()).sum() };
    let all = |[rows, cols]: &[Axis; 2]| rows.count * rows.taps.len() * cols.count * cols.taps.len();
    let left = |[rows, cols]: &[Axis; 2]| inside(rows, height) * inside(cols, width);
    let all: usize = problem.passes.iter().map(all).sum::<usize>() * images;
    let left: usize = problem.passes.iter().map(left).sum::<usize>() * images.next_multiple_of(tile.cols());
    let [rows, cols] = &problem.passes[0];
    let kind = match [rows.step, cols.step, rows.out_step, cols.out_step] {
        [1, 1, 1, 1] if cols.count == width => 0,
        [1, 1, 1, 1] => 1,
        _ => 2,
    };
    let points: usize = problem.passes.iter().map(|[rows, cols]| rows.count * cols.count).sum();
    left > 0 && points <= POINTS_MAX && left * 16 <= all * LEFT_MAX[kind]
}

impl<T: GemmElem<Acc: Summed>> BatchLast<'_, T> {
    /// Elements of scratch memory for a block of images: of the source, and of the sums.
    pub(super) fn elements(&self) -> [usize; 2] {
        let panels = self.weights[0].panels;
        let source = self.problem.groups * self.shared.order.planes(self.problem.channels_in) * self.pixels();
        [source, self.problem.groups * panels.count * panels.rows * self.points()]
            .map(|len| len * self.room())
    }

    /// Computes all planes of `out`.
    pub(super) fn run(&self, pool: &Pool, out: &mut [T]) {
        let (images, steps, [source, sums]) = (self.shared.shape[0], self.steps(), self.elements());
        let len = out.len() / images;
        with_scratch(source + sums, |scratch| {
            let (source, sums) = scratch.split_at_mut(source);
            for first in (0..images).step_by(IMAGES_MAX) {
                let block = first..images.min(first + IMAGES_MAX);
                let out = &mut out[first * len..block.end * len];
                self.block(block, &steps, pool, (&mut *source, &mut *sums), out);
            }
        });
    }

    fn block(
        &self,
        images: Range<usize>,
        steps: &[Vec<(usize, Vec<OffsetStep>)>],
        pool: &Pool,
        (source, sums): (&mut [T::Acc], &mut [T::Acc]),
        out: &mut [T],
    ) {
        let (panels, len) = (self.weights[0].panels, out.len() / images.len());
        let planes = self.shared.order.planes(self.problem.channels_in);
        pool.for_each_chunk(source, self.pixels() * self.room(), |i, plane| {
            self.fill_plane(&images, i / planes, i % planes, plane);
        });
        let (source, group_len) = (&*source, source.len() / self.problem.groups);
        pool.for_each_chunk(sums, panels.rows * self.points() * self.room(), |i, sums| {
            let source = &source[i / panels.count * group_len..][..group_len];
            self.multiply(i, images.len(), source, steps, sums);
        });
        let (sums, together) = (&*sums, PIECE.div_ceil(len).next_multiple_of(TOGETHER));
        pool.for_each_chunk(out, together * len, |i, out| self.write_images(i * together, sums, out));
    }

    /// Elements for each pixel or point: a block's images, filled up to whole tiles.
    fn room(&self) -> usize {
        self.shared.shape[0].min(IMAGES_MAX).next_multiple_of(self.shared.tile.cols())
    }

    fn points(&self) -> usize {
        self.shared.shape[2] * self.shared.shape[3]
    }

    fn pixels(&self) -> usize {
        self.problem.source.shape()[2] * self.problem.source.shape()[3]
    }

    /// Fills plane number `plane` of a group, images last; a plane of pairs holds two channels.
    fn fill_plane(&self, images: &Range<usize>, group: usize, plane: usize, to: &mut [T::Acc]) {
        let (pixels, order, channels) = (self.pixels(), self.shared.order, self.problem.channels_in);
        let (first, all) = (plane * order.in_lane, self.problem.groups * channels);
        if first >= channels {
            return to.fill(<T::Acc as Float>::ZERO); // the partner that a last channel lacks
        }
        let from = (images.start * all + group * channels + first) * pixels;
        let second = (order.in_lane > 1 && first + 1 < channels).then_some(pixels);
        let source = &self.shared.source[from..];
        let interleave = Interleave {
            source,
            second,
            pixels,
            apart: all * pixels,
            images: images.len(),
            room: self.room(),
            to,
        };
        T::PanelElem::run(Runner::current(), interleave);
    }

    /// For each pass and point: its place in the output, and the offset table of the kernel elements inside the image there.
    fn steps(&self) -> Vec<Vec<(usize, Vec<OffsetStep>)>> {
        let ([height, width], places) =
            ([2, 3].map(|d| self.problem.source.shape()[d]), self.shared.order.places());
        let (room, plane) = (self.room(), self.pixels() * self.room());
        let of_point = |[rows, cols]: &[Axis; 2], i: usize, j: usize| {
            let mut steps = Vec::new();
            for (nth_row, y) in rows.taps_inside(i, height) {
                for (nth_col, x) in cols.taps_inside(j, width) {
                    let (nth, at) = (nth_row * cols.taps.len() + nth_col, (y * width + x) * room);
                    let step = |k: usize| {
                        OffsetStep::whole((k * plane + at) as isize, self.shared.tile.lanes, nth * places + k)
                    };
                    steps.extend((0..places).map(step));
                }
            }
            (rows.place(i) * self.shared.shape[3] + cols.place(j), steps)
        };
        let of_pass = |pass: &[Axis; 2]| {
            let points = (0..pass[0].count).flat_map(|i| (0..pass[1].count).map(move |j| (i, j)));
            points.map(|(i, j)| of_point(pass, i, j)).collect()
        };
        self.problem.passes.iter().map(of_pass).collect()
    }

    /// The sums of a panel of output channels, at all points of all images.
    fn multiply(
        &self,
        panel: usize,
        images: usize,
        source: &[T::Acc],
        steps: &[Vec<(usize, Vec<OffsetStep>)>],
        sums: &mut [T::Acc],
    ) {
        let (room, tile, order) = (self.room(), self.shared.tile, self.shared.order);
        let plane = self.pixels() * room;
        let (apart, groups) = (order.places() * plane, order.groups(self.problem.channels_in));
        let together = (SOURCE_MAX / apart.max(1)).clamp(1, groups.max(1));
        for first in (0..groups.max(1)).step_by(together) {
            let block: Range<usize> = first..groups.min(first + together);
            for (steps, weights) in steps.iter().zip(self.weights) {
                let (weights, rows) = weights.of_panel(panel);
                let in_plane = weights.len() / (rows * groups).max(1);
                let from = block.start * in_plane * rows;
                let a = MatRef::new(&weights[from..], rows, block.len() * in_plane, 1, rows);
                for (point, steps) in steps {
                    let b = OffsetTable::new(source, steps, in_plane, groups, apart).planes(block.clone());
                    for image in (0..images).step_by(tile.cols()) {
                        let c = &mut sums[point * room + image..];
                        let c = MatMut::new(c, rows, tile.cols(), self.points() * room, 1);
                        gemm_by_offsets::<T::PanelElem>(a, &b.shifted(image), c, first > 0);
                    }
                }
            }
        }
    }

    /// Writes the sums of images from `first` on to the output.
    fn write_images(&self, first: usize, sums: &[T::Acc], out: &mut [T]) {
        let (points, room, channels) = (self.points(), self.room(), self.shared.shape[1]);
        let panels = self.weights[0].panels;
        for (i, out) in out.chunks_mut(TOGETHER * channels * points).enumerate() {
            for panel in 0..channels / panels.unit * panels.count {
                let rows = even_piece(panels.unit, panels.count, panel % panels.count);
                let channel = panel / panels.count * panels.unit + rows.start;
                for (row, channel) in (channel..channel + rows.len()).enumerate() {
                    let sums = &sums[(panel * panels.rows + row) * points * room + first + i * TOGETHER..];
                    let bias = self.shared.bias.map(|bias| bias[channel]);
                    let out = &mut out[channel * points..];
                    dispatch(Deinterleave::<T> { sums, room, bias, points, out, apart: channels * points });
                }
            }
        }
    }
}

/// Interleaves planes: `[planes, pixels]` to `[pixels, planes]`, widened. Planes are images here, channels in `depthwise.rs`.
pub(super) struct Interleave<'a, T: GemmElem> {
    pub(super) source: &'a [T],
    /// The distance to a second plane whose elements share places with the first's (bf16 pairs), if there is one.
    pub(super) second: Option<usize>,
    pub(super) pixels: usize,
    /// From a plane to the next.
    pub(super) apart: usize,
    pub(super) images: usize,
    pub(super) room: usize,
    pub(super) to: &'a mut [T::Acc],
}

impl<T: GemmElem> Kernel for Interleave<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        let lanes = <T::Acc as Float>::Vec::<S>::LANES;
        for first in (0..self.room).step_by(lanes) {
            let images = self.images.saturating_sub(first).min(lanes);
            for pixel in (0..self.pixels).step_by(lanes) {
                // Whole squares where there are as many pixels: the last one begins earlier.
                let pixel = pixel.min(self.pixels.saturating_sub(lanes));
                let pixels = lanes.min(self.pixels - pixel);
                match images == lanes && pixels == lanes {
                    true => self.square::<S>([first, pixel], [lanes; 2]),
                    false => self.square::<S>([first, pixel], [images, pixels]),
                }
            }
        }
    }
}

impl<T: GemmElem> Interleave<'_, T> {
    /// A square of images and pixels.
    #[inline(always)]
    fn square<S: Isa>(&mut self, [first, pixel]: [usize; 2], [images, pixels]: [usize; 2]) {
        let mut square = [<T::Acc as Float>::Vec::<S>::zero(); LANES_MAX];
        for i in 0..images {
            let from = &self.source[(first + i) * self.apart + pixel..];
            square[i] = match self.second {
                Some(second) => T::load_lines::<S>(&from[..pixels], &from[second..][..pixels]),
                None => T::load::<S>(&from[..pixels]),
            };
        }
        Vector::transpose(&mut square);
        let whole = first + <T::Acc as Float>::Vec::<S>::LANES <= self.room;
        for i in 0..pixels {
            let to = &mut self.to[(pixel + i) * self.room..][first..self.room];
            if whole { square[i].store(to) } else { square[i].store_partial(to) }
        }
    }
}

/// Deinterleaves planes: `[points, planes]` to `[planes, points]`, plus a bias, rounded.
pub(super) struct Deinterleave<'a, T: GemmElem> {
    /// The sums, planes last.
    pub(super) sums: &'a [T::Acc],
    pub(super) room: usize,
    pub(super) bias: Option<T::Acc>,
    pub(super) points: usize,
    /// The output from the first plane on; planes are `apart` from each other.
    pub(super) out: &'a mut [T],
    pub(super) apart: usize,
}

impl<T: GemmElem<Acc: Summed>> Kernel for Deinterleave<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        let lanes = <T::Acc as Float>::Vec::<S>::LANES;
        let bias = self.bias.map(<T::Acc as Float>::Vec::<S>::splat);
        for first in (0..TOGETHER.min(self.out.len().div_ceil(self.apart))).step_by(lanes) {
            let images = lanes.min(self.out.len().div_ceil(self.apart) - first);
            for point in (0..self.points).step_by(lanes) {
                let point = point.min(self.points.saturating_sub(lanes));
                let points = lanes.min(self.points - point);
                match images == lanes && points == lanes {
                    true => self.square::<S>([first, point], [lanes; 2], bias),
                    false => self.square::<S>([first, point], [images, points], bias),
                }
            }
        }
    }
}

impl<T: GemmElem<Acc: Summed>> Deinterleave<'_, T> {
    /// A square of images and points.
    #[inline(always)]
    fn square<S: Isa>(
        &mut self,
        [first, point]: [usize; 2],
        [images, points]: [usize; 2],
        bias: Option<<T::Acc as Float>::Vec<S>>,
    ) {
        let mut square = [<T::Acc as Float>::Vec::<S>::zero(); LANES_MAX];
        for i in 0..points {
            let sums = Vector::load(&self.sums[(point + i) * self.room + first..]);
            square[i] = match bias {
                Some(bias) => sums + bias,
                None => sums,
            };
        }
        Vector::transpose(&mut square);
        for i in 0..images {
            T::store::<S>(square[i], &mut self.out[(first + i) * self.apart + point..][..points]);
        }
    }
}

/// Conditions for images last to pay in the gradient of the weight: points of a plane at most, images at least, and the share of all
/// multiplications that may remain, in sixteenths. The order of sums depends on them.
const WEIGHT_POINTS_MAX: usize = 128;
const IMAGES_MIN: usize = 16;
const WEIGHT_LEFT_MAX: usize = 14;

impl WeightGrad<'_> {
    /// Whether the gradient is computed with images last. The shapes alone decide.
    pub(super) fn by_images(&self) -> bool {
        let ([rows, cols], [images, _, height, width]) =
            (&self.axes, [0, 1, 2, 3].map(|d| self.image.shape()[d]));
        let met = |axis: &Axis, size| -> usize {
            axis.taps.iter().map(|tap| axis.points_inside(tap, size).len()).sum()
        };
        let all = rows.count * rows.taps.len() * cols.count * cols.taps.len();
        let left = met(rows, height) * met(cols, width);
        images >= IMAGES_MIN
            && rows.count * cols.count <= WEIGHT_POINTS_MAX
            && left * 16 <= all * WEIGHT_LEFT_MAX
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
        let lanes = StepOrder::of::<T>(band.images.len()).planes(band.images.len());
        let plane = self.image.shape()[2] * self.image.shape()[3] * lanes;
        let (runs, all) = (self.runs(lanes), self.groups * self.channels_in);
        let (steps, of_channel) = (rows.count * cols.count * lanes, runs.len() * row_len);
        let here = sums.len() / of_channel;
        let channels = here.div_ceil(here.div_ceil((WEIGHT_WINDOW_MAX / plane.max(1)).max(1)));
        for (i, sums) in sums.chunks_mut(channels * of_channel).enumerate() {
            let count = sums.len() / of_channel;
            let at: Vec<usize> = (0..count).map(|channel| channel * plane).collect();
            with_scratch(count * plane, |window| {
                for (channel, to) in window.chunks_exact_mut(plane.max(1)).enumerate() {
                    interleave(image, all, first + i * channels + channel, &band.images, (lanes, to));
                }
                for (tap, runs) in runs.iter().enumerate() {
                    let rows = SegmentedRows::new(window, &at, runs, steps);
                    let sums = MatMut::new(&mut sums[tap * row_len..], count, row_len, of_channel, 1);
                    gemm_segmented::<T::PanelElem>(&rows, dy, sums, write);
                }
            });
        }
    }

    /// For each kernel element the segments of pixels that meet a point, of `lanes` places a pixel.
    fn runs(&self, lanes: usize) -> Vec<Vec<StepSegment>> {
        let ([rows, cols], [height, width]) = (&self.axes, [2, 3].map(|d| self.image.shape()[d]));
        let pixel = |point: usize, step: usize, offset: isize| (point * step).wrapping_add_signed(offset);
        let taps = rows.taps.iter().flat_map(|y| cols.taps.iter().map(move |x| (y, x)));
        let of_tap = |(y, x): (&Tap, &Tap)| {
            let (mut runs, mut met): (Vec<StepSegment>, usize) = (Vec::new(), 0);
            for (i, j) in
                rows.points_inside(y, height).flat_map(|i| cols.points_inside(x, width).map(move |j| (i, j)))
            {
                let from = (pixel(i, rows.step, y.offset) * width + pixel(j, cols.step, x.offset)) * lanes;
                let skip = (i * cols.count + j) * lanes - met;
                match runs.last_mut() {
                    Some(last) if skip == 0 && last.from + last.len == from => last.len += lanes,
                    _ => runs.push(StepSegment { skip, from, len: lanes }),
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
        let lanes = StepOrder::of::<T>(band.images.len()).planes(band.images.len());
        let plane = rows.count * cols.count * lanes;
        with_scratch(outputs * plane, |by_output| {
            for (i, to) in by_output.chunks_exact_mut(plane).enumerate() {
                interleave(grid, self.groups * outputs, group * outputs + i, &band.images, (lanes, to));
            }
            pack_columns(MatRef::row_major(by_output, outputs, plane).transposed(), dy);
        });
    }
}

/// Interleaves a channel of some images, `lanes` places a pixel.
fn interleave<T: GemmElem>(
    planes: &[T],
    channels: usize,
    channel: usize,
    images: &Range<usize>,
    (lanes, to): (usize, &mut [T::Acc]),
) {
    let (pixels, in_lane) = (to.len() / lanes, StepOrder::of::<T>(images.len()).in_lane);
    let apart = channels * pixels;
    let source = &planes[images.start * apart + channel * pixels..];
    let second = (in_lane > 1).then_some(apart);
    let interleave =
        Interleave { source, second, pixels, apart: in_lane * apart, images: lanes, room: lanes, to };
    T::PanelElem::run(Runner::current(), interleave);
}
