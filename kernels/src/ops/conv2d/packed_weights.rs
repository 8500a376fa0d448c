//! A convolution's weights, packed into panels that the micro-kernel reads: [`Correlation::pack`] fills [`PackedWeights`], one for each pass. `cpu.rs`
//! packs them once, all ways of computing read them.

use std::ops::Range;

use phalanx_tensor::{Pool, even_piece};

use super::problem::{Correlation, Summed};
use super::window::{Axis, StepOrder};
use crate::gemm::{GemmElem, MatRef, PanelElem, pack_panels, steps_in_place};
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Runner, Vector};

/// Elements that a thread packs at least.
const PIECE: usize = 1 << 13;

/// The layout of packed weights: `count` panels for each unit of output channels, `len` elements apart.
#[derive(Clone, Copy)]
pub(super) struct WeightPanels {
    pub(super) unit: usize,
    pub(super) count: usize,
    pub(super) len: usize,
    /// Rows of a panel at most.
    pub(super) rows: usize,
    pub(super) steps: usize,
}

impl WeightPanels {
    pub(super) fn new(unit: usize, rows_max: usize, steps: usize) -> WeightPanels {
        let count = unit.div_ceil(rows_max);
        let rows = unit.div_ceil(count);
        WeightPanels { unit, count, len: steps * rows, rows, steps }
    }

    /// The number of elements of the panels of so many channels.
    pub(super) fn elements(&self, channels: usize) -> usize {
        self.len * self.count * (channels / self.unit)
    }

    /// Whether `f` is true of the number of rows of every panel.
    pub(super) fn rows_all(&self, f: impl Fn(usize) -> bool) -> bool {
        (0..self.count).all(|panel| f(even_piece(self.unit, self.count, panel).len()))
    }
}

/// The packed weights of a pass.
#[derive(Clone, Copy)]
pub(super) struct PackedWeights<'a, V> {
    pub(super) panels: WeightPanels,
    pub(super) data: &'a [V],
}

impl<V> PackedWeights<'_, V> {
    /// A panel of a unit, and how many rows it has.
    pub(super) fn panel(&self, unit: usize, panel: usize) -> (&[V], usize) {
        self.of_panel(unit * self.panels.count + panel)
    }

    /// A panel by its number among those of all units, and how many rows it has.
    pub(super) fn of_panel(&self, panel: usize) -> (&[V], usize) {
        let WeightPanels { count, len, steps, unit, .. } = self.panels;
        let rows = even_piece(unit, count, panel % count).len();
        (&self.data[panel * len..][..steps * rows], rows)
    }
}

impl Correlation<'_> {
    /// The weight's elements of a pass, in panels of output channels: `[panel][step][channel of panel]`.
    pub(super) fn pack<T: GemmElem<Acc: Summed>>(
        &self,
        weight: &[T],
        pass: &[Axis; 2],
        order: StepOrder,
        panels: WeightPanels,
        (pool, to): (&Pool, &mut [T::Acc]),
    ) {
        let together = PIECE.div_ceil(panels.len.max(1));
        pool.for_each_chunk(to, (together * panels.len).max(1), |i, to| {
            for (j, to) in to.chunks_exact_mut(panels.len).enumerate() {
                let panel = i * together + j;
                let rows = even_piece(panels.unit, panels.count, panel % panels.count);
                let channel = panel / panels.count * panels.unit + rows.start;
                self.pack_panel(
                    weight,
                    pass,
                    order,
                    channel,
                    rows.len(),
                    &mut to[..panels.steps * rows.len()],
                );
            }
        });
    }

    fn pack_panel<T: GemmElem<Acc: Summed>>(
        &self,
        weight: &[T],
        pass @ [rows, cols]: &[Axis; 2],
        order: StepOrder,
        channel: usize,
        count: usize,
        to: &mut [T::Acc],
    ) {
        let [group_stride, out_stride, in_stride, row_stride, col_stride] = self.weight_strides;
        let first = channel / self.channels_out * group_stride + channel % self.channels_out * out_stride;
        let (weight, taps) = (&weight[first..], rows.taps.len() * cols.taps.len());
        let elements =
            pass.each_ref().map(|axis| axis.taps.iter().enumerate().all(|(i, tap)| tap.kernel == i));
        let are_all = elements == [true; 2]
            && (col_stride == 1 || cols.taps.len() == 1)
            && (row_stride == cols.taps.len() || rows.taps.len() == 1);
        // As a matrix lies, if its steps have the right order and a lane as many of them.
        let in_order = taps == 1 || are_all && order.together == 1 && in_stride == taps;
        if in_order && self.channels_in > 0 && order.in_lane == steps_in_place::<T>() {
            let (steps, step_stride, at) = match (taps, rows.taps.first(), cols.taps.first()) {
                (1, Some(y), Some(x)) => {
                    (self.channels_in, in_stride, y.kernel * row_stride + x.kernel * col_stride)
                }
                _ => (self.channels_in * taps, 1, 0),
            };
            let places = steps.div_ceil(order.in_lane);
            let matrix = MatRef::new(&weight[at..], steps, count, step_stride, out_stride);
            pack_panels(matrix, count, &mut to[..places * count]);
            return to[places * count..].fill(T::Acc::ZERO);
        }
        let at = |y: usize, x: usize| y * row_stride + x * col_stride;
        let places = rows.taps.iter().flat_map(|y| cols.taps.iter().map(move |x| at(y.kernel, x.kernel)));
        let places: Vec<usize> = places.collect();
        let strides = [out_stride, in_stride];
        let steps =
            PackSteps { weight, strides, places: &places, channels: self.channels_in, order, count, to };
        T::PanelElem::run(Runner::current(), steps);
    }
}

/// Packs the weights of some output channels, step by step.
struct PackSteps<'a, T: GemmElem> {
    weight: &'a [T],
    /// From an output channel to the next, and from an input channel.
    strides: [usize; 2],
    /// The place of each kernel element within an input channel's weights.
    places: &'a [usize],
    channels: usize,
    order: StepOrder,
    /// Output channels.
    count: usize,
    /// `count` places for each step.
    to: &'a mut [T::Acc],
}

impl<T: GemmElem> Kernel for PackSteps<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        if 2 * self.count >= <<T::Acc as Float>::Vec<S> as Vector>::LANES {
            self.transpose::<S, <T::Acc as Float>::Vec<S>>();
        } else {
            self.gather::<S>();
        }
    }
}

impl<T: GemmElem> PackSteps<'_, T> {
    /// By squares of output channels and kernel elements, transposed in registers.
    #[inline(always)]
    fn transpose<S: Isa, V: Vector<Elem = T::Acc>>(self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let mut squares = [[V::zero(); LANES_MAX]; 2];
        for row in (0..self.count).step_by(V::LANES) {
            let (rows, mut at) = (V::LANES.min(self.count - row), row);
            for first in (0..self.channels).step_by(self.order.together) {
                let mut held = [usize::MAX; 2];
                for &place in self.places {
                    let start = place / V::LANES * V::LANES;
                    for i in 0..self.order.places() {
                        if held[i] != start {
                            let channel = first + i * self.order.in_lane;
                            self.load::<S, V>(row..row + rows, channel, start, &mut squares[i]);
                            V::transpose(&mut squares[i]);
                            held[i] = start;
                        }
                        let (lanes, to) = (squares[i][place - start], &mut self.to[at..]);
                        // A whole vector may overwrite the step after, which is written next.
                        if to.len() >= V::LANES && (rows == V::LANES || row == 0) {
                            lanes.store(to);
                        } else {
                            lanes.store_partial(&mut to[..rows]);
                        }
                        at += self.count;
                    }
                }
            }
        }
    }

    /// Loads for each output channel a vector of the kernel elements from place `start` on.
    #[inline(always)]
    fn load<S: Isa, V: Vector<Elem = T::Acc>>(
        &self,
        rows: Range<usize>,
        channel: usize,
        start: usize,
        to: &mut [V; LANES_MAX],
    ) where
        T::Acc: Float<Vec<S> = V>,
    {
        *to = [V::zero(); LANES_MAX];
        if channel >= self.channels {
            return; // the partner that a last channel lacks
        }
        let (zeros, [out_stride, in_stride]) = ([T::zeroed(); LANES_MAX], self.strides);
        let has_second = self.order.in_lane > 1 && channel + 1 < self.channels;
        for (i, row) in rows.zip(to) {
            let x = &self.weight[i * out_stride + channel * in_stride + start..];
            let y = if has_second { &x[in_stride..] } else { &zeros[..] };
            V::prefetch(x.as_ptr().wrapping_add(2 * self.order.together * in_stride).cast());
            let len = x.len().min(y.len());
            *row = match len >= V::LANES {
                true => T::load_lines::<S>(&x[..V::LANES], &y[..V::LANES]),
                false => T::load_lines::<S>(&x[..len], &y[..len]),
            };
        }
    }

    /// Element by element.
    #[inline(always)]
    fn gather<S: Isa>(self) {
        let (order, [out_stride, in_stride]) = (self.order, self.strides);
        let mut lanes = self.to.chunks_exact_mut(self.count);
        for first in (0..self.channels).step_by(order.together) {
            for &place in self.places {
                for i in (first..first + order.together).step_by(order.in_lane) {
                    let Some(to) = lanes.next() else { return };
                    let of_channel = |channel: usize| {
                        (channel < self.channels).then(|| &self.weight[channel * in_stride + place..])
                    };
                    let second = if order.in_lane > 1 { of_channel(i + 1) } else { None };
                    match (of_channel(i), second) {
                        (None, _) => to.fill(<T::Acc as Float>::ZERO),
                        (Some(x), Some(y)) => {
                            let pairs = x.iter().step_by(out_stride).zip(y.iter().step_by(out_stride));
                            to.iter_mut().zip(pairs).for_each(|(to, (x, &y))| *to = x.pair_up::<S>(y));
                        }
                        (Some(x), None) => {
                            let x = x.iter().step_by(out_stride);
                            to.iter_mut().zip(x).for_each(|(to, x)| *to = x.pair_up::<S>(T::zeroed()));
                        }
                    }
                }
            }
        }
    }
}
