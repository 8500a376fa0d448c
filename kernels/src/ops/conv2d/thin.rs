//! Direct convolution for few output channels a group, depthwise ones above all: no GEMM; sums are made straight from the pixels of a
//! group's input channels, laid out by `space_to_depth.rs`, all outputs of some rows in one run. One table serves all groups and
//! images. `cpu.rs` runs [`Thin`] where [`unit`] gives a number of channels.

use std::ops::Range;

use phalanx_tensor::{Pool, even_piece};

use super::packed_weights::PackedWeights;
use super::problem::{Correlation, Summed};
use super::window::Axis;
use crate::ops::space_to_depth::{PhaseLayout, ReceptiveField, SpaceToDepth, VECTORS_MAX, runs};
use crate::real::Real;
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector, dispatch, each};

/// Output channels whose sums are made together at most.
pub(super) const ROWS: usize = 4;
/// With at most so many steps of k, packing panels takes longer than it saves.
const STEPS_MAX: usize = 32;
/// Places of a group's phases, and of a run, at most, unless one row of outputs needs more.
const PHASES_MAX: usize = 1 << 16;
const RUN_MAX: usize = 1 << 13;
/// Multiplications that make a task.
const TASK: usize = 1 << 17;

/// A convolution to few output channels.
pub(super) struct Thin<'a, T: Real> {
    pub(super) problem: &'a Correlation<'a>,
    pub(super) source: &'a [T],
    pub(super) bias: Option<&'a [T::Wide]>,
    /// The weights of each pass.
    pub(super) weights: &'a [PackedWeights<'a, T::Wide>],
    /// Rows and columns of the output.
    pub(super) size: [usize; 2],
    /// Output channels that are computed together: a group's phases are made once for them.
    pub(super) unit: usize,
}

/// The layout of the phases for `band` rows of points, and the places of each pass's kernel elements there.
struct ThinPlan {
    layout: PhaseLayout,
    band: usize,
    taps: Vec<Vec<usize>>,
}

/// Scratch memory of a task.
struct Buffers<'a, V> {
    phases: &'a mut [V],
    run: &'a mut [V],
    /// Where halves are widened: those of the source, and of the output.
    from: &'a mut [V],
    to: &'a mut [V],
}

/// The number of output channels that are computed together, if a group has few of them or few steps: all of a group, or as many as
/// leave each thread some work. `None` if the convolution is for GEMM.
pub(super) fn unit(problem: &Correlation<'_>, images: usize, threads: usize) -> Option<usize> {
    let taps = problem.passes[0].each_ref().map(|axis| axis.taps.len());
    let steps = problem.channels_in * taps.iter().product::<usize>();
    let enough = |parts: &usize| images * problem.groups * parts >= 2 * threads;
    let mut parts = (1..=problem.channels_out).filter(|parts| problem.channels_out.is_multiple_of(*parts));
    (problem.channels_out <= 2 * ROWS || steps <= STEPS_MAX)
        .then(|| parts.find(enough).map_or(1, |parts| problem.channels_out / parts))
}

impl<T: Real<Wide: Summed>> Thin<'_, T> {
    /// Computes all planes of `out`.
    pub(super) fn run(&self, pool: &Pool, out: &mut [T]) {
        let (plan, plane) = (self.plan(), self.size[0] * self.size[1]);
        let (unit, work) = (self.unit, self.weights[0].panels.steps * self.unit * plane);
        let units = out.len() / (unit * plane);
        let tasks = 2 * pool.threads();
        if units >= tasks || unit > 1 {
            let planes = TASK.div_ceil(work + 1).min(units.div_ceil(tasks)) * unit;
            return pool.for_each_chunk(out, planes * plane, |i, out| {
                self.task(&plan, i * planes, 0..self.size[0], out);
            });
        }
        // Some rows of a plane are a task.
        let step = self.problem.passes[0][0].out_step;
        let rows = self.size[0].div_ceil(tasks).max(TASK / (work / self.size[0] + 1));
        let rows = rows.checked_next_multiple_of(step).unwrap_or(usize::MAX).min(self.size[0]);
        let mut parts = Vec::new();
        for (i, plane) in out.chunks_mut(plane).enumerate() {
            let bands = plane.chunks_mut(rows * self.size[1]).enumerate();
            parts.extend(bands.map(|(j, out)| (i, j * rows, out)));
        }
        pool.for_each_chunk(&mut parts, 1, |_, parts| {
            for (plane, first, out) in parts {
                self.task(&plan, *plane, *first..*first + out.len() / self.size[1], out);
            }
        });
    }

    fn plan(&self) -> ThinPlan {
        let passes = &self.problem.passes;
        let reach = |i: usize, count: usize| {
            let offsets = passes.iter().flat_map(|pass| pass[i].taps.iter().map(|tap| tap.offset));
            ReceptiveField::new(passes[0][i].step, count, offsets)
        };
        let most = |i: usize| passes.iter().map(|pass| pass[i].count).max().unwrap_or(0);
        let layout = |band: usize| PhaseLayout::new([reach(0, band), reach(1, most(1))]);
        let (row, channels) = (layout(1), self.problem.channels_in);
        let fitting = (PHASES_MAX / (row.len * channels).max(1)).min(RUN_MAX / row.row_len);
        let band = fitting.clamp(1, most(0).max(1));
        let layout = layout(band);
        let taps = |[rows, cols]: &[Axis; 2]| {
            let place = |y: isize| cols.taps.iter().map(move |x| layout.place([y, x.offset]));
            let places: Vec<usize> = rows.taps.iter().flat_map(|y| place(y.offset)).collect();
            (0..channels).flat_map(|c| places.iter().map(move |at| c * layout.len + at)).collect()
        };
        ThinPlan { layout, band, taps: passes.iter().map(taps).collect() }
    }

    /// Computes some rows of the planes from number `first` on: whole units, or one plane.
    fn task(&self, plan: &ThinPlan, first: usize, rows: Range<usize>, out: &mut [T]) {
        let (problem, width, plane) = (self.problem, self.size[1], rows.len() * self.size[1]);
        let band = plan.band.saturating_mul(problem.passes[0][0].out_step).min(rows.len());
        let run = plan.band * plan.layout.row_len + VECTORS_MAX * LANES_MAX;
        let [height, length] = [2, 3].map(|d| problem.source.shape()[d]);
        let is_wide = T::as_wide(&[]).is_some();
        let from = if is_wide { 0 } else { problem.channels_in * plan.layout.rows_max(height) * length };
        let lens = [plan.layout.len * problem.channels_in, ROWS * run, from];
        let to = if is_wide { 0 } else { self.unit * band * width };
        with_scratch(lens.iter().sum::<usize>() + to, |scratch| {
            let (phases, scratch) = scratch.split_at_mut(lens[0]);
            let (run, scratch) = scratch.split_at_mut(lens[1]);
            let (from, to) = scratch.split_at_mut(lens[2]);
            let mut work = Buffers { phases, run, from, to };
            for (i, out) in out.chunks_exact_mut(self.unit * plane).enumerate() {
                for start in rows.clone().step_by(band) {
                    let part = start..rows.end.min(start + band);
                    let out = &mut out[(start - rows.start) * width..];
                    self.band(plan, first + i * self.unit, part, &mut work, (plane, out));
                }
            }
        });
    }

    /// Computes a band of rows of a unit's planes, the first of which is `first`; planes of `out` are `apart` from each other.
    fn band(
        &self,
        plan: &ThinPlan,
        first: usize,
        rows: Range<usize>,
        work: &mut Buffers<'_, T::Wide>,
        (apart, out): (usize, &mut [T]),
    ) {
        self.fill_phases(plan, first, rows.start / self.problem.passes[0][0].out_step, work);
        if let Some(out) = T::as_wide_mut(out) {
            return self.sum(plan, first, rows, work.phases, work.run, (apart, out));
        }
        let len = rows.len() * self.size[1];
        self.sum(plan, first, rows, work.phases, work.run, (len, work.to));
        for (wide, out) in work.to.chunks_exact(len).zip(out.chunks_mut(apart)) {
            T::narrow_all(wide, &mut out[..len]);
        }
    }

    /// Fills the phases of the input channels that an output plane is made of, for points from row `first` on.
    fn fill_phases(&self, plan: &ThinPlan, plane: usize, first: usize, work: &mut Buffers<'_, T::Wide>) {
        let (problem, layout) = (self.problem, &plan.layout);
        let [height, width] = [2, 3].map(|d| problem.source.shape()[d]);
        let apart = height * width;
        let source = &self.source[plane / problem.channels_out * problem.channels_in * apart..];
        let rows = layout.rows(first, height);
        let (top, size, margin) = (rows.start, [rows.len(), width], T::Wide::ZERO);
        let places = rows.start * width..rows.end * width;
        let to = &mut *work.phases;
        if let Some(source) = T::as_wide(source) {
            let source = &source[places.start..];
            return dispatch(SpaceToDepth { layout, source, apart, top, size, first, margin, to });
        }
        let here = places.len();
        for (channel, wide) in work.from.chunks_exact_mut(here.max(1)).take(problem.channels_in).enumerate() {
            T::widen_all(&source[channel * apart..][places.clone()], wide);
        }
        dispatch(SpaceToDepth { layout, source: work.from, apart: here, top, size, first, margin, to });
    }

    /// The sums of all passes at these rows of the output.
    fn sum(
        &self,
        plan: &ThinPlan,
        plane: usize,
        rows: Range<usize>,
        phases: &[T::Wide],
        run: &mut [T::Wide],
        (apart, out): (usize, &mut [T::Wide]),
    ) {
        let channel = plane % (self.problem.groups * self.problem.channels_out);
        for ((pass, weights), taps) in self.problem.passes.iter().zip(self.weights).zip(&plan.taps) {
            let [down, right] = pass;
            let end = rows.end.saturating_sub(down.out_start).div_ceil(down.out_step).min(down.count);
            let points = [end.saturating_sub(rows.start / down.out_step), right.count];
            if points.contains(&0) {
                continue;
            }
            let count = weights.panels.count;
            for panel in 0..count {
                let here = even_piece(self.unit, count, panel);
                let bias = self.bias.map(|bias| &bias[channel + here.start..][..here.len()]);
                let (weights, _) = weights.panel(channel / self.unit, panel);
                let out = &mut out[here.start * apart + down.out_start * self.size[1] + right.out_start..];
                // A single row may have any step.
                let steps = [down.out_step.wrapping_mul(self.size[1]), right.out_step];
                let (row_len, rows) = (plan.layout.row_len, here.len());
                dispatch(ThinSums {
                    phases,
                    row_len,
                    taps,
                    points,
                    weights,
                    rows,
                    bias,
                    run,
                    out,
                    apart,
                    steps,
                });
            }
        }
    }
}

/// Sums of up to [`ROWS`] output channels: each the sum over the kernel elements, ascending, of the pixels under them
/// times their weights.
struct ThinSums<'a, V> {
    phases: &'a [V],
    row_len: usize,
    taps: &'a [usize],
    /// Rows and columns of points.
    points: [usize; 2],
    /// For each kernel element a weight for each output channel.
    weights: &'a [V],
    rows: usize,
    bias: Option<&'a [V]>,
    run: &'a mut [V],
    out: &'a mut [V],
    /// From one output channel to the next.
    apart: usize,
    /// From one row of points to the next, and from one column.
    steps: [usize; 2],
}

impl<V: Float> Kernel for ThinSums<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        match self.rows {
            1 => self.run_rows::<V::Vec<S>, 1, VECTORS_MAX>(),
            2 => self.run_rows::<V::Vec<S>, 2, VECTORS_MAX>(),
            3 => self.run_rows::<V::Vec<S>, 3, 2>(),
            rows => {
                assert!(rows == ROWS, "{rows} rows");
                self.run_rows::<V::Vec<S>, ROWS, 2>();
            }
        }
    }
}

impl<V: Float> ThinSums<'_, V> {
    #[inline(always)]
    fn run_rows<X: Vector<Elem = V>, const R: usize, const W: usize>(self) {
        let (weights, [rows, cols]) = (self.weights.as_chunks::<R>().0, self.points);
        let run_len = self.run.len() / R;
        for first in runs(self.points, self.row_len, W * X::LANES) {
            let mut sums = [[X::zero(); W]; R];
            for (weights, &tap) in weights.iter().zip(self.taps) {
                let from = &self.phases[tap + first..][..W * X::LANES];
                let met: [X; W] = each(|j| X::load(&from[j * X::LANES..]));
                for (sums, &weight) in sums.iter_mut().zip(weights) {
                    for (sum, x) in sums.iter_mut().zip(met) {
                        *sum = X::splat(weight).mul_add(x, *sum);
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                let run = &mut self.run[i * run_len + first..][..W * X::LANES];
                for (j, &sum) in sums.iter().enumerate() {
                    let sum = match self.bias {
                        Some(bias) => sum + X::splat(bias[i]),
                        None => sum,
                    };
                    sum.store(&mut run[j * X::LANES..]);
                }
            }
        }
        for i in 0..R {
            for row in 0..rows {
                let from = &self.run[i * run_len + row * self.row_len..][..cols];
                let out = &mut self.out[i * self.apart + row * self.steps[0]..];
                if self.steps[1] == 1 {
                    let (from, to) = (from.chunks_exact(X::LANES), &mut out[..cols]);
                    let (last, mut to) = (from.remainder(), to.chunks_exact_mut(X::LANES));
                    from.zip(&mut to).for_each(|(from, to)| X::load(from).store(to));
                    if !last.is_empty() {
                        X::load_partial(last, V::ZERO).store_partial(to.into_remainder());
                    }
                } else {
                    out.iter_mut().step_by(self.steps[1]).zip(from).for_each(|(to, &sum)| *to = sum);
                }
            }
        }
    }
}
