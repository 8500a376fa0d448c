//! Convolution as implicit GEMM: a thread's *unit* of output channels of one group ([`ChannelBlock`]), packed weights times the input pixels
//! under the kernel elements, a panel of points at a time.
//!
//! ```text
//!  the source, if its rows are as long as the output's     read in place, by an offset table for each panel of points
//!  a window (a padded copy) or an unpadded source          a panel whose points are one segment is read in place,
//!                                                          any other is gathered first (im2col of one panel)
//! ```
//!
//! `cpu.rs` calls [`ChannelBlock::run`] for each unit of a task's part of the output. Products are [`gemm_by_offsets`] and [`gemm_by_panel`].

use phalanx_tensor::even_piece;

use super::problem::{Correlation, OutputPart, OutputSplit, POINTS_MIN, Summed};
use std::cell::OnceCell;
use std::ops::Range;

use super::gather::{FillWindow, GatherPanel, StoreSums};
use super::packed_weights::{PackedWeights, WeightPanels};
use super::window::{Axis, Segment, StepOrder, WindowLayout, segments, steps_in_plane};
use crate::gemm::{
    GemmElem, MatMut, MatRef, OffsetStep, OffsetTable, PanelElem, TileShape, gemm_by_offsets, gemm_by_panel,
};
use crate::scratch::with_scratch;
use crate::simd::{Runner, dispatch};

/// Elements of a window at most, unless one row of points needs more.
const WINDOW_MAX: usize = 1 << 18;
/// Elements gathered before they are multiplied: they stay in the L2 cache, beside the window and the weights.
const GATHERED_MAX: usize = 1 << 15;
/// Elements of a unit's weights that stay in the L2 cache. If it has more, about [`STEPS_MAX`] steps at a time are multiplied for all its
/// channels.
const WEIGHTS_MAX: usize = 1 << 17;
const STEPS_MAX: usize = 512;

/// What all tasks read beside the problem.
pub(super) struct SharedInputs<'a, T: GemmElem> {
    pub(super) source: &'a [T],
    pub(super) bias: Option<&'a [T::Acc]>,
    /// The output's sizes.
    pub(super) shape: [usize; 4],
    pub(super) tile: TileShape,
    pub(super) order: StepOrder,
}

/// One pass over one unit of output channels.
pub(super) struct ChannelBlock<'a, T: GemmElem> {
    pub(super) problem: &'a Correlation<'a>,
    pub(super) shared: &'a SharedInputs<'a, T>,
    pub(super) pass: &'a [Axis; 2],
    pub(super) weights: PackedWeights<'a, T::Acc>,
    pub(super) first: usize,
    pub(super) part: &'a OutputPart,
    pub(super) split: &'a OutputSplit,
}

impl<T: GemmElem<Acc: Summed>> ChannelBlock<'_, T> {
    /// Computes the unit's channels in `out`, which is the task's part of the output.
    pub(super) fn run(&self, out: &mut [T]) {
        let [rows, cols] = self.pass;
        if rows.count * cols.count == 0 {
            return;
        }
        let (size, channels) = (self.source_size(), self.problem.channels_in);
        let (all, planes) = (0..rows.count, self.shared.order.planes(channels));
        if self.is_flat()
            && let Some(source) = T::as_wide(self.shared.source)
        {
            let len = self.source_size().iter().product::<usize>() * self.problem.channels_in;
            for image in self.part.images.clone() {
                let start = (image * self.problem.groups + self.group()) * len;
                self.multiply_plane(image, &source[start..start + len], out);
            }
            return;
        }
        let images = POINTS_MIN.div_ceil(rows.count * cols.count);
        if let Some(layout) = WindowLayout::of_source(rows, cols, &all, size, self.problem.groups * channels)
            && let Some(source) = T::as_wide(self.shared.source)
        {
            for first in self.part.images.clone().step_by(images) {
                let images = first..self.part.images.end.min(first + images);
                let start = (first * self.problem.groups + self.group()) * channels * layout.channel_len;
                self.multiply(&layout, &source[start..], &images, &all, out);
            }
            return;
        }
        let len = |points| WindowLayout::new(rows, cols, &points, planes).image_len.max(1);
        let band = (WINDOW_MAX / len(0..1)).clamp(1, rows.count);
        let images = if band < rows.count { 1 } else { images.min((WINDOW_MAX / len(all)).max(1)) };
        for first in self.part.images.clone().step_by(images) {
            let images = first..self.part.images.end.min(first + images);
            for row in (0..rows.count).step_by(band) {
                let points = row..rows.count.min(row + band);
                let layout = WindowLayout::new(rows, cols, &points, planes);
                with_scratch(layout.image_len * images.len(), |window| {
                    self.fill(&layout, &images, window);
                    self.multiply(&layout, window, &images, &points, out);
                });
            }
        }
    }

    fn source_size(&self) -> [usize; 2] {
        [self.problem.source.shape()[2], self.problem.source.shape()[3]]
    }

    fn group(&self) -> usize {
        self.first / self.problem.channels_out
    }

    /// Copies the pixels of these images into a window.
    fn fill(&self, layout: &WindowLayout, images: &Range<usize>, window: &mut [T::Acc]) {
        let (size, channels, order) = (self.source_size(), self.problem.channels_in, self.shared.order);
        let (plane, planes) = (size[0] * size[1], order.planes(channels));
        for (i, window) in window.chunks_exact_mut(layout.channel_len.max(1)).enumerate() {
            let (image, first) = (images.start + i / planes, i % planes * order.in_lane);
            let start = (image * self.problem.groups + self.group()) * channels;
            let of_channel = |nth: usize| match first + nth < channels && nth < order.in_lane {
                true => &self.shared.source[(start + first + nth) * plane..][..plane],
                false => &[],
            };
            let fill = FillWindow { layout, planes: [of_channel(0), of_channel(1)], size, window };
            T::PanelElem::run(Runner::current(), fill);
        }
    }

    /// The product for the points of these rows in these images, whose pixels are in a window, or in the source with the layout of one.
    fn multiply(
        &self,
        layout: &WindowLayout,
        window: &[T::Acc],
        images: &Range<usize>,
        points: &Range<usize>,
        out: &mut [T],
    ) {
        let ([rows, cols], order, width) = (self.pass, self.shared.order, self.shared.tile.cols());
        let WeightPanels { steps, count, unit, rows: rows_max, .. } = self.weights.panels;
        let (groups, planes) = (order.groups(self.problem.channels_in), order.places());
        let of_group = steps.checked_div(groups).unwrap_or(0);
        // Groups of channels that are multiplied in one go.
        let together = match unit * steps > WEIGHTS_MAX {
            true => (STEPS_MAX / of_group.max(1)).clamp(1, groups),
            false => groups.max(1),
        };
        let is_whole = together >= groups;
        let taps = layout.taps(rows, cols, together.min(groups), planes);
        // A panel whose points are one segment is read in place, by offsets.
        let (places_read, places) = (self.reads_offsets(), OnceCell::new());
        let apart = planes * layout.channel_len;
        let lanes = self.shared.tile.lanes;
        let each = taps[..of_group].iter().enumerate();
        let each: Vec<OffsetStep> =
            each.map(|(nth, &tap)| OffsetStep::whole(tap as isize, lanes, nth)).collect();
        let lies = |segments: &[Segment]| places_read && matches!(segments, [all] if all.len == width);
        let total = images.len() * points.len() * cols.count;
        let panel_len = together * of_group * width;
        let panels = (GATHERED_MAX / panel_len.max(1)).clamp(1, total.div_ceil(width));
        let panel_sums = if is_whole { rows_max * width } else { unit * width };
        let all_sums = if is_whole { panel_sums } else { panels * panel_sums };
        let mut found = vec![Vec::new(); panels];
        with_scratch(panels * panel_len + all_sums, |scratch| {
            let (gathered, sums) = scratch.split_at_mut(panels * panel_len);
            for start in (0..total).step_by(panels * width) {
                let starts = (start..total.min(start + panels * width)).step_by(width);
                let here = starts.len();
                for (start, found) in starts.zip(&mut found) {
                    let range = start..total.min(start + width);
                    segments(layout, (rows, cols), points, self.shared.shape[3], range, found);
                }
                for first in (0..groups.max(1)).step_by(together) {
                    let block = first..groups.min(first + together);
                    let taps = &taps[..block.len() * of_group];
                    for (segments, panel) in
                        found[..here].iter().zip(gathered.chunks_exact_mut(panel_len.max(1)))
                    {
                        if !lies(segments) {
                            let window = &window[(first * apart).min(window.len())..];
                            dispatch(GatherPanel { window, taps, segments, panel, row_len: width });
                        }
                    }
                    for panel in 0..count {
                        for (i, segments) in found[..here].iter().enumerate() {
                            let b = match lies(segments) {
                                true => {
                                    let all = || OffsetTable::new(window, &each, of_group, groups, apart);
                                    let all = places.get_or_init(all).planes(block.clone());
                                    Points::OffsetTable(all.shifted(segments[0].from))
                                }
                                false => Points::Gathered(&gathered[i * panel_len..][..taps.len() * width]),
                            };
                            if is_whole {
                                self.multiply_panel(panel, images, &b, segments, sums, out);
                            } else {
                                let rows = even_piece(unit, count, panel);
                                let sums = &mut sums[i * panel_sums + rows.start * width..];
                                let steps = block.start * of_group..block.end * of_group;
                                self.multiply_points(
                                    self.weights(panel, steps),
                                    &b,
                                    segments,
                                    (sums, first > 0),
                                );
                            }
                        }
                    }
                }
                for (segments, sums) in
                    found[..here].iter().zip(sums.chunks(panel_sums)).filter(|_| !is_whole)
                {
                    for panel in 0..count {
                        let rows = even_piece(unit, count, panel);
                        self.write(panel, images, segments, &sums[rows.start * width..], out);
                    }
                }
            }
        });
    }

    /// The product over all points of an image whose rows are as long as the output's: it is read in place.
    fn multiply_plane(&self, image: usize, source: &[T::Acc], out: &mut [T]) {
        let ([rows, cols], tile) = (self.pass, self.shared.tile);
        let (images, total) = (image..image + 1, rows.count * cols.count);
        let size = self.source_size();
        // Rows at which all kernel elements are inside. A panel there has the offset table of the first such panel that begins in its column,
        // shifted. `known` keeps a table for each column; its last place is for all other panels.
        let met = rows.taps.iter().map(|tap| rows.points_inside(tap, size[0]));
        let inside = met.fold(0..rows.count, |all, met| all.start.max(met.start)..all.end.min(met.end));
        let mut known = vec![None; size[1] + 1];
        with_scratch(self.weights.panels.rows * tile.cols(), |sums| {
            for start in (0..total).step_by(tile.cols()) {
                let points = start..total.min(start + tile.cols());
                let all = [Segment { at: 0, len: points.len(), from: 0, image: 0, to: start }];
                let is_known = points.len() == tile.cols()
                    && inside.contains(&(start / size[1]))
                    && inside.contains(&((points.end - 1) / size[1]));
                let known = &mut known[if is_known { start % size[1] } else { size[1] }];
                if !is_known {
                    *known = None;
                }
                let (first, steps) =
                    known.get_or_insert_with(|| (start, steps_in_plane(self.pass, size, points, tile)));
                let plane = size[0] * size[1];
                let b = OffsetTable::new(source, steps, steps.len(), self.problem.channels_in, plane);
                let b = Points::OffsetTable(b.shifted(start - *first));
                for panel in 0..self.weights.panels.count {
                    self.multiply_panel(panel, &images, &b, &all, sums, out);
                }
            }
        });
    }

    /// Whether panels of the weights make tiles that can read an offset table.
    fn reads_offsets(&self) -> bool {
        self.weights.panels.rows_all(|rows| self.shared.tile.reads_offsets(rows))
    }

    /// Whether an image can be read in place, point by point: its rows are as long as the output's, and panels of
    /// points that end with the image are no great waste.
    fn is_flat(&self) -> bool {
        let [rows, cols] = self.pass;
        let points = rows.count * cols.count;
        let steps = [rows.step, cols.step, rows.out_step, cols.out_step];
        steps == [1; 4]
            && cols.count == self.source_size()[1]
            && points.next_multiple_of(self.shared.tile.cols()) * 15 <= points * 16
            && self.weights.panels.unit * self.weights.panels.steps <= WEIGHTS_MAX
            && self.reads_offsets()
    }

    /// Some steps of a panel of the weights.
    fn weights(&self, panel: usize, steps: Range<usize>) -> MatRef<'_, T::Acc> {
        let (weights, rows) = self.weights.panel(self.first / self.split.unit, panel);
        MatRef::new(&weights[steps.start * rows..], rows, steps.len(), 1, rows)
    }

    /// A panel of the weights times a panel of points, written to the output.
    fn multiply_panel(
        &self,
        panel: usize,
        images: &Range<usize>,
        b: &Points<'_, T::Acc>,
        segments: &[Segment],
        sums: &mut [T::Acc],
        out: &mut [T],
    ) {
        let a = self.weights(panel, 0..self.weights.panels.steps);
        if !self.multiply_in_place(panel, images, a, b, segments, out) {
            self.multiply_points(a, b, segments, (sums, false));
            self.write(panel, images, segments, sums, out);
        }
    }

    /// [`ChannelBlock::multiply_points`] straight to the output, if the panel is full and its points lie side by side there. Returns whether.
    fn multiply_in_place(
        &self,
        panel: usize,
        images: &Range<usize>,
        a: MatRef<'_, T::Acc>,
        b: &Points<'_, T::Acc>,
        segments: &[Segment],
        out: &mut [T],
    ) -> bool {
        let (plane, cols) = (self.shared.shape[2] * self.shared.shape[3], self.shared.tile.cols());
        let first = segments[0];
        let follows = |s: &Segment| s.image == first.image && s.to == first.to + s.at;
        let full = segments.iter().map(|s| s.len).sum::<usize>() == cols;
        if !full || self.pass[1].out_step != 1 || !segments.iter().all(follows) {
            return false;
        }
        let rows = even_piece(self.split.unit, self.weights.panels.count, panel);
        let start = self.place(images, first.image, self.first + rows.start) + first.to;
        let Some(out) = T::as_wide_mut(&mut out[start..]) else { return false };
        b.times::<T>(a, MatMut::new(out, rows.len(), cols, plane, 1), false);
        if let Some(bias) = self.shared.bias {
            let bias = &bias[self.first..][rows];
            for (row, &bias) in out.chunks_mut(plane).zip(bias) {
                row[..cols].iter_mut().for_each(|sum| *sum += bias);
            }
        }
        true
    }

    /// The sums of a panel; if it `goes_on`, they begin with what `sums` holds.
    fn multiply_points(
        &self,
        a: MatRef<'_, T::Acc>,
        b: &Points<'_, T::Acc>,
        segments: &[Segment],
        (sums, goes_on): (&mut [T::Acc], bool),
    ) {
        let tile = self.shared.tile;
        let used = segments.last().map_or(0, |last| last.at + last.len);
        let narrow = used <= tile.lanes && matches!(b, Points::Gathered(_));
        let cols = if narrow { tile.lanes } else { tile.cols() };
        b.times::<T>(a, MatMut::new(sums, a.rows(), cols, tile.cols(), 1), goes_on);
    }

    /// Where the plane of a channel of one of these images begins in this part of the output.
    fn place(&self, images: &Range<usize>, image: usize, channel: usize) -> usize {
        let (plane, channels) = (self.shared.shape[2] * self.shared.shape[3], &self.part.channels);
        let image = images.start + image - self.part.images.start;
        (image * channels.len() + channel - channels.start) * plane
    }

    /// Writes a panel's sums to the output.
    fn write(&self, panel: usize, images: &Range<usize>, found: &[Segment], sums: &[T::Acc], out: &mut [T]) {
        let rows = even_piece(self.split.unit, self.weights.panels.count, panel);
        let channel = self.first + rows.start;
        let bias = self.shared.bias.map(|bias| &bias[channel..]);
        let plane = self.shared.shape[2] * self.shared.shape[3];
        for &segment in found {
            let out = &mut out[self.place(images, segment.image, channel) + segment.to..];
            let (row_len, rows, step) = (self.shared.tile.cols(), rows.len(), self.pass[1].out_step);
            dispatch(StoreSums::<T> { sums, row_len, segment, bias, rows, out, plane, step });
        }
    }
}

/// B for a panel of points: the pixels under the kernel elements.
enum Points<'a, V> {
    /// Gathered, row by row.
    Gathered(&'a [V]),
    /// In the planes of a window or a source.
    OffsetTable(OffsetTable<'a, V>),
}

impl<V: Summed> Points<'_, V> {
    /// A panel of the weights times these pixels.
    fn times<T: GemmElem<Acc = V>>(&self, a: MatRef<'_, V>, c: MatMut<'_, V>, goes_on: bool) {
        match self {
            Points::OffsetTable(places) => gemm_by_offsets::<T::PanelElem>(a, places, c, goes_on),
            Points::Gathered(panel) => gemm_by_panel::<T::PanelElem>(a, panel, c, goes_on),
        }
    }
}
