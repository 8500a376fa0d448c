//! The weight's gradient on the CPU: for each band of points, what the kernel elements meet in a window of the image times
//! the outputs' gradients, bands ascending through the images. A sum is added to those before it once all of its band is
//! summed. The gradients of some bands are packed by all threads first, then every thread multiplies for its channels.

use std::ops::Range;

use phalanx_tensor::{Result, Tensor};

use super::Summed;
use super::axis::Axis;
use super::cpu::POINTS_MIN;
use super::gather::{Dots, THIN_ROWS};
use super::window::{Frame, segments};
use crate::gemm::{
    MatMut, MatRef, Rows, Run, gemm_by_rows, pack_columns, packed_len, tile_shape, with_scratch,
};
use crate::real::Real;
use crate::simd::{Float, dispatch};

/// Elements of gradients packed before they are multiplied, unless a band has more.
const PACKED_MAX: usize = 1 << 20;
/// Elements of a window at most, unless a channel has more: it stays in the second-level cache, beside a band's gradients.
const WINDOW_MAX: usize = 1 << 16;

/// Contiguous `image` `[n, groups * channels_in, h, w]` and `grid` `[n, groups * channels_out, ..]`.
pub(super) struct WeightGrad<'a> {
    pub(super) op: &'static str,
    pub(super) image: &'a Tensor,
    pub(super) grid: &'a Tensor,
    pub(super) axes: [Axis; 2],
    pub(super) groups: usize,
    pub(super) channels_in: usize,
    pub(super) channels_out: usize,
}

/// Points summed in one chain: these rows of these images. Fixed by the shapes alone.
struct Band {
    images: Range<usize>,
    rows: Range<usize>,
}

impl WeightGrad<'_> {
    /// Computes into `out`, contiguous, `[groups * channels_out, channels_in, kernel..]`.
    pub(super) fn run<T: Real<Wide: Summed>>(&self, out: &mut Tensor) -> Result<()> {
        let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
        if numel == 0 {
            return Ok(());
        }
        let (image, grid) = (self.image.read::<T>(self.op)?, self.grid.read::<T>(self.op)?);
        let (image, grid) = (&image[self.image.offset()..], &grid[self.grid.offset()..]);
        let taps: usize = self.axes.iter().map(|axis| axis.taps.len()).product();
        // Sums lie as [group, input channel, tap, output channel].
        let row_len = self.row_len::<T>();
        let mut sums = vec![T::Wide::ZERO; self.groups * self.channels_in * taps * row_len];
        let _use = out.device().ledger()?.scratch_of(size_of_val(&sums[..]));
        let (channels, bands) = (self.channels_here(pool.threads()), self.bands());
        let points = bands.iter().map(|band| self.points(band)).max().unwrap_or(0);
        let packed_len = if self.is_thin() { 0 } else { packed_len::<T::Wide>(points, self.channels_out) };
        let at_once = (PACKED_MAX / (self.groups * packed_len).max(1)).clamp(1, bands.len().max(1));
        with_scratch(at_once * self.groups * packed_len, |packed| {
            for bands in bands.chunks(at_once) {
                if !self.is_thin() {
                    let packed = &mut packed[..bands.len() * self.groups * packed_len];
                    pool.for_each_chunk(packed, packed_len, |i, dy| {
                        self.pack_grid(grid, i % self.groups, &bands[i / self.groups], dy);
                    });
                }
                let (packed, group_len) = (&*packed, self.channels_in * taps * row_len);
                pool.for_each_chunk(&mut sums, channels * taps * row_len, |i, sums| {
                    for (j, sums) in sums.chunks_mut(group_len).enumerate() {
                        let first = i * channels + j * self.channels_in;
                        let group = first / self.channels_in;
                        for (band, dy) in bands.iter().zip(0..) {
                            let dy = &packed[(dy * self.groups + group) * packed_len..];
                            self.add_band(image, grid, dy, first, band, sums);
                        }
                    }
                });
            }
        });
        let block = self.channels_in * taps;
        pool.for_each_chunk(&mut out.write::<T>(self.op)?[offset..offset + numel], block, |channel, out| {
            let (group, row) = (channel / self.channels_out, channel % self.channels_out);
            let sums = sums[group * block * row_len + row..].iter().step_by(row_len);
            out.iter_mut().zip(sums).for_each(|(to, &sum)| *to = T::narrow(sum));
        });
        Ok(())
    }

    /// Whether there are so few output channels that sums are made straight from the window.
    fn is_thin(&self) -> bool {
        self.channels_out <= THIN_ROWS
    }

    /// Sums of a kernel element: one for each output channel, filled up to whole vectors for products.
    fn row_len<T: Real<Wide: Summed>>(&self) -> usize {
        match self.is_thin() {
            true => self.channels_out,
            false => self.channels_out.next_multiple_of(tile_shape::<T::Wide>().lanes),
        }
    }

    fn points(&self, band: &Band) -> usize {
        band.images.len() * band.rows.len() * self.axes[1].count
    }

    /// Input channels, of all groups, that a task takes: a divisor or a multiple of a group's.
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

    fn bands(&self) -> Vec<Band> {
        let [rows, cols] = &self.axes;
        let images = self.image.shape()[0];
        let plane = rows.count * cols.count;
        if plane == 0 {
            return Vec::new();
        }
        let count = plane.div_ceil(POINTS_MIN);
        let band = |first: usize, images_here: usize, i: usize| Band {
            images: first..images.min(first + images_here),
            rows: crate::gemm::share(rows.count, count.min(rows.count), i),
        };
        if plane >= POINTS_MIN {
            let parts = count.min(rows.count);
            return (0..images)
                .flat_map(|n| (0..parts).map(move |i| (n, i)))
                .map(|(n, i)| band(n, 1, i))
                .collect();
        }
        let together = POINTS_MIN.div_ceil(plane);
        (0..images).step_by(together).map(|n| band(n, together, 0)).collect()
    }

    /// Adds a band's products to the sums of input channels `first ..`, all in one group, whose packed gradients are `dy`.
    fn add_band<T: Real<Wide: Summed>>(
        &self,
        image: &[T],
        grid: &[T],
        dy: &[T::Wide],
        first: usize,
        band: &Band,
        sums: &mut [T::Wide],
    ) {
        let [rows, cols] = &self.axes;
        let (points, taps) = (self.points(band), rows.taps.len() * cols.taps.len());
        let row_len = self.row_len::<T>();
        let here = sums.len() / (taps * row_len);
        let channel_len = Frame::new(rows, cols, &band.rows, 1).channel_len * band.images.len();
        let channels = here.div_ceil(here.div_ceil((WINDOW_MAX / channel_len.max(1)).max(1)));
        for (i, sums) in sums.chunks_mut(channels * taps * row_len).enumerate() {
            let count = sums.len() / (taps * row_len);
            let frame = Frame::new(rows, cols, &band.rows, count);
            let places = frame.taps(rows, cols, count);
            let mut found = Vec::new();
            segments(&frame, (rows, cols), &band.rows, 0, 0..points, &mut found);
            with_scratch(frame.image_len * band.images.len(), |window| {
                self.fill(&frame, image, first + i * channels, count, band, window);
                if self.is_thin() {
                    with_scratch(self.channels_out * points, |dy| {
                        self.gather_grid(grid, first / self.channels_in, band, dy);
                        let (taps, segments) = (&places[..], &found[..]);
                        dispatch(Dots { window, taps, segments, rows: dy, row_len: points, sums });
                    });
                    return;
                }
                let runs: Vec<Run> = found.iter().map(|s| Run { from: s.from, len: s.len }).collect();
                let rows = Rows::new(window, &places, &runs);
                gemm_by_rows(&rows, dy, MatMut::row_major(sums, places.len(), row_len));
            });
        }
    }

    /// The band's gradients of a group, packed.
    fn pack_grid<T: Real<Wide: Summed>>(&self, grid: &[T], group: usize, band: &Band, dy: &mut [T::Wide]) {
        let (outputs, points) = (self.channels_out, self.points(band));
        if let (Some(grid), 1) = (T::as_wide(grid), band.images.len()) {
            let [rows, cols] = &self.axes;
            let plane = rows.count * cols.count;
            let first = (band.images.start * self.groups + group) * outputs * plane;
            let grid = &grid[first + band.rows.start * cols.count..];
            return pack_columns(MatRef::new(grid, outputs, points, plane, 1).transposed(), dy);
        }
        with_scratch(outputs * points, |rows| {
            self.gather_grid(grid, group, band, rows);
            pack_columns(MatRef::row_major(rows, outputs, points).transposed(), dy);
        });
    }

    /// The band's gradients, `[output channel, point]`.
    fn gather_grid<T: Real<Wide: Summed>>(&self, grid: &[T], group: usize, band: &Band, dy: &mut [T::Wide]) {
        let [rows, cols] = &self.axes;
        let (plane, run) = (rows.count * cols.count, band.rows.len() * cols.count);
        for (i, to) in dy.chunks_exact_mut(run).enumerate() {
            let (row, image) = (i / band.images.len(), band.images.start + i % band.images.len());
            let channel = (image * self.groups + group) * self.channels_out + row;
            let from = &grid[channel * plane + band.rows.start * cols.count..][..run];
            to.iter_mut().zip(from).for_each(|(to, x)| *to = x.widen());
        }
    }

    /// The band's window of input channels `first .. first + count`.
    fn fill<T: Real<Wide: Summed>>(
        &self,
        frame: &Frame,
        image: &[T],
        first: usize,
        count: usize,
        band: &Band,
        window: &mut [T::Wide],
    ) {
        let size = [self.image.shape()[2], self.image.shape()[3]];
        let (plane, all) = (size[0] * size[1], self.groups * self.channels_in);
        for (i, window) in window.chunks_exact_mut(frame.channel_len.max(1)).enumerate() {
            let start = ((band.images.start + i / count) * all + first + i % count) * plane;
            frame.fill(&image[start..start + plane], size, window);
        }
    }
}
