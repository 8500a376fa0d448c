//! Convolutions on the CPU, plain and transposed: panels of the weight times what the kernel elements meet. That is read in
//! the source itself where its rows are as long as the output's, else in a window of the source, gathered from there into
//! panels or, where a panel's points lie side by side, read in place. Each output is one chain of multiply-adds over
//! channels and kernel elements, whatever the cut; there is no zero-stuffing and nothing is scattered.

use std::cell::OnceCell;
use std::ops::Range;

use phalanx_tensor::{Pool, Result, Tensor};

use super::axis::Axis;
use super::gather::{Gather, THIN_ROWS, Thin};
use super::packed::Packed;
use super::window::{Frame, Segment, segments, steps_in_plane};
use super::{Cut, Summed};
use crate::gemm::{
    Epilogue, MatMut, MatRef, Places, Step, TileShape, Write, gemm, gemm_by_places, share, tile_shape,
    with_scratch,
};
use crate::real::Real;
use crate::simd::dispatch;

/// Elements of a window at most, unless a single row of points needs more.
const WINDOW_MAX: usize = 1 << 18;
/// Elements gathered before they are multiplied: they stay in the second-level cache, beside the window and the weights.
const GATHERED_MAX: usize = 1 << 15;
/// Points that fill panels well.
pub(super) const POINTS_MIN: usize = 512;

/// A convolution, plain or transposed. The source is contiguous, `[images, groups * channels_in, h, w]`.
pub(super) struct Correlation<'a> {
    pub(super) op: &'static str,
    pub(super) source: &'a Tensor,
    pub(super) weight: &'a Tensor,
    /// The weight's strides by group, output channel, input channel, row and column.
    pub(super) weight_strides: [usize; 5],
    pub(super) bias: Option<&'a Tensor>,
    /// Rows and columns of each part of the output.
    pub(super) passes: Vec<[Axis; 2]>,
    pub(super) groups: usize,
    /// Channels of one group.
    pub(super) channels_in: usize,
    pub(super) channels_out: usize,
}

impl Correlation<'_> {
    /// Computes into `out`, contiguous, `[images, groups * channels_out, h, w]`.
    pub(super) fn run<T: Real<Wide: Summed>>(&self, out: &mut Tensor) -> Result<()> {
        let shape: [usize; 4] = [0, 1, 2, 3].map(|d| out.shape()[d]);
        let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
        if numel == 0 {
            return Ok(());
        }
        let source = self.source.read::<T>(self.op)?;
        let weight = self.weight.read::<T>(self.op)?;
        let bias: Option<Vec<T::Wide>> = match self.bias {
            Some(bias) => Some(
                bias.read::<T>(self.op)?[bias.offset()..][..shape[1]].iter().map(|x| x.widen()).collect(),
            ),
            None => None,
        };
        let tile = tile_shape::<T::Wide>();
        // Few rows are summed without gathering.
        let thin = self.channels_out <= 2 * THIN_ROWS;
        let rows_max = if thin { THIN_ROWS } else { tile.rows };
        let work =
            numel * self.channels_in * self.passes[0].iter().map(|axis| axis.taps.len()).product::<usize>();
        let cut = Cut::new(shape, self.groups, work, pool.threads());
        let weights: Vec<Packed<T::Wide>> = self
            .passes
            .iter()
            .map(|pass| self.pack::<T>(&weight[self.weight.offset()..], pass, rows_max, &cut, &pool))
            .collect();
        let bytes = weights.iter().map(|w| size_of_val(&w.panels[..])).sum();
        let _use = out.device().ledger()?.scratch_of(bytes);
        let side = Side {
            source: &source[self.source.offset()..],
            bias: bias.as_deref(),
            shape,
            tile,
            thin,
            alone: Pool::new(1),
        };
        pool.for_each_chunk(&mut out.write::<T>(self.op)?[offset..offset + numel], cut.chunk, |i, out| {
            let part = cut.part(i);
            for (pass, weights) in self.passes.iter().zip(&weights) {
                for unit in part.channels.clone().step_by(cut.unit) {
                    Unit { job: self, side: &side, pass, weights, first: unit, part: &part, cut: &cut }
                        .run(out);
                }
            }
        });
        Ok(())
    }
}

/// What all threads share beside the job.
struct Side<'a, T: Real> {
    source: &'a [T],
    bias: Option<&'a [T::Wide]>,
    /// The output's.
    shape: [usize; 4],
    tile: TileShape,
    thin: bool,
    /// A product's pieces stay on the thread that has the task.
    alone: Pool,
}

/// A task's part of the output.
pub(super) struct Part {
    pub(super) images: Range<usize>,
    pub(super) channels: Range<usize>,
}

/// One pass over one unit of output channels, all in one group.
struct Unit<'a, T: Real> {
    job: &'a Correlation<'a>,
    side: &'a Side<'a, T>,
    pass: &'a [Axis; 2],
    weights: &'a Packed<T::Wide>,
    first: usize,
    part: &'a Part,
    cut: &'a Cut,
}

impl<T: Real<Wide: Summed>> Unit<'_, T> {
    fn run(&self, out: &mut [T]) {
        let [rows, cols] = self.pass;
        if rows.count * cols.count == 0 {
            return;
        }
        let (size, channels) = (self.source_size(), self.job.channels_in);
        let all = 0..rows.count;
        if self.is_flat()
            && let Some(source) = T::as_wide(self.side.source)
        {
            let len = self.source_size().iter().product::<usize>() * self.job.channels_in;
            for image in self.part.images.clone() {
                let start = (image * self.job.groups + self.group()) * len;
                self.multiply_plane(image, &source[start..start + len], out);
            }
            return;
        }
        let images = POINTS_MIN.div_ceil(rows.count * cols.count);
        if let Some(frame) = Frame::of_source(rows, cols, &all, size, self.job.groups * channels)
            && let Some(source) = T::as_wide(self.side.source)
        {
            for first in self.part.images.clone().step_by(images) {
                let images = first..self.part.images.end.min(first + images);
                let start = (first * self.job.groups + self.group()) * channels * frame.channel_len;
                self.multiply(&frame, &source[start..], &images, &all, out);
            }
            return;
        }
        let len = |points| Frame::new(rows, cols, &points, channels).image_len.max(1);
        let band = (WINDOW_MAX / len(0..1)).clamp(1, rows.count);
        let images = if band < rows.count { 1 } else { images.min((WINDOW_MAX / len(all)).max(1)) };
        for first in self.part.images.clone().step_by(images) {
            let images = first..self.part.images.end.min(first + images);
            for row in (0..rows.count).step_by(band) {
                let points = row..rows.count.min(row + band);
                let frame = Frame::new(rows, cols, &points, channels);
                with_scratch(frame.image_len * images.len(), |window| {
                    self.fill(&frame, &images, window);
                    self.multiply(&frame, window, &images, &points, out);
                });
            }
        }
    }

    fn source_size(&self) -> [usize; 2] {
        [self.job.source.shape()[2], self.job.source.shape()[3]]
    }

    fn group(&self) -> usize {
        self.first / self.job.channels_out
    }

    fn fill(&self, frame: &Frame, images: &Range<usize>, window: &mut [T::Wide]) {
        let (size, channels) = (self.source_size(), self.job.channels_in);
        let plane = size[0] * size[1];
        for (i, window) in window.chunks_exact_mut(frame.channel_len.max(1)).enumerate() {
            let (image, channel) = (images.start + i / channels, self.group() * channels + i % channels);
            let start = (image * self.job.groups * channels + channel) * plane;
            frame.fill(&self.side.source[start..start + plane], size, window);
        }
    }

    /// The product over the points of these rows in these images.
    fn multiply(
        &self,
        frame: &Frame,
        window: &[T::Wide],
        images: &Range<usize>,
        points: &Range<usize>,
        out: &mut [T],
    ) {
        let ([rows, cols], steps, width) = (self.pass, self.weights.steps, self.side.tile.cols());
        let channels = self.job.channels_in;
        let taps = frame.taps(rows, cols, channels);
        // A full run of points is read where the window has it.
        let (places_read, places) = (self.reads_places(), OnceCell::new());
        let each: Vec<Step> = taps[..taps.len().checked_div(channels).unwrap_or(0)]
            .iter()
            .map(|&tap| Step::whole(tap as isize, self.side.tile.lanes))
            .collect();
        let lies = |segments: &[Segment]| places_read && matches!(segments, [all] if all.len == width);
        let total = images.len() * points.len() * cols.count;
        let panels = (GATHERED_MAX / (steps * width).max(1)).clamp(1, total.div_ceil(width));
        let panel_len = if self.side.thin { 0 } else { steps * width };
        let mut found = vec![Vec::new(); panels];
        with_scratch(panels * panel_len + self.weights.rows * width, |scratch| {
            let (gathered, sums) = scratch.split_at_mut(panels * panel_len);
            for start in (0..total).step_by(panels * width) {
                let starts = (start..total.min(start + panels * width)).step_by(width);
                let count = starts.len();
                for (i, (start, found)) in starts.zip(&mut found).enumerate() {
                    let range = start..total.min(start + width);
                    segments(frame, (rows, cols), points, self.side.shape[3], range, found);
                    if !(self.side.thin || lies(found)) {
                        let panel = &mut gathered[i * panel_len..][..panel_len];
                        dispatch(Gather { window, taps: &taps, segments: found, panel, row_len: width });
                    }
                }
                for panel in 0..self.weights.count {
                    for (i, segments) in found[..count].iter().enumerate() {
                        if self.side.thin {
                            let (weights, rows) = self.weights(panel);
                            let taps = &taps;
                            dispatch(Thin { window, taps, segments, weights, rows, sums, row_len: width });
                            self.write(panel, images, segments, sums, out);
                        } else if lies(segments) {
                            let b = places
                                .get_or_init(|| Places::new(window, &each, channels, frame.channel_len));
                            let b = Points::Places(b.shifted(segments[0].from));
                            self.multiply_panel(panel, images, &b, segments, sums, out);
                        } else {
                            let b = Points::Gathered(&gathered[i * panel_len..][..panel_len]);
                            self.multiply_panel(panel, images, &b, segments, sums, out);
                        }
                    }
                }
            }
        });
    }

    /// The product over all points of an image whose rows are as long as the output's: it is read where it lies.
    fn multiply_plane(&self, image: usize, source: &[T::Wide], out: &mut [T]) {
        let ([rows, cols], tile) = (self.pass, self.side.tile);
        let (images, total) = (image..image + 1, rows.count * cols.count);
        let size = self.source_size();
        with_scratch(self.weights.rows * tile.cols(), |sums| {
            for start in (0..total).step_by(tile.cols()) {
                let points = start..total.min(start + tile.cols());
                let all = [Segment { at: 0, len: points.len(), from: 0, image: 0, to: start }];
                let steps = steps_in_plane(self.pass, size, points, tile);
                let b = Points::Places(Places::new(source, &steps, self.job.channels_in, size[0] * size[1]));
                for panel in 0..self.weights.count {
                    self.multiply_panel(panel, &images, &b, &all, sums, out);
                }
            }
        });
    }

    /// Whether panels of the weights make tiles that read places.
    fn reads_places(&self) -> bool {
        self.weights.rows_all(self.cut.unit, |rows| self.side.tile.reads_places(rows))
    }

    /// Whether an image can be read where it lies, point by point: its rows are as long as the output's, and panels of
    /// points that end with the image are no great waste.
    fn is_flat(&self) -> bool {
        let [rows, cols] = self.pass;
        let points = rows.count * cols.count;
        let steps = [rows.step, cols.step, rows.out_step, cols.out_step];
        steps == [1; 4]
            && cols.count == self.source_size()[1]
            && points.next_multiple_of(self.side.tile.cols()) * 15 <= points * 16
            && !self.side.thin
            && self.reads_places()
    }

    /// A panel of the weights, and its rows.
    fn weights(&self, panel: usize) -> (&[T::Wide], usize) {
        self.weights.panel(self.first / self.cut.unit, panel, self.cut.unit)
    }

    /// A panel of the weights times what the kernel elements meet at a panel's points, taken to the output.
    fn multiply_panel(
        &self,
        panel: usize,
        images: &Range<usize>,
        b: &Points<'_, T::Wide>,
        segments: &[Segment],
        sums: &mut [T::Wide],
        out: &mut [T],
    ) {
        let ((weights, rows), tile) = (self.weights(panel), self.side.tile);
        let a = MatRef::new(weights, rows, self.weights.steps, 1, rows);
        if self.multiply_in_place(panel, images, a, b, segments, out) {
            return;
        }
        let used = segments.last().map_or(0, |last| last.at + last.len);
        let narrow = used <= tile.lanes && matches!(b, Points::Gathered(_));
        let cols = if narrow { tile.lanes } else { tile.cols() };
        self.multiply_points(a, b, MatMut::new(sums, rows, cols, tile.cols(), 1));
        self.write(panel, images, segments, sums, out);
    }

    /// [`Unit::multiply_points`] straight to the output, if the panel's points fill it and lie there side by side.
    fn multiply_in_place(
        &self,
        panel: usize,
        images: &Range<usize>,
        a: MatRef<'_, T::Wide>,
        b: &Points<'_, T::Wide>,
        segments: &[Segment],
        out: &mut [T],
    ) -> bool {
        let (plane, cols) = (self.side.shape[2] * self.side.shape[3], self.side.tile.cols());
        let first = segments[0];
        let follows = |s: &Segment| s.image == first.image && s.to == first.to + s.at;
        let full = segments.iter().map(|s| s.len).sum::<usize>() == cols;
        if !full || self.pass[1].out_step != 1 || !segments.iter().all(follows) {
            return false;
        }
        let rows = share(self.cut.unit, self.weights.count, panel);
        let start = self.place(images, first.image, self.first + rows.start) + first.to;
        let Some(out) = T::as_wide_mut(&mut out[start..]) else { return false };
        self.multiply_points(a, b, MatMut::new(out, rows.len(), cols, plane, 1));
        if let Some(bias) = self.side.bias {
            let bias = &bias[self.first..][rows];
            for (row, &bias) in out.chunks_mut(plane).zip(bias) {
                row[..cols].iter_mut().for_each(|sum| *sum += bias);
            }
        }
        true
    }

    /// Where the plane of a channel of one of these images begins in this part of the output.
    fn place(&self, images: &Range<usize>, image: usize, channel: usize) -> usize {
        let (plane, channels) = (self.side.shape[2] * self.side.shape[3], &self.part.channels);
        let image = images.start + image - self.part.images.start;
        (image * channels.len() + channel - channels.start) * plane
    }

    /// A panel of the weights times what the kernel elements meet at some points.
    fn multiply_points(&self, a: MatRef<'_, T::Wide>, b: &Points<'_, T::Wide>, c: MatMut<'_, T::Wide>) {
        match b {
            Points::Places(places) => gemm_by_places(a, places, c),
            Points::Gathered(panel) => {
                let b = MatRef::new(panel, self.weights.steps, c.cols(), self.side.tile.cols(), 1);
                gemm(&self.side.alone, a, b, c, Write::Store, Epilogue::default());
            }
        }
    }

    /// Takes a panel's sums to the output.
    fn write(&self, panel: usize, images: &Range<usize>, found: &[Segment], sums: &[T::Wide], out: &mut [T]) {
        let (width, step) = (self.side.tile.cols(), self.pass[1].out_step);
        for (row, sums) in share(self.cut.unit, self.weights.count, panel).zip(sums.chunks(width)) {
            let channel = self.first + row;
            let bias = self.side.bias.map(|bias| bias[channel]);
            for segment in found {
                let sums = &sums[segment.at..][..segment.len];
                let to = &mut out[self.place(images, segment.image, channel) + segment.to..];
                match bias {
                    Some(bias) => put(to, step, sums, |sum| T::narrow(sum + bias)),
                    None => put(to, step, sums, T::narrow),
                }
            }
        }
    }
}

/// What the kernel elements meet at a panel's points.
enum Points<'a, V> {
    /// Gathered, row by row.
    Gathered(&'a [V]),
    /// Side by side in the planes of a window or a source.
    Places(Places<'a, V>),
}

/// Writes `f` of each sum to every `step`-th place.
#[inline(always)]
fn put<V: Copy, T>(to: &mut [T], step: usize, sums: &[V], f: impl Fn(V) -> T) {
    if step == 1 {
        to[..sums.len()].iter_mut().zip(sums).for_each(|(to, &sum)| *to = f(sum));
    } else {
        to.iter_mut().step_by(step).zip(sums).for_each(|(to, &sum)| *to = f(sum));
    }
}
