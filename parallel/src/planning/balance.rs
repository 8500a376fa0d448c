//! How many layers each stage gets, from what the layers cost: [`balance_by_time`] and [`balance_by_size`], both over
//! [`block_partition`]. Source: torchgpipe (arXiv:2004.09910), its `balance`.

use std::time::Duration;

use super::SizeConfig;
use super::profile::{sizes, times};
use crate::pipeline::gpipe::{Batch, Sequence};
use crate::{Error, Result};

/// The number of layers of each of `partitions` stages, so that a forward and a backward pass in train mode take about the same
/// time on every stage. All layers run one after the other, again and again until `budget` is over (torchgpipe: one second). The
/// shortest time of each layer counts. If the sample requires a gradient, it is computed too.
///
/// # Errors
/// If there are more partitions than layers, a parameter has a gradient already, the sample is on a device that
/// computes nothing, or a layer fails.
///
/// ```
/// # use std::time::Duration;
/// # use phalanx_nn::{LinearConfig, Scope, Tanh, autograd::Var};
/// # use phalanx_parallel::{pipeline::gpipe::Sequence, planning::balance_by_time};
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
    block_partition(&times(layers, &sample.into(), budget)?, partitions)
}

/// The number of layers of each of `partitions` stages, so that all stages need about the same memory. A layer needs the bytes
/// that the forward pass of a micro-batch keeps in train mode, and the bytes of its parameters times
/// [`SizeConfig::parameter_scale`]. The ledger counts the bytes, so a model can be balanced on a meta device without being in
/// memory. Nothing else may use the device meanwhile.
///
/// # Errors
/// If there are more partitions than layers, a parameter has a gradient already, there are no micro-batches or rows, the
/// scale is negative or not finite, or a layer fails.
pub fn balance_by_size(
    partitions: usize,
    layers: &Sequence,
    sample: impl Into<Batch>,
    config: SizeConfig,
) -> Result<Vec<usize>> {
    block_partition(&sizes(layers, &sample.into(), config)?, partitions)
}

/// Divides `costs` into `blocks` consecutive blocks of similar cost, and returns the number of elements of each block. If costs
/// are shifted and scaled to [0, 1], the largest block exceeds the smallest by at most 1. No block is empty.
///
/// Source: Bárány, Grinberg: Block partitions of sequences (arXiv:1308.2452). It begins with blocks of the same number of
/// elements. Then the smallest block takes an element from its neighbour on the side of the largest, until the condition holds.
/// Of several smallest blocks it must be the one closest to the largest; torchgpipe takes the first, and can end with a block
/// of negative length.
///
/// # Errors
/// If there are no blocks, or more than elements.
///
/// ```
/// # use phalanx_parallel::planning::block_partition;
/// assert_eq!(block_partition(&[1, 2, 3, 4, 5, 6], 2)?, [4, 2]);
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub fn block_partition(costs: &[u64], blocks: usize) -> Result<Vec<usize>> {
    if blocks == 0 || blocks > costs.len() {
        let why = format!("got {blocks} partitions of {} layers, wanted 1 to as many as layers", costs.len());
        return Err(Error::Config(format!("balance: {why}")));
    }
    // All arithmetic is in whole numbers: the 1 of the scaled costs is the largest cost minus the smallest.
    let (least, most) = costs.iter().fold((u64::MAX, 0), |(least, most), &c| (least.min(c), most.max(c)));
    let one = u128::from(most - least);
    let before: Vec<u128> = std::iter::once(0)
        .chain(costs.iter().scan(0, |sum, &cost| {
            *sum += u128::from(cost - least);
            Some(*sum)
        }))
        .collect();
    // Block i is cuts[i]..cuts[i + 1]. The paper begins with blocks of one size, the last one longer; from `even_piece`'s the search
    // would end with other blocks.
    let mut cuts: Vec<usize> = (0..blocks).map(|block| costs.len() / blocks * block).collect();
    cuts.push(costs.len());
    while let Some((smallest, largest)) = uneven(&before, &cuts, one) {
        match smallest < largest {
            true => cuts[smallest + 1] += 1,
            false => cuts[smallest] -= 1,
        }
    }
    Ok(cuts.windows(2).map(|block| block[1] - block[0]).collect())
}

/// The smallest block (of several the closest to the largest) and the largest, unless they differ by at most `one`.
fn uneven(before: &[u128], cuts: &[usize], one: u128) -> Option<(usize, usize)> {
    let size = |block: usize| before[cuts[block + 1]] - before[cuts[block]];
    let largest = (0..cuts.len() - 1).max_by_key(|&block| size(block))?;
    let smallest = (0..cuts.len() - 1).min_by_key(|&block| (size(block), block.abs_diff(largest)))?;
    (size(largest) > size(smallest) + one).then_some((smallest, largest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_cut_as_in_the_table() {
        let zeros_and_ones = [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1];
        let table: [(&[u64], &[usize]); 9] = [
            (&[1, 2, 3, 4, 5, 6], &[4, 2]),
            (&[6, 5, 4, 3, 2, 1], &[2, 4]),
            (&[0, 0], &[1, 1]),
            (&[42], &[1]),
            (&[7, 7, 7, 7, 7], &[1, 1, 3]),
            (&[u64::MAX, 0, u64::MAX, u64::MAX], &[1, 2, 1]),
            (&[8, 8, 3, 6, 0, 7, 5, 9, 8, 3, 8, 6], &[2, 2, 3, 2, 3]),
            // Where torchgpipe gives 10, 2, -2, 2.
            (&zeros_and_ones, &[3, 3, 4, 2]),
            (&[0, 0, 0, 0, 0, 0, 9], &[2, 2, 3]),
        ];
        for (costs, lengths) in table {
            assert_eq!(block_partition(costs, lengths.len()).unwrap(), lengths, "{costs:?}");
        }
    }

    #[test]
    fn no_blocks_and_more_blocks_than_elements_are_refused() {
        for (costs, blocks) in [(&[42][..], 0), (&[], 0), (&[], 1), (&[42], 2)] {
            let error = block_partition(costs, blocks).unwrap_err().to_string();
            assert!(error.contains(&format!("{blocks} partitions of {} layers", costs.len())), "{error}");
        }
    }

    #[test]
    fn every_element_is_in_a_block_and_blocks_differ_by_at_most_the_spread() {
        let mut state = 1_u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..20_000 {
            let (length, range) = (1 + draw(14) as usize, [2, 11, 100_000][draw(3) as usize]);
            let costs: Vec<u64> = (0..length).map(|_| draw(range)).collect();
            let blocks = 1 + draw(length as u64) as usize;
            let lengths = block_partition(&costs, blocks).unwrap();
            assert!(lengths.len() == blocks && !lengths.contains(&0), "{costs:?}: {lengths:?}");
            assert_eq!(lengths.iter().sum::<usize>(), length);
            let (least, most) = (*costs.iter().min().unwrap(), *costs.iter().max().unwrap());
            let mut rest = costs.iter();
            let size = |&n: &usize| rest.by_ref().take(n).map(|cost| cost - least).sum::<u64>();
            let sizes: Vec<u64> = lengths.iter().map(size).collect();
            let spread = sizes.iter().max().unwrap() - sizes.iter().min().unwrap();
            assert!(spread <= most - least, "{costs:?}: {lengths:?}");
        }
    }
}
