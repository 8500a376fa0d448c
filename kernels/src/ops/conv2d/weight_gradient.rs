//! The weight's gradient on a CPU: C = A B with a row for each input channel and kernel element, a column for each output channel, and a step of k
//! for each point. A is the image's pixels in a window, read by segments; B is the outputs' gradients, packed.
//!
//! ```text
//!  for each group of bands:    all threads pack the bands' gradients (B)
//!    for each part of C:       a thread multiplies for its input channels
//!      for each band:          points in one chain; the band's sum is added to those before, in ascending order through the images
//! ```
//!
//! Few output channels go to `thin_weight_gradient.rs`, depthwise ones to `depthwise.rs`, small planes to `batch_last.rs`.

use super::problem::{Band, POINTS_MIN, Summed, WEIGHT_WINDOW_MAX, WeightGrad};
use std::ops::Range;

use phalanx_tensor::{Pool, Result, Tensor, even_piece};

use super::batch_last::TOGETHER;
use super::gather::FillWindow;
use super::thin_weight_gradient::ThinWeightGradient;
use super::window::{Segment, StepOrder, WindowLayout, segments};
use super::{depthwise, thin};
use crate::gemm::{
    GemmElem, MatMut, MatRef, PanelElem, SegmentedRows, StepSegment, Write, gemm_segmented, pack_columns,
    packed_len, tile_shape,
};
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Runner, Vector, dispatch};

/// Elements of packed gradients at a time, unless a band has more.
const PACKED_MAX: usize = 1 << 20;
/// Elements of the result that a thread writes at least.
const PIECE: usize = 1 << 12;

impl WeightGrad<'_> {
    /// Computes into `out`, contiguous, `[groups * channels_out, channels_in, kernel..]`.
    pub(super) fn run<T: GemmElem<Acc: Summed>>(&self, out: &mut Tensor) -> Result<()> {
        let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
        if numel == 0 {
            return Ok(());
        }
        let (image, grid) = (self.image.read::<T>(self.op)?, self.grid.read::<T>(self.op)?);
        let (image, grid) = (&image[self.image.offset()..], &grid[self.grid.offset()..]);
        let taps: usize = self.axes.iter().map(|axis| axis.taps.len()).product();
        // Sums are [group, input channel, kernel element, output channel].
        let row_len = self.row_len::<T>();
        let len = self.groups * self.channels_in * taps * row_len;
        let _use = out.device().ledger()?.scratch_of(len * size_of::<T::Acc>());
        let channels = self.channels_here(pool.threads());
        let out = &mut out.write::<T>(self.op)?[offset..offset + numel];
        with_scratch(len, |sums| {
            let pixels = [2, 3].map(|d| self.image.shape()[d]);
            let passes = std::slice::from_ref(&self.axes);
            if depthwise::pays(passes, [self.channels_in, self.channels_out], pixels) {
                let channels = channels.next_multiple_of(TOGETHER);
                pool.for_each_chunk(sums, channels * taps, |i, sums| {
                    depthwise::weight(self, [image, grid], i * channels, sums);
                });
            } else if self.is_thin() {
                let dots = ThinWeightGradient::new(self, image, grid);
                let chunk = channels * taps * row_len;
                pool.for_each_chunk(sums, chunk, |i, sums| dots.run(i * channels, sums));
            } else {
                self.add_bands(image, grid, channels, &pool, sums);
            }
            let (sums, block) = (&*sums, self.channels_in * taps);
            // Output channels of one group at a time: of many, two cache lines of sums, which the hardware prefetches together.
            let lines = if self.channels_out >= 4 * LANES_MAX * pool.threads() { 2 } else { 1 };
            let rows = if self.groups == 1 { lines * LANES_MAX } else { self.channels_out };
            let together = if self.groups == 1 { 1 } else { PIECE.div_ceil(rows * block) };
            pool.for_each_chunk(out, together * rows * block, |i, out| {
                for (j, out) in out.chunks_mut(rows * block).enumerate() {
                    let first = (i * together + j) * rows;
                    let sums = &sums[first / self.channels_out * block * row_len..][..block * row_len];
                    dispatch(StoreTransposed { sums, row_len, first: first % self.channels_out, block, out });
                }
            });
        });
        Ok(())
    }

    /// Adds up all bands; a task has `channels` input channels.
    fn add_bands<T: GemmElem<Acc: Summed>>(
        &self,
        image: &[T],
        grid: &[T],
        channels: usize,
        pool: &Pool,
        sums: &mut [T::Acc],
    ) {
        let taps: usize = self.axes.iter().map(|axis| axis.taps.len()).product();
        let together = StepOrder::of::<T>(self.image.shape()[0]).together;
        let (row_len, bands, by_images) = (self.row_len::<T>(), self.bands(together), self.by_images());
        let lanes = bands.iter().map(|band| self.places::<T>(band)).max().unwrap_or(0);
        let packed_len = packed_len::<T::Acc>(lanes, self.channels_out);
        let at_once = (PACKED_MAX / (self.groups * packed_len).max(1)).clamp(1, bands.len().max(1));
        if bands.is_empty() {
            sums.fill(T::Acc::ZERO);
        }
        with_scratch(at_once * self.groups * packed_len, |packed| {
            for (nth, bands) in bands.chunks(at_once).enumerate() {
                let here = &mut packed[..bands.len() * self.groups * packed_len];
                pool.for_each_chunk(here, packed_len, |i, dy| {
                    let (group, band) = (i % self.groups, &bands[i / self.groups]);
                    match by_images {
                        true => self.pack_images(grid, group, band, dy),
                        false => self.pack_grid(grid, group, band, dy),
                    }
                });
                let (packed, group_len) = (&*packed, self.channels_in * taps * row_len);
                pool.for_each_chunk(sums, channels * taps * row_len, |i, sums| {
                    for (j, sums) in sums.chunks_mut(group_len).enumerate() {
                        let first = i * channels + j * self.channels_in;
                        let group = first / self.channels_in;
                        for (i, band) in bands.iter().enumerate() {
                            let dy = &packed[(i * self.groups + group) * packed_len..];
                            let write = if nth + i == 0 { Write::Store } else { Write::Accumulate };
                            match by_images {
                                true => self.add_images(image, dy, first, band, (write, sums)),
                                false => self.add_band(image, dy, first, band, (write, sums)),
                            }
                        }
                    }
                });
            }
        });
    }

    /// Whether there are so few output channels that [`ThinWeightGradient`] computes the sums.
    fn is_thin(&self) -> bool {
        self.channels_out <= thin::ROWS
    }

    /// Elements of a row of sums: the output channels, filled up to whole vectors for products.
    pub(super) fn row_len<T: GemmElem<Acc: Summed>>(&self) -> usize {
        match self.is_thin() {
            true => self.channels_out,
            false => self.channels_out.next_multiple_of(tile_shape::<T::Acc>().lanes),
        }
    }

    /// Places of k in a band's product.
    fn places<T: GemmElem>(&self, band: &Band) -> usize {
        let order = StepOrder::of::<T>(band.images.len());
        order.planes(band.images.len()) * band.rows.len() * self.axes[1].count
    }

    /// Input channels that a task takes, counted through all groups: a divisor or a multiple of a group's.
    fn channels_here(&self, threads: usize) -> usize {
        if threads == 1 {
            return self.groups * self.channels_in;
        }
        if self.groups >= 2 * threads {
            return self.groups.div_ceil(4 * threads) * self.channels_in;
        }
        let enough = |parts: &usize| self.groups * parts >= 2 * threads;
        let parts =
            (1..=self.channels_in).filter(|parts| self.channels_in.is_multiple_of(*parts)).find(enough);
        self.channels_in / parts.unwrap_or(self.channels_in)
    }

    /// The bands: of whole groups of `alternating` images, whose steps alternate; an image left over is a band by itself.
    fn bands(&self, alternating: usize) -> Vec<Band> {
        let [rows, cols] = &self.axes;
        let (images, plane) = (self.image.shape()[0], rows.count * cols.count);
        if plane == 0 {
            return Vec::new();
        }
        let together = POINTS_MIN.div_ceil(plane).next_multiple_of(alternating);
        let parts = (plane * alternating).div_ceil(POINTS_MIN).clamp(1, rows.count);
        let parts = if plane * alternating >= POINTS_MIN { parts } else { 1 };
        let all = images / alternating * alternating;
        let groups = (0..all).step_by(together).map(|n| n..all.min(n + together));
        let groups = groups.chain((all..images).map(|n| n..n + 1));
        let band = |images: Range<usize>| {
            (0..parts).map(move |i| Band { images: images.clone(), rows: even_piece(rows.count, parts, i) })
        };
        groups.flat_map(band).collect()
    }

    /// Adds a band's products to the sums of input channels `first ..`, all in one group, whose packed gradients are `dy`.
    fn add_band<T: GemmElem<Acc: Summed>>(
        &self,
        image: &[T],
        dy: &[T::Acc],
        first: usize,
        band: &Band,
        (write, sums): (Write, &mut [T::Acc]),
    ) {
        let [rows, cols] = &self.axes;
        let (order, taps) = (StepOrder::of::<T>(band.images.len()), rows.taps.len() * cols.taps.len());
        let (groups, places) = (order.groups(band.images.len()), order.places());
        let row_len = self.row_len::<T>();
        let here = sums.len() / (taps * row_len);
        let channel_len = WindowLayout::new(rows, cols, &band.rows, 1).channel_len * groups * places;
        let channels = here.div_ceil(here.div_ceil((WEIGHT_WINDOW_MAX / channel_len.max(1)).max(1)));
        for (i, sums) in sums.chunks_mut(channels * taps * row_len).enumerate() {
            let count = sums.len() / (taps * row_len);
            let layout = WindowLayout::new(rows, cols, &band.rows, count);
            let at: Vec<usize> = layout.taps(rows, cols, count, 1).iter().map(|at| at * places).collect();
            let (points, mut found) = (0..groups * band.rows.len() * cols.count, Vec::new());
            segments(&layout, (rows, cols), &band.rows, 0, points, &mut found);
            with_scratch(layout.image_len * groups * places, |window| {
                self.fill(&layout, image, first + i * channels, count, band, window);
                let run = |s: &Segment| StepSegment { skip: 0, from: s.from * places, len: s.len * places };
                let runs: Vec<StepSegment> = found.iter().map(run).collect();
                let rows = SegmentedRows::new(window, &at, &runs, runs.iter().map(|run| run.len).sum());
                let sums = MatMut::row_major(sums, at.len(), row_len);
                gemm_segmented::<T::PanelElem>(&rows, dy, sums, write);
            });
        }
    }

    /// Packs the band's gradients of a group.
    fn pack_grid<T: GemmElem<Acc: Summed>>(&self, grid: &[T], group: usize, band: &Band, dy: &mut [T::Acc]) {
        let ([rows, cols], outputs, lanes) = (&self.axes, self.channels_out, self.places::<T>(band));
        let plane = rows.count * cols.count;
        let first = (band.images.start * self.groups + group) * outputs * plane;
        if let (Some(grid), 1) = (T::as_wide(grid), band.images.len()) {
            let grid = &grid[first + band.rows.start * cols.count..];
            return pack_columns(MatRef::new(grid, outputs, lanes, plane, 1).transposed(), dy);
        }
        let layout = WindowLayout::of_rows(&band.rows, cols.count);
        let order = StepOrder::of::<T>(band.images.len());
        let groups = order.groups(band.images.len());
        with_scratch(outputs * lanes, |by_output| {
            for (i, to) in by_output.chunks_exact_mut(lanes / groups).enumerate() {
                let plane_of = |nth: usize| {
                    let image = i % groups * order.together + nth;
                    &grid[first + (image * self.groups * outputs + i / groups) * plane..][..plane]
                };
                interleave(order, &layout, plane_of, [rows.count, cols.count], to);
            }
            pack_columns(MatRef::row_major(by_output, outputs, lanes).transposed(), dy);
        });
    }

    /// Fills the band's window of input channels `first .. first + count`.
    fn fill<T: GemmElem<Acc: Summed>>(
        &self,
        layout: &WindowLayout,
        image: &[T],
        first: usize,
        count: usize,
        band: &Band,
        window: &mut [T::Acc],
    ) {
        let size = [self.image.shape()[2], self.image.shape()[3]];
        let (plane, all) = (size[0] * size[1], self.groups * self.channels_in);
        let order = StepOrder::of::<T>(band.images.len());
        let channel_len = (layout.channel_len * order.places()).max(1);
        for (i, window) in window.chunks_exact_mut(channel_len).enumerate() {
            let plane_of = |nth: usize| {
                let at = band.images.start + i / count * order.together + nth;
                &image[(at * all + first + i % count) * plane..][..plane]
            };
            interleave(order, layout, plane_of, size, window);
        }
    }
}

/// Copies the planes of images that alternate into a window: in the same places, or in neighbouring ones.
fn interleave<'a, T: GemmElem<Acc: Summed>>(
    order: StepOrder,
    layout: &WindowLayout,
    plane_of: impl Fn(usize) -> &'a [T],
    size: [usize; 2],
    window: &mut [T::Acc],
) {
    let fill = |planes: [&[T]; 2], window: &mut [T::Acc]| {
        T::PanelElem::run(Runner::current(), FillWindow { layout, planes, size, window });
    };
    match (order.together, order.in_lane) {
        (1, _) => fill([plane_of(0), &[]], window),
        (_, 1) => with_scratch(window.len(), |apart| {
            let (first, second) = apart.split_at_mut(window.len() / 2);
            fill([plane_of(0), &[]], first);
            fill([plane_of(1), &[]], second);
            let pairs = first.iter().zip(&*second);
            window.chunks_exact_mut(2).zip(pairs).for_each(|(to, (&x, &y))| to.copy_from_slice(&[x, y]));
        }),
        _ => fill([plane_of(0), plane_of(1)], window),
    }
}

/// Writes the sums of some output channels of a group, transposed and rounded: a row of `out` for each output channel.
struct StoreTransposed<'a, T: GemmElem> {
    /// A row for each input channel and kernel element.
    sums: &'a [T::Acc],
    row_len: usize,
    /// The first channel.
    first: usize,
    block: usize,
    out: &'a mut [T],
}

impl<T: GemmElem> Kernel for StoreTransposed<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <<T::Acc as Float>::Vec<S> as Vector>::LANES;
        for at in (0..self.block).step_by(lanes) {
            let here = lanes.min(self.block - at);
            for (nth, out) in self.out.chunks_mut(lanes * self.block).enumerate() {
                let (first, rows) = (self.first + nth * lanes, out.len() / self.block);
                let mut square = [<T::Acc as Float>::Vec::<S>::zero(); LANES_MAX];
                for (i, row) in square[..here].iter_mut().enumerate() {
                    let sums = &self.sums[(at + i) * self.row_len + first..][..rows];
                    // Rows are a page apart where channels are many, so that none is prefetched by the hardware.
                    <T::Acc as Float>::Vec::<S>::prefetch(
                        sums.as_ptr().wrapping_add(2 * lanes * self.row_len),
                    );
                    *row = if rows == lanes {
                        Vector::load(sums)
                    } else {
                        Vector::load_partial(sums, T::Acc::ZERO)
                    };
                }
                Vector::transpose(&mut square);
                for (i, row) in square[..rows].iter().enumerate() {
                    T::store::<S>(*row, &mut out[i * self.block + at..][..here]);
                }
            }
        }
    }
}
