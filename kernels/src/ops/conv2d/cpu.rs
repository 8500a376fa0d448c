//! Convolutions on a CPU, plain and transposed: packs the weights, chooses a way to compute, and runs it on the pool's threads.
//!
//! The usual way is implicit GEMM: packed weights times the source pixels under each
//! kernel element ([`super::implicit_gemm`]). The pixels are read in the source itself if its rows are as long as the
//! output's, else in a window (a padded copy of some rows): in place if a panel's points lie side by side there, else
//! gathered into panels. Small planes are multiplied many images at a time ([`super::batch_last`]). Few output channels are summed without
//! panels ([`super::thin`], [`super::depthwise`]). Each output is one chain of multiply-adds over channels and kernel elements, in the order of
//! [`super::window::StepOrder`], however the work is split. A transposed convolution inserts no zeros and scatters nothing.

use super::problem::{Correlation, OutputSplit, Summed};
use phalanx_tensor::{Result, Tensor};

use super::batch_last::{self, BatchLast};
use super::depthwise::{self, Depthwise};
use super::implicit_gemm::{ChannelBlock, SharedInputs};
use super::packed_weights::{PackedWeights, WeightPanels};
use super::thin::{self, Thin};
use super::window::{Axis, StepOrder};
use crate::gemm::{GemmElem, tile_shape};
use crate::scratch::with_scratch;

impl Correlation<'_> {
    /// Computes into `out`, contiguous, `[images, groups * channels_out, h, w]`.
    pub(super) fn run<T: GemmElem<Acc: Summed>>(&self, out: &mut Tensor) -> Result<()> {
        let shape: [usize; 4] = [0, 1, 2, 3].map(|d| out.shape()[d]);
        let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
        if numel == 0 {
            return Ok(());
        }
        let source = self.source.read::<T>(self.op)?;
        let weight = self.weight.read::<T>(self.op)?;
        let bias: Option<Vec<T::Acc>> = match self.bias {
            Some(bias) => Some(
                bias.read::<T>(self.op)?[bias.offset()..][..shape[1]].iter().map(|x| x.widen()).collect(),
            ),
            None => None,
        };
        let tile = tile_shape::<T::Acc>();
        let work =
            numel * self.channels_in * self.passes[0].iter().map(|axis| axis.taps.len()).product::<usize>();
        let split = OutputSplit::new(shape, self.groups, work, pool.threads());
        let thin = thin::unit(self, shape[0], pool.threads());
        let group = WeightPanels::new(self.channels_out, tile.rows, 1);
        let reads_offsets = thin.is_none() && group.rows_all(|rows| tile.reads_offsets(rows));
        let by_images = reads_offsets && batch_last::pays(self, shape[0], tile);
        let (unit, rows_max) = match thin {
            Some(unit) => (unit, thin::ROWS),
            None if by_images => (self.channels_out, tile.rows),
            None => (split.unit, tile.rows),
        };
        let order = if thin.is_some() { StepOrder::PLAIN } else { StepOrder::of::<T>(self.channels_in) };
        let planes = order.planes(self.channels_in);
        let panels = |[rows, cols]: &[Axis; 2]| {
            WeightPanels::new(unit, rows_max, planes * rows.taps.len() * cols.taps.len())
        };
        let panels: Vec<WeightPanels> = self.passes.iter().map(panels).collect();
        let elements = |panels: &WeightPanels| panels.elements(shape[1]);
        let elements: usize = panels.iter().map(elements).sum();
        let ledger = out.device().ledger()?;
        let _use = ledger.scratch_of(elements * size_of::<T::Acc>());
        let (source, bias) = (&source[self.source.offset()..], bias.as_deref());
        let out = &mut out.write::<T>(self.op)?[offset..offset + numel];
        with_scratch(elements, |mut rest| {
            let mut weights = Vec::new();
            for (pass, panels) in self.passes.iter().zip(&panels) {
                let (here, after) = rest.split_at_mut(panels.elements(shape[1]));
                self.pack(&weight[self.weight.offset()..], pass, order, *panels, (&pool, &mut *here));
                weights.push(PackedWeights { panels: *panels, data: here });
                rest = after;
            }
            if let Some(unit) = thin {
                let (weights, size) = (&weights[..], [shape[2], shape[3]]);
                let pixels = [2, 3].map(|d| self.source.shape()[d]);
                if self.groups >= depthwise::CHANNELS_MIN
                    && depthwise::pays(&self.passes, [self.channels_in, self.channels_out], pixels)
                {
                    return Depthwise { problem: self, source, bias, weights, size }.run(&pool, out);
                }
                return Thin { problem: self, source, bias, weights, size, unit }.run(&pool, out);
            }
            let shared = SharedInputs { source, bias, shape, tile, order };
            if by_images {
                let images = BatchLast { problem: self, shared: &shared, weights: &weights };
                let elements: usize = images.elements().iter().sum();
                let _use = ledger.scratch_of(elements * size_of::<T::Acc>());
                return images.run(&pool, out);
            }
            pool.for_each_chunk(out, split.chunk, |i, out| {
                let part = split.part(i);
                for (pass, &weights) in self.passes.iter().zip(&weights) {
                    for unit in part.channels.clone().step_by(split.unit) {
                        ChannelBlock {
                            problem: self,
                            shared: &shared,
                            pass,
                            weights,
                            first: unit,
                            part: &part,
                            split: &split,
                        }
                        .run(out);
                    }
                }
            });
        });
        Ok(())
    }
}
