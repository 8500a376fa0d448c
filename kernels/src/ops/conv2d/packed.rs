//! A convolution's weights, in panels as tiles read them.

use phalanx_tensor::Pool;

use super::axis::Axis;
use super::cpu::Correlation;
use super::{Cut, Summed};
use crate::gemm::share;
use crate::real::Real;

/// Packed weights: `count` panels a unit of channels, `len` elements apart.
pub(super) struct Packed<V> {
    pub(super) panels: Vec<V>,
    pub(super) count: usize,
    len: usize,
    /// Rows of a panel at most.
    pub(super) rows: usize,
    pub(super) steps: usize,
}

impl<V> Packed<V> {
    /// Whether `f` is true of the rows of all panels of a unit of so many channels.
    pub(super) fn rows_all(&self, channels: usize, f: impl Fn(usize) -> bool) -> bool {
        (0..self.count).all(|panel| f(share(channels, self.count, panel).len()))
    }

    /// A panel of a unit of so many channels, and its rows.
    pub(super) fn panel(&self, unit: usize, panel: usize, channels: usize) -> (&[V], usize) {
        let rows = share(channels, self.count, panel).len();
        (&self.panels[(unit * self.count + panel) * self.len..][..self.steps * rows], rows)
    }
}

impl Correlation<'_> {
    /// The weight's elements of a pass, in panels of output channels: `[panel][channel, row, column][channel of panel]`.
    pub(super) fn pack<T: Real<Wide: Summed>>(
        &self,
        weight: &[T],
        [rows, cols]: &[Axis; 2],
        rows_max: usize,
        cut: &Cut,
        pool: &Pool,
    ) -> Packed<T::Wide> {
        let count = cut.unit.div_ceil(rows_max);
        let steps = self.channels_in * rows.taps.len() * cols.taps.len();
        let rows_here = cut.unit.div_ceil(count);
        let len = steps * rows_here;
        let mut panels = vec![
            <T::Wide as crate::simd::Float>::ZERO;
            len * count * (self.groups * self.channels_out / cut.unit)
        ];
        let [group_stride, out_stride, in_stride, row_stride, col_stride] = self.weight_strides;
        pool.for_each_chunk(&mut panels, len.max(1), |i, panel| {
            let range = share(cut.unit, count, i % count);
            for (j, row) in range.clone().enumerate() {
                let channel = i / count * cut.unit + row;
                let at =
                    channel / self.channels_out * group_stride + channel % self.channels_out * out_stride;
                let mut slots = panel[j..].iter_mut().step_by(range.len());
                for c in 0..self.channels_in {
                    for y in &rows.taps {
                        for x in &cols.taps {
                            let from = at + c * in_stride + y.kernel * row_stride + x.kernel * col_stride;
                            if let Some(slot) = slots.next() {
                                *slot = weight[from].widen();
                            }
                        }
                    }
                }
            }
        });
        Packed { panels, count, len, rows: rows_here, steps }
    }
}
