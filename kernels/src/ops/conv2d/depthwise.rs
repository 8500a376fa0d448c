//! Depthwise convolutions of small planes, and those with a stride: each SIMD lane computes one channel. Source and
//! sums are laid out channels last (NHWC), [`SIDE`] channels at a time. Kernel elements outside the image are left out.
//!
//! `cpu.rs` runs [`Depthwise`], `weight_gradient.rs` calls [`weight`], both where [`pays`] says so.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use phalanx_tensor::Pool;

use super::batch_last::{Deinterleave, Interleave, TOGETHER as SIDE};
use super::packed_weights::PackedWeights;
use super::problem::{Correlation, Summed, WeightGrad};
use super::window::{Axis, Tap};
use crate::gemm::{GemmElem, PanelElem};
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, Runner, Vector, dispatch};

/// Depthwise that fill enough of the lanes. In the gradient of the weight it may be fewer, so that a channel has the bits that it
/// has alone.
pub(super) const CHANNELS_MIN: usize = 8;
/// Pixels and points of a plane at most: with stride 1, where the other way reads neighbours as vectors, and with larger strides.
const PLANE_MAX: [usize; 2] = [400, 1 << 12];
/// Neighbouring points that are computed together.
const POINTS: usize = 4;
/// Chains of a sum in the gradient of the weight, which hide the latency of a multiply-add.
const CHAINS: usize = 4;
/// Multiplications that make a task.
const TASK: usize = 1 << 17;

/// Whether this pays for so many input and output channels of a group, and pixels of the source, if channels are enough.
pub(super) fn pays(passes: &[[Axis; 2]], channels: [usize; 2], size: [usize; 2]) -> bool {
    let points: usize = passes.iter().map(|[rows, cols]| rows.count * cols.count).sum();
    let [rows, cols] = &passes[0];
    let takes_steps = [rows.step, cols.step, rows.out_step, cols.out_step] != [1; 4];
    channels == [1; 2] && points.max(size[0] * size[1]) <= PLANE_MAX[usize::from(takes_steps)]
}

/// `lane`, a multiple of a vector's lanes, in a form that shows the compiler that the vector ends within [`SIDE`].
#[inline(always)]
fn whole<X: Vector>(lane: usize) -> usize {
    lane & (SIDE - X::LANES)
}

/// Interleaves `count` planes that lie one after the other.
fn interleave<T: GemmElem<Acc: Summed>>(planes: &[T], count: usize, to: &mut [[T::Acc; SIDE]]) {
    let (pixels, to) = (to.len(), to.as_flattened_mut());
    let interleave =
        Interleave { source: planes, second: None, pixels, apart: pixels, images: count, room: SIDE, to };
    T::PanelElem::run(Runner::current(), interleave);
}

/// A depthwise convolution, plain or transposed.
pub(super) struct Depthwise<'a, T: GemmElem> {
    pub(super) problem: &'a Correlation<'a>,
    pub(super) source: &'a [T],
    pub(super) bias: Option<&'a [T::Acc]>,
    /// The weights of each pass.
    pub(super) weights: &'a [PackedWeights<'a, T::Acc>],
    /// Rows and columns of the output.
    pub(super) size: [usize; 2],
}

/// An output pixel: its place in the output, and for each kernel element inside the image its number and its pixel's
/// place.
type OutputPixel = (usize, Vec<(usize, usize)>);

/// The output pixels of a pass, rows times columns. Each column comes with the number of neighbouring points that have the same kernel elements
/// inside the image: 1 or [`POINTS`].
struct PassTable {
    rows: Vec<OutputPixel>,
    cols: Vec<(usize, OutputPixel)>,
    /// From a point to the next, in the source and in the output.
    step: usize,
    out_step: usize,
    /// The number of its first kernel element among those of all passes.
    first: usize,
}

impl<T: GemmElem<Acc: Summed>> Depthwise<'_, T> {
    /// Computes all planes of `out`.
    pub(super) fn run(&self, pool: &Pool, out: &mut [T]) {
        let (channels, passes) = (self.problem.groups, self.passes());
        let [pixels, points] = [self.source_size(), self.size].map(|[height, width]| height * width);
        let steps: usize = self.weights.iter().map(|weights| weights.panels.steps).sum();
        let blocks = channels.div_ceil(SIDE);
        let images = out.chunks_mut(channels * points).enumerate();
        let mut parts: Vec<(usize, usize, &mut [T])> = images
            .flat_map(|(i, out)| out.chunks_mut(SIDE * points).enumerate().map(move |(j, out)| (i, j, out)))
            .collect();
        with_scratch(blocks * steps * SIDE, |weights| {
            let weights = weights.as_chunks_mut::<SIDE>().0;
            for (block, to) in weights.chunks_exact_mut(steps.max(1)).enumerate() {
                let (first, count) = (block * SIDE, SIDE.min(channels - block * SIDE));
                for (pass, packed) in passes.iter().zip(self.weights) {
                    let steps = packed.panels.steps;
                    interleave(&packed.data[first * steps..], count, &mut to[pass.first..][..steps]);
                }
            }
            let weights = &*weights;
            let together = TASK.div_ceil(SIDE * points * (steps + 1));
            pool.for_each_chunk(&mut parts, together, |_, parts| {
                with_scratch((pixels + points) * SIDE, |scratch| {
                    let (source, sums) = scratch.as_chunks_mut::<SIDE>().0.split_at_mut(pixels);
                    for (image, block, out) in parts {
                        let (first, count) = (*block * SIDE, out.len() / points);
                        interleave(&self.source[(*image * channels + first) * pixels..], count, source);
                        let mut bias = [T::Acc::ZERO; SIDE];
                        if let Some(from) = self.bias {
                            bias[..count].copy_from_slice(&from[first..][..count]);
                        }
                        let bias = self.bias.map(|_| &bias);
                        let weights = &weights[*block * steps..][..steps];
                        dispatch(DepthwiseSums { passes: &passes, source, weights, bias, count, sums });
                        let sums = sums.as_flattened();
                        dispatch(Deinterleave::<T> {
                            sums,
                            room: SIDE,
                            bias: None,
                            points,
                            out,
                            apart: points,
                        });
                    }
                });
            });
        });
    }

    fn source_size(&self) -> [usize; 2] {
        [2, 3].map(|d| self.problem.source.shape()[d])
    }

    fn passes(&self) -> Vec<PassTable> {
        let [height, width] = self.source_size();
        let mut first = 0;
        let pass = |([rows, cols], weights): (&[Axis; 2], &PackedWeights<'_, T::Acc>)| {
            let taps = cols.taps.len();
            let row = |i: usize| {
                let met = rows.taps_inside(i, height).map(|(nth, y)| (nth * taps, y * width));
                (rows.place(i) * self.size[1], met.collect())
            };
            let alike = |i: usize, j: usize| {
                let numbers = |point| cols.taps_inside(point, width).map(|(nth, _)| nth);
                j < cols.count && numbers(i).eq(numbers(j))
            };
            let (mut met, mut i) = (Vec::new(), 0);
            while i < cols.count {
                let count = if (1..POINTS).all(|next| alike(i, i + next)) { POINTS } else { 1 };
                met.push((count, (cols.place(i), cols.taps_inside(i, width).collect())));
                i += count;
            }
            let rows = (0..rows.count).map(row).collect();
            let pass = PassTable { rows, cols: met, step: cols.step, out_step: cols.out_step, first };
            first += weights.panels.steps;
            pass
        };
        self.problem.passes.iter().zip(self.weights).map(pass).collect()
    }
}

/// The sums of some channels at all points.
struct DepthwiseSums<'a, V> {
    passes: &'a [PassTable],
    source: &'a [[V; SIDE]],
    weights: &'a [[V; SIDE]],
    bias: Option<&'a [V; SIDE]>,
    count: usize,
    sums: &'a mut [[V; SIDE]],
}

impl<V: Float> Kernel for DepthwiseSums<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        for lane in (0..self.count).step_by(V::Vec::<S>::LANES) {
            for pass in self.passes {
                for row in &pass.rows {
                    for (count, col) in &pass.cols {
                        match *count {
                            POINTS => self.points::<V::Vec<S>, POINTS>(pass, row, col, lane),
                            _ => self.points::<V::Vec<S>, 1>(pass, row, col, lane),
                        }
                    }
                }
            }
        }
    }
}

impl<V: Float> DepthwiseSums<'_, V> {
    /// `W` neighbouring points of a vector of channels.
    #[inline(always)]
    fn points<X: Vector<Elem = V>, const W: usize>(
        &mut self,
        pass: &PassTable,
        (row, down): &OutputPixel,
        (col, across): &OutputPixel,
        lane: usize,
    ) {
        let lane = whole::<X>(lane);
        let mut sums = [X::zero(); W];
        for &(nth_row, y) in down {
            for &(nth, x) in across {
                let weight = X::load(&self.weights[pass.first + nth_row + nth][lane..]);
                for w in 0..W {
                    let pixel = X::load(&self.source[y + x + w * pass.step][lane..]);
                    sums[w] = weight.mul_add(pixel, sums[w]);
                }
            }
        }
        for w in 0..W {
            let sum = match self.bias {
                Some(bias) => sums[w] + X::load(&bias[lane..]),
                None => sums[w],
            };
            sum.store(&mut self.sums[row + col + w * pass.out_step][lane..]);
        }
    }
}

/// The weight's gradient for channels from `first` on, `[channel, kernel element]`. An image's products
/// are added in chains that take the points of a row in turns; images are added in their order.
pub(super) fn weight<T: GemmElem<Acc: Summed>>(
    problem: &WeightGrad<'_>,
    [image, grid]: [&[T]; 2],
    first: usize,
    sums: &mut [T::Acc],
) {
    let [rows, cols] = &problem.axes;
    let size = [2, 3].map(|d| problem.image.shape()[d]);
    let (pixels, points) = (size[0] * size[1], rows.count * cols.count);
    let taps = rows.taps.len() * cols.taps.len();
    with_scratch((pixels + points + taps) * SIDE, |scratch| {
        let (x, rest) = scratch.as_chunks_mut::<SIDE>().0.split_at_mut(pixels);
        let (dy, totals) = rest.split_at_mut(points);
        for (block, sums) in sums.chunks_mut(SIDE * taps).enumerate() {
            let count = sums.len() / taps;
            totals.fill([T::Acc::ZERO; SIDE]);
            for n in 0..problem.image.shape()[0] {
                let plane = n * problem.groups + first + block * SIDE;
                interleave(&image[plane * pixels..], count, x);
                interleave(&grid[plane * points..], count, dy);
                dispatch(DepthwiseProducts { axes: &problem.axes, size, x, dy, count, totals });
            }
            for (lane, sums) in sums.chunks_exact_mut(taps).enumerate() {
                sums.iter_mut().zip(&*totals).for_each(|(sum, total)| *sum = total[lane]);
            }
        }
    });
}

/// Adds an image's products to the totals of each kernel element.
struct DepthwiseProducts<'a, V> {
    axes: &'a [Axis; 2],
    size: [usize; 2],
    x: &'a [[V; SIDE]],
    dy: &'a [[V; SIDE]],
    count: usize,
    /// The sums of each kernel element.
    totals: &'a mut [[V; SIDE]],
}

impl<V: Float> Kernel for DepthwiseProducts<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let [rows, cols] = self.axes;
        let [height, width] = self.size;
        for lane in (0..self.count).step_by(V::Vec::<S>::LANES) {
            let lane = whole::<V::Vec<S>>(lane);
            let mut totals = self.totals.iter_mut();
            for down in &rows.taps {
                for (right, total) in cols.taps.iter().zip(&mut totals) {
                    let (met, inside) = (rows.points_inside(down, height), cols.points_inside(right, width));
                    let mut chains = [V::Vec::<S>::zero(); CHAINS];
                    for i in met.filter(|_| !inside.is_empty()) {
                        let place = |tap: &Tap, point: usize| (point as isize + tap.offset) as usize;
                        let x = place(down, i * rows.step) * width + place(right, inside.start * cols.step);
                        let (dy, x) = (&self.dy[i * cols.count..][inside.clone()], &self.x[x..]);
                        let mut at = 0;
                        while at < dy.len() {
                            for c in 0..CHAINS {
                                if at + c < dy.len() {
                                    let pixel = V::Vec::<S>::load(&x[(at + c) * cols.step][lane..]);
                                    let slope = V::Vec::<S>::load(&dy[at + c][lane..]);
                                    chains[c] = slope.mul_add(pixel, chains[c]);
                                }
                            }
                            at += CHAINS;
                        }
                    }
                    let sum = (chains[0] + chains[1]) + (chains[2] + chains[3]);
                    (V::Vec::<S>::load(&total[lane..]) + sum).store(&mut total[lane..]);
                }
            }
        }
    }
}
