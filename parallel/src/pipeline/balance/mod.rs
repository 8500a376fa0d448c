//! How many layers each stage gets, from what the layers cost: [`balance_by_time`], [`balance_by_size`], and what both
//! stand on, [`block_partition`]. Source: torchgpipe (arXiv:2004.09910), its `balance`.
//!
//! A layer costs what it is seen to cost when it runs alone, on the device where it is. Models come out as they were: the
//! layers run on copies of their buffers, and gradients are asked for without a slot being touched. Skips work as in the plain
//! model.

mod block_partition;
mod profile;
mod sandbox;

use std::time::Duration;

pub use block_partition::block_partition;

use super::gpipe::{Batch, Sequence};
use crate::Result;

/// Layers for each of `partitions` stages, so that a forward and a backward pass in train mode take them about the same
/// time. All layers run one after the other, again and again until `budget` is over (torchgpipe: one second); of each layer
/// the shortest time counts. A sample that requires a gradient gets one.
///
/// # Errors
/// If there are more partitions than layers, a parameter has a gradient already, the sample is on a device that
/// computes nothing, or a layer fails.
///
/// ```
/// # use std::time::Duration;
/// # use phalanx_nn::{LinearConfig, Scope, Tanh, autograd::Var};
/// # use phalanx_parallel::pipeline::{balance::balance_by_time, gpipe::Sequence};
/// # use phalanx_tensor::{DType, Device};
/// let scope = Scope::new(7, DType::F32, Device::CPU);
/// let linear = |name: &str| LinearConfig::new(32, 32).init(&scope.child(name));
/// let model = Sequence::new().with(linear("a")?).with(Tanh {}).with(linear("b")?).with(Tanh {});
/// let sample = Var::from_slice(&[0.5f32; 64 * 32], &[64, 32], Device::CPU)?;
/// let balance = balance_by_time(2, &model, &sample, Duration::from_millis(10))?;
/// assert_eq!((balance.len(), balance.iter().sum::<usize>()), (2, 4));
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub fn balance_by_time(
    partitions: usize,
    layers: &Sequence,
    sample: impl Into<Batch>,
    budget: Duration,
) -> Result<Vec<usize>> {
    block_partition(&profile::times(layers, &sample.into(), budget)?, partitions)
}

/// What memory [`balance_by_size`] reckons with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SizeConfig {
    /// Micro-batches that the sample will be cut into.
    pub micro_batches: usize,
    /// How many times the parameters' bytes training needs: 2 with their gradients, 2 to 3 for SGD, 4 to 5 for Adam.
    pub parameter_scale: f64,
}

impl Default for SizeConfig {
    fn default() -> SizeConfig {
        SizeConfig { micro_batches: 1, parameter_scale: 2.0 }
    }
}

/// Layers for each of `partitions` stages, so that they need about the same memory: of each layer the bytes that the
/// forward pass of a micro-batch leaves in train mode, and its parameters' times [`SizeConfig::parameter_scale`]. The
/// bytes are those of the ledger, so a model on a meta device is balanced without being in memory; nothing else may use
/// the device meanwhile.
///
/// # Errors
/// If there are more partitions than layers, a parameter has a gradient already, there are no micro-batches or rows, the
/// scale is no positive number, or a layer fails.
pub fn balance_by_size(
    partitions: usize,
    layers: &Sequence,
    sample: impl Into<Batch>,
    config: SizeConfig,
) -> Result<Vec<usize>> {
    block_partition(&profile::sizes(layers, &sample.into(), config)?, partitions)
}

#[cfg(test)]
mod tests;
