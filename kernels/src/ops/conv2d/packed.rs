//! A convolution's weights, in panels as tiles read them.

use phalanx_tensor::Pool;

use super::Summed;
use super::axis::Axis;
use super::cpu::Correlation;
use super::order::Order;
use crate::gemm::{GemmElem, MatRef, Place, pack_panels, share, steps_in_place, with_scratch};
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Runner, Vector};

/// Elements that a thread packs at least.
const PIECE: usize = 1 << 13;

/// How weights are packed: `count` panels a unit of channels, `len` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub(super) unit: usize,
    pub(super) count: usize,
    pub(super) len: usize,
    /// Rows of a panel at most.
    pub(super) rows: usize,
    pub(super) steps: usize,
}

impl Panels {
    pub(super) fn new(unit: usize, rows_max: usize, steps: usize) -> Panels {
        let count = unit.div_ceil(rows_max);
        let rows = unit.div_ceil(count);
        Panels { unit, count, len: steps * rows, rows, steps }
    }

    /// The elements of the panels of so many channels.
    pub(super) fn elements(&self, channels: usize) -> usize {
        self.len * self.count * (channels / self.unit)
    }

    /// Whether `f` is true of the rows of all panels.
    pub(super) fn rows_all(&self, f: impl Fn(usize) -> bool) -> bool {
        (0..self.count).all(|panel| f(share(self.unit, self.count, panel).len()))
    }
}

/// Packed weights.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a, V> {
    pub(super) panels: Panels,
    pub(super) data: &'a [V],
}

impl<V> Packed<'_, V> {
    /// A panel of a unit, and its rows.
    pub(super) fn panel(&self, unit: usize, panel: usize) -> (&[V], usize) {
        self.of_panel(unit * self.panels.count + panel)
    }

    /// A panel of all units', and its rows.
    pub(super) fn of_panel(&self, panel: usize) -> (&[V], usize) {
        let Panels { count, len, steps, unit, .. } = self.panels;
        let rows = share(unit, count, panel % count).len();
        (&self.data[panel * len..][..steps * rows], rows)
    }
}

impl Correlation<'_> {
    /// The weight's elements of a pass, in panels of output channels: `[panel][step][channel of panel]`.
    pub(super) fn pack<T: GemmElem<Acc: Summed>>(
        &self,
        weight: &[T],
        pass: &[Axis; 2],
        order: Order,
        panels: Panels,
        (pool, to): (&Pool, &mut [T::Acc]),
    ) {
        let together = PIECE.div_ceil(panels.len.max(1));
        pool.for_each_chunk(to, (together * panels.len).max(1), |i, to| {
            for (j, to) in to.chunks_exact_mut(panels.len).enumerate() {
                let panel = i * together + j;
                let rows = share(panels.unit, panels.count, panel % panels.count);
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
        order: Order,
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
        let (places, steps): (Vec<usize>, usize) = (places.collect(), to.len() / count);
        if out_stride < in_stride {
            let strides = [out_stride, in_stride];
            let near =
                Near { weight, strides, places: &places, channels: self.channels_in, order, count, to };
            return T::Place::run(Runner::current(), near);
        }
        let row_len = steps + LANES_MAX;
        with_scratch(count * row_len, |lanes| {
            let (places, channels) = (&places[..], self.channels_in);
            let strides = [out_stride, in_stride];
            let strips =
                Strips { weight, strides, places, are_all, channels, order, row_len, lanes: &mut *lanes };
            T::Place::run(Runner::current(), strips);
            pack_panels(MatRef::new(lanes, steps, count, 1, row_len), count, to);
        });
    }
}

/// A panel of output channels that lie nearer to each other than input channels do, as in a transposed convolution: for each
/// step one after the other.
struct Near<'a, T: GemmElem> {
    weight: &'a [T],
    /// From an output channel to the next, and from an input channel.
    strides: [usize; 2],
    /// Where the kernel elements lie.
    places: &'a [usize],
    channels: usize,
    order: Order,
    count: usize,
    to: &'a mut [T::Acc],
}

impl<T: GemmElem> Kernel for Near<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
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
                            to.iter_mut().zip(pairs).for_each(|(to, (x, &y))| *to = x.beside::<S>(y));
                        }
                        (Some(x), None) => {
                            let x = x.iter().step_by(out_stride);
                            to.iter_mut().zip(x).for_each(|(to, x)| *to = x.beside::<S>(T::zeroed()));
                        }
                    }
                }
            }
        }
    }
}

/// The steps of some output channels, lane by lane.
struct Strips<'a, T: GemmElem> {
    weight: &'a [T],
    /// From an output channel to the next, and from an input channel.
    strides: [usize; 2],
    /// Where the kernel elements lie.
    places: &'a [usize],
    /// Whether they lie side by side.
    are_all: bool,
    channels: usize,
    order: Order,
    /// A row for each output channel, a vector longer than its steps.
    row_len: usize,
    lanes: &'a mut [T::Acc],
}

impl<T: GemmElem> Kernel for Strips<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (taps, order) = (self.places.len(), self.order);
        let vector = <<T::Acc as Float>::Vec<S> as Vector>::LANES;
        for (row, lanes) in self.lanes.chunks_exact_mut(self.row_len).enumerate() {
            let row = &self.weight[row * self.strides[0]..];
            for first in (0..self.channels).step_by(order.together) {
                let lanes = &mut lanes[first / order.together * taps * order.places()..];
                let channel = |nth: usize| match first + nth < self.channels {
                    true => Some(&row[(first + nth) * self.strides[1]..]),
                    false => None,
                };
                let second = |from: usize| if order.in_lane > 1 { channel(from + 1) } else { None };
                if self.are_all && order.places() == 1 {
                    let (x, y) = (&row[first * self.strides[1]..][..taps], second(0).map(|y| &y[..taps]));
                    for at in (0..taps).step_by(vector) {
                        let here = at..taps.min(at + vector);
                        let lane = match y {
                            Some(y) => T::across::<S>(&x[here.clone()], &y[here]),
                            None => T::load::<S>(&x[here]),
                        };
                        // What it writes too much is the channels after, whose turn comes.
                        lane.store(&mut lanes[at..]);
                    }
                } else {
                    for (at, &place) in self.places.iter().enumerate() {
                        for i in 0..order.places() {
                            let read = |from: Option<&[T]>| from.map_or(T::zeroed(), |from| from[place]);
                            lanes[at * order.places() + i] = read(channel(i)).beside::<S>(read(second(i)));
                        }
                    }
                }
            }
        }
    }
}
