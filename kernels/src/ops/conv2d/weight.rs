//! The weight's gradient on the CPU: for each band of points, gathered image rows times the outputs' gradients, bands
//! ascending through the images. A sum is added to those before it once all of its band is summed.

use std::ops::Range;

use phalanx_tensor::{Pool, Result, Tensor};

use super::Summed;
use super::axis::Axis;
use super::cpu::POINTS_MIN;
use super::gather::{Dots, Gather, THIN_ROWS};
use super::window::{Frame, segments};
use crate::gemm::{Epilogue, MatMut, MatRef, Write, gemm, with_scratch};
use crate::real::Real;
use crate::simd::{Float, dispatch};

/// Elements gathered before they are multiplied.
const GATHERED_MAX: usize = 1 << 18;
/// Floats that fill a cache line, by which rows are kept from starting at the same place of the cache.
const SKEW: usize = 16;

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
        let mut sums = vec![T::Wide::ZERO; numel];
        let _use = out.device().ledger()?.scratch_of(size_of_val(&sums[..]));
        let channels = self.channels_here(pool.threads());
        let (bands, alone) = (self.bands(), Pool::new(1));
        pool.for_each_chunk(&mut sums, channels * taps * self.channels_out, |i, sums| {
            let sums_len = taps * self.channels_out;
            for (j, sums) in sums.chunks_mut(self.channels_in.min(channels) * sums_len).enumerate() {
                let first = i * channels + j * self.channels_in.min(channels);
                for band in &bands {
                    self.add_band::<T>(&alone, image, grid, first, band, sums);
                }
            }
        });
        let block = self.channels_in * taps;
        pool.for_each_chunk(&mut out.write::<T>(self.op)?[offset..offset + numel], block, |channel, out| {
            let (group, row) = (channel / self.channels_out, channel % self.channels_out);
            let sums = sums[group * block * self.channels_out + row..].iter().step_by(self.channels_out);
            out.iter_mut().zip(sums).for_each(|(to, &sum)| *to = T::narrow(sum));
        });
        Ok(())
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

    /// Adds a band's products to the sums of input channels `first ..`, all in one group.
    fn add_band<T: Real<Wide: Summed>>(
        &self,
        alone: &Pool,
        image: &[T],
        grid: &[T],
        first: usize,
        band: &Band,
        sums: &mut [T::Wide],
    ) {
        let ([rows, cols], outputs) = (&self.axes, self.channels_out);
        let total = band.images.len() * band.rows.len() * cols.count;
        let row_len = total.next_multiple_of(SKEW) + if (total / SKEW).is_multiple_of(2) { SKEW } else { 0 };
        let taps = rows.taps.len() * cols.taps.len();
        let here = sums.len() / (taps * outputs);
        let channels = here.div_ceil(here.div_ceil((GATHERED_MAX / (row_len * taps)).max(1)));
        with_scratch(outputs * total, |dy| {
            self.gather_grid(grid, first / self.channels_in, band, dy);
            for (i, sums) in sums.chunks_mut(channels * taps * outputs).enumerate() {
                let count = sums.len() / (taps * outputs);
                let frame = Frame::new(rows, cols, &band.rows, count);
                let places = frame.taps(rows, cols, count);
                with_scratch(frame.image_len * band.images.len(), |window| {
                    self.fill(&frame, image, first + i * channels, count, band, window);
                    let mut found = Vec::new();
                    segments(&frame, (rows, cols), &band.rows, 0, 0..total, &mut found);
                    if outputs <= THIN_ROWS {
                        let (segments, rows) = (&found[..], &*dy);
                        dispatch(Dots { window, taps: &places, segments, rows, row_len: total, sums });
                        return;
                    }
                    with_scratch(places.len() * row_len, |panel| {
                        dispatch(Gather {
                            window,
                            taps: &places,
                            segments: &found,
                            panel: &mut *panel,
                            row_len,
                        });
                        let a = MatRef::new(panel, places.len(), total, row_len, 1);
                        let b = MatRef::row_major(dy, outputs, total).transposed();
                        let c = MatMut::row_major(sums, places.len(), outputs);
                        gemm(alone, a, b, c, Write::Accumulate, Epilogue::default());
                    });
                });
            }
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
