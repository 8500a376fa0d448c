//! The weight's gradient where a group has few output channels (depthwise convolutions, above all): for each kernel
//! element the dot product of the pixels under it and the outputs' gradients. The pixels of one input channel are laid out by
//! `space_to_depth.rs`, the gradients with rows of the same length. A SIMD lane adds a band's products in one chain; bands are added in ascending
//! order through the images, and lanes at the end. `weight_gradient.rs` runs it.

use super::problem::{Summed, WeightGrad};
use super::thin::ROWS;
use crate::ops::space_to_depth::{PhaseLayout, ReceptiveField, SpaceToDepth};
use crate::real::Real;
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector, dispatch, each};

/// Places of a channel's phases at most, unless a row of points needs more: they stay in the L1 cache, beside the
/// gradients.
const PHASES_MAX: usize = 1 << 13;
/// Kernel elements that are summed together, for one output channel and for several.
const TAPS_OF_ONE: usize = 5;
const TAPS: usize = 3;

pub(super) struct ThinWeightGradient<'a, T: Real> {
    problem: &'a WeightGrad<'a>,
    image: &'a [T],
    grid: &'a [T],
    layout: PhaseLayout,
    /// The layout of the gradients, whose rows are as long as the pixels'.
    dy_layout: PhaseLayout,
    /// A mask of the run: 1 where it has a point, 0 in the gaps behind rows.
    points: Vec<T::Wide>,
    /// Rows of points at a time.
    band: usize,
    taps: Vec<usize>,
}

impl<'a, T: Real<Wide: Summed>> ThinWeightGradient<'a, T> {
    pub(super) fn new(problem: &'a WeightGrad<'a>, image: &'a [T], grid: &'a [T]) -> Self {
        let [rows, cols] = &problem.axes;
        let reach = |axis: &super::window::Axis, count: usize| {
            ReceptiveField::new(axis.step, count, axis.taps.iter().map(|tap| tap.offset))
        };
        let layout = |band: usize| PhaseLayout::new([reach(rows, band), reach(cols, cols.count)]);
        let band = (PHASES_MAX / layout(1).len).clamp(1, rows.count.max(1));
        let layout = layout(band);
        let place = |y: isize| cols.taps.iter().map(move |x| layout.place([y, x.offset]));
        let taps = rows.taps.iter().flat_map(|y| place(y.offset)).collect();
        let zero = || std::iter::once(0);
        let dy_layout = PhaseLayout::new([
            ReceptiveField::new(1, band, zero()),
            ReceptiveField::new(1, layout.row_len, zero()),
        ]);
        let mut points = vec![T::Wide::ZERO; dy_layout.len];
        for row in points.chunks_exact_mut(layout.row_len).take(band) {
            row[..cols.count].fill(T::Wide::ONE);
        }
        ThinWeightGradient { problem, image, grid, layout, dy_layout, points, band, taps }
    }

    /// The sums of the input channels from `first` on: `[channel, kernel element, output channel]`.
    pub(super) fn run(&self, first: usize, sums: &mut [T::Wide]) {
        let (problem, rows) = (self.problem, self.problem.channels_out);
        let size = [2, 3].map(|d| problem.image.shape()[d]);
        let (count, width) = (problem.axes[0].count, problem.axes[1].count);
        let is_wide = T::as_wide(&[]).is_some();
        let from = match is_wide {
            true => 0,
            false => (self.layout.rows_max(size[0]) * size[1]).max(rows * self.band * width),
        };
        let lens = [self.taps.len() * rows * LANES_MAX, self.layout.len, self.dy_layout.len * rows];
        with_scratch(lens.iter().sum::<usize>() + from, |scratch| {
            let (totals, scratch) = scratch.split_at_mut(lens[0]);
            let (phases, scratch) = scratch.split_at_mut(lens[1]);
            let (dy, from) = scratch.split_at_mut(lens[2]);
            dy.fill(T::Wide::ZERO);
            for (i, sums) in sums.chunks_exact_mut(self.taps.len() * rows).enumerate() {
                totals.fill(T::Wide::ZERO);
                for image in 0..problem.image.shape()[0] {
                    for start in (0..count).step_by(self.band).filter(|_| width > 0) {
                        self.fill_phases(image, first + i, start, from, phases);
                        self.fill_gradients(image, first + i, start, from, dy);
                        let (row_len, taps, points) = (self.layout.row_len, &self.taps, &self.points);
                        let run = (self.band - 1) * row_len + width;
                        let apart = self.dy_layout.len;
                        dispatch(AddProducts { phases, taps, points, run, dy, apart, rows, totals });
                    }
                }
                dispatch(SumLanes { totals, sums });
            }
        });
    }

    /// Fills the phases with the pixels of an input channel that points from row `start` on read.
    fn fill_phases(
        &self,
        image: usize,
        channel: usize,
        start: usize,
        from: &mut [T::Wide],
        to: &mut [T::Wide],
    ) {
        let [height, width] = [2, 3].map(|d| self.problem.image.shape()[d]);
        let rows = self.layout.rows(start, height);
        let plane = image * self.problem.groups * self.problem.channels_in + channel;
        let source = &self.image[(plane * height + rows.start) * width..][..rows.len() * width];
        let (layout, size, margin) = (&self.layout, [rows.len(), width], T::Wide::ZERO);
        let source = match T::as_wide(source) {
            Some(source) => source,
            None => {
                let from = &mut from[..source.len()];
                T::widen_all(source, from);
                from
            }
        };
        dispatch(SpaceToDepth { layout, source, apart: 0, top: rows.start, size, first: start, margin, to });
    }

    /// Copies the gradients of a group's outputs at the points from row `start` on, with zeros after the last.
    fn fill_gradients(
        &self,
        image: usize,
        channel: usize,
        start: usize,
        from: &mut [T::Wide],
        to: &mut [T::Wide],
    ) {
        let (problem, rows) = (self.problem, self.problem.channels_out);
        let size = [self.band.min(problem.axes[0].count - start), problem.axes[1].count];
        let (plane, here) = (problem.axes[0].count * size[1], size[0] * size[1]);
        let first = (image * problem.groups + channel / problem.channels_in) * rows * plane + start * size[1];
        let grid = &self.grid[first..];
        let (source, apart) = match T::as_wide(grid) {
            Some(grid) => (grid, plane),
            None => {
                for (row, dy) in from.chunks_exact_mut(here).take(rows).enumerate() {
                    T::widen_all(&grid[row * plane..][..here], dy);
                }
                (&*from, here)
            }
        };
        let margin = T::Wide::ZERO;
        dispatch(SpaceToDepth { layout: &self.dy_layout, source, apart, top: 0, size, first: 0, margin, to });
    }
}

/// Adds a band's products to the totals of each lane, for each kernel element and output channel.
struct AddProducts<'a, V> {
    phases: &'a [V],
    taps: &'a [usize],
    /// The mask of the run: 1 at points.
    points: &'a [V],
    run: usize,
    /// The gradients; output channels are `apart` from each other.
    dy: &'a [V],
    apart: usize,
    rows: usize,
    totals: &'a mut [V],
}

impl<V: Float> Kernel for AddProducts<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        match self.rows {
            1 => self.run_rows::<V::Vec<S>, 1, TAPS_OF_ONE>(),
            2 => self.run_rows::<V::Vec<S>, 2, TAPS>(),
            3 => self.run_rows::<V::Vec<S>, 3, TAPS>(),
            rows => {
                assert!(rows == ROWS, "{rows} rows");
                self.run_rows::<V::Vec<S>, ROWS, TAPS>();
            }
        }
    }
}

impl<V: Float> AddProducts<'_, V> {
    #[inline(always)]
    fn run_rows<X: Vector<Elem = V>, const R: usize, const T: usize>(self) {
        let totals = self.totals.chunks_mut(T * R * LANES_MAX);
        for (taps, totals) in self.taps.chunks(T).zip(totals) {
            let met: [&[V]; T] = each(|i| &self.phases[taps[i.min(taps.len() - 1)]..]);
            let mut sums = [[X::zero(); R]; T];
            for at in (0..self.run).step_by(X::LANES) {
                let is_point = X::load(&self.points[at..]).ne(X::zero());
                let dy: [X; R] = each(|i| X::load(&self.dy[i * self.apart + at..]));
                for (sums, met) in sums.iter_mut().zip(met) {
                    // What lies in a gap may be infinite, and its product with zero is none.
                    let x = X::select(is_point, X::load(&met[at..]), X::zero());
                    sums.iter_mut().zip(dy).for_each(|(sum, dy)| *sum = dy.mul_add(x, *sum));
                }
            }
            let sums = sums.iter().flatten();
            totals.chunks_exact_mut(LANES_MAX).zip(sums).for_each(|(total, &sum)| {
                (X::load(total) + sum).store(total);
            });
        }
    }
}

/// Adds up the lanes of each total.
struct SumLanes<'a, V> {
    totals: &'a [V],
    sums: &'a mut [V],
}

impl<V: Float> Kernel for SumLanes<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (sum, total) in self.sums.iter_mut().zip(self.totals.chunks_exact(LANES_MAX)) {
            *sum = V::Vec::<S>::load(total).reduce_sum();
        }
    }
}
