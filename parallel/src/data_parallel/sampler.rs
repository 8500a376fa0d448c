//! [`DistributedSampler`]: which samples of a data set a rank draws in an epoch.

use phalanx_nn::{Error, Result};
use phalanx_tensor::{PhiloxStream, RngKey};

/// How the shuffled indices of an epoch are divided among the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SampleSplit {
    /// Rank r of R takes places r, r + R, r + 2 R, .. (PyTorch's).
    #[default]
    Strided,
    /// Rank r takes the r-th run of places, so that the ranks' draws side by side are the epoch's order.
    Blocks,
}

/// The draws of the sampler, apart from those of parameters, layers and token windows.
const SITE: u64 = 0x7361_6d70;

/// The samples of a data set that one of several ranks draws, the same number for every rank.
///
/// The order of an epoch is a function of (seed, epoch), equal on all ranks; the ranks' samples are disjoint. Where the ranks
/// do not divide the number of samples, the order is filled up by repeating its beginning, or cut with `drop_last`.
///
/// ```
/// use phalanx_parallel::data_parallel::DistributedSampler;
/// let sampler = DistributedSampler::new(5, 2, 1).unwrap();
/// assert_eq!(sampler.indices(0), [1, 3, 0]);
/// ```
#[derive(Clone, Debug)]
pub struct DistributedSampler {
    samples: usize,
    ranks: usize,
    rank: usize,
    shuffle: Option<u64>,
    split: SampleSplit,
    drop_last: bool,
}

impl DistributedSampler {
    /// The samples of rank `rank` among `ranks`, of a data set of `samples`: in order, strided, filled up.
    ///
    /// # Errors
    /// If there is no such rank.
    pub fn new(samples: usize, ranks: usize, rank: usize) -> Result<DistributedSampler> {
        if rank >= ranks {
            return Err(Error::invalid("sampler", format!("rank {rank} of {ranks}, wanted one below it")));
        }
        Ok(DistributedSampler {
            samples,
            ranks,
            rank,
            shuffle: None,
            split: SampleSplit::Strided,
            drop_last: false,
        })
    }

    /// With an order drawn for each epoch.
    #[must_use]
    pub fn shuffled(self, seed: u64) -> DistributedSampler {
        DistributedSampler { shuffle: Some(seed), ..self }
    }

    /// With the indices divided in this way.
    #[must_use]
    pub fn with_split(self, split: SampleSplit) -> DistributedSampler {
        DistributedSampler { split, ..self }
    }

    /// The former name of [`DistributedSampler::with_split`].
    #[deprecated(since = "0.1.0", note = "renamed to `with_split`")]
    #[must_use]
    pub fn with_share(self, split: SampleSplit) -> DistributedSampler {
        self.with_split(split)
    }

    /// Leaves out the samples at the end that are too few for all ranks.
    #[must_use]
    pub fn drop_last(self) -> DistributedSampler {
        DistributedSampler { drop_last: true, ..self }
    }

    /// Samples of each rank.
    pub fn len(&self) -> usize {
        if self.drop_last { self.samples / self.ranks } else { self.samples.div_ceil(self.ranks) }
    }

    /// Whether no rank draws anything.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// This rank's samples of an epoch, in the order in which it draws them.
    pub fn indices(&self, epoch: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.samples).collect();
        if let Some(seed) = self.shuffle {
            shuffle(&mut order, RngKey { seed, step: epoch }.site(SITE));
        }
        let place = |i: usize| match self.split {
            SampleSplit::Strided => i * self.ranks + self.rank,
            SampleSplit::Blocks => self.rank * self.len() + i,
        };
        (0..self.len()).map(|i| order[place(i) % self.samples]).collect()
    }
}

/// Fisher and Yates's shuffle.
fn shuffle(order: &mut [usize], stream: PhiloxStream) {
    for last in (1..order.len()).rev() {
        let [low, high, ..] = stream.block(last as u64, 0);
        let word = u64::from(low) | (u64::from(high) << 32);
        // The high half of the product: as even as 64 bits allow.
        let place = (u128::from(word) * (last as u128 + 1)) >> 64;
        order.swap(last, place as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_samples_are_disjoint_cover_everything_and_are_as_long_as_each_other() {
        for (samples, ranks) in [(0, 1), (1, 3), (7, 1), (7, 2), (8, 4), (10, 3), (100, 7)] {
            for split in [SampleSplit::Strided, SampleSplit::Blocks] {
                let sampler = |rank| DistributedSampler::new(samples, ranks, rank).unwrap().with_split(split);
                let all: Vec<Vec<usize>> = (0..ranks).map(|r| sampler(r).shuffled(3).indices(1)).collect();
                assert!(all.iter().all(|own| own.len() == samples.div_ceil(ranks)));
                let mut seen: Vec<usize> = all.into_iter().flatten().collect();
                seen.sort_unstable();
                seen.dedup();
                assert_eq!(seen, (0..samples).collect::<Vec<_>>());
                let cut: Vec<usize> =
                    (0..ranks).flat_map(|r| sampler(r).drop_last().shuffled(3).indices(1)).collect();
                let mut once = cut.clone();
                once.sort_unstable();
                once.dedup();
                assert_eq!((once.len(), cut.len()), (cut.len(), samples / ranks * ranks));
            }
        }
    }

    #[test]
    fn the_order_is_that_of_pytorch_unshuffled_and_blocks_follow_each_other() {
        let sampler = |rank| DistributedSampler::new(7, 3, rank).unwrap();
        let strided: Vec<_> = (0..3).map(|r| sampler(r).indices(0)).collect();
        assert_eq!(strided, [[0, 3, 6], [1, 4, 0], [2, 5, 1]]);
        let blocks: Vec<_> = (0..3).map(|r| sampler(r).with_split(SampleSplit::Blocks).indices(0)).collect();
        assert_eq!(blocks, [[0, 1, 2], [3, 4, 5], [6, 0, 1]]);
    }

    #[test]
    fn epochs_and_seeds_differ_and_repeat() {
        let draw = |seed, epoch| DistributedSampler::new(50, 1, 0).unwrap().shuffled(seed).indices(epoch);
        assert_eq!(draw(1, 2), draw(1, 2));
        assert!(draw(1, 2) != draw(1, 3) && draw(1, 2) != draw(2, 2));
        let refused = DistributedSampler::new(5, 2, 2).err().unwrap().to_string();
        assert!(refused.contains("rank 2 of 2"), "{refused}");
    }
}
