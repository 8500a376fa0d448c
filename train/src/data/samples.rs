//! [`Samples`]: an endless sequence of samples, each a function of its number; [`Shuffled`] and [`Ordered`], data sets as sequences;
//! [`Blend`], a mixture of sequences.

use std::sync::Arc;

use phalanx_parallel::Content;
use phalanx_tensor::{RngKey, Tensor};

use super::dataset::stack;
use super::{Dataset, Permutation, wrong};
use crate::Result;

/// An endless sequence of samples. A sample is a function of its number, so any thread, rank or resumed run reads any of them by itself.
pub trait Samples: Send + Sync {
    /// The tensors of sample `number`, counted over all epochs, without a batch dimension, on a CPU device.
    ///
    /// # Errors
    /// If it cannot be read.
    fn sample(&self, number: u64) -> Result<Vec<Tensor>>;

    /// The sample's name in errors.
    fn name(&self, number: u64) -> String {
        format!("sample {number}")
    }

    /// Makes a batch of samples; see [`Dataset::collate`].
    ///
    /// # Errors
    /// If the samples do not fit each other.
    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        stack(items)
    }

    /// What the samples are made of; see [`Dataset::contents`].
    fn contents(&self) -> Vec<Content> {
        Vec::new()
    }

    /// How often the sample counts in the mean loss, if samples count unlike often: a conversation as often as its answers have tokens.
    /// Either all samples have such a number or none has; without it each counts as often as [`Data::counted`](super::Data::counted) says.
    fn counted(&self, _number: u64) -> Option<usize> {
        None
    }
}

macro_rules! forward {
    ($($pointer:ident),*) => {$(
        impl<S: Samples + ?Sized> Samples for $pointer<S> {
            fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
                (**self).sample(number)
            }

            fn name(&self, number: u64) -> String {
                (**self).name(number)
            }

            fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
                (**self).collate(items)
            }

            fn contents(&self) -> Vec<Content> {
                (**self).contents()
            }

            fn counted(&self, number: u64) -> Option<usize> {
                (**self).counted(number)
            }
        }
    )*};
}

forward!(Arc, Box);

/// The items of a data set, epoch after epoch, each epoch in an order that is drawn by (seed, epoch).
#[derive(Clone, Debug)]
pub struct Shuffled<D> {
    dataset: D,
    order: Permutation,
}

impl<D: Dataset> Shuffled<D> {
    /// All items once an epoch.
    ///
    /// # Errors
    /// If there are none.
    pub fn new(dataset: D, seed: u64) -> Result<Shuffled<D>> {
        let order = Permutation::of_data(some_items(&dataset)?, seed);
        Ok(Shuffled { dataset, order })
    }
}

/// The items of a data set in their own order, epoch after epoch.
#[derive(Clone, Debug)]
pub struct Ordered<D> {
    dataset: D,
    count: u64,
}

impl<D: Dataset> Ordered<D> {
    /// All items once an epoch.
    ///
    /// # Errors
    /// If there are none.
    pub fn new(dataset: D) -> Result<Ordered<D>> {
        Ok(Ordered { count: some_items(&dataset)?, dataset })
    }

    /// Items an epoch.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    fn epoch_and_item(&self, number: u64) -> (u64, u64) {
        (number / self.count, number % self.count)
    }
}

/// The number of items, or an error if there are none.
fn some_items(dataset: &impl Dataset) -> Result<u64> {
    match dataset.len() {
        0 => Err(wrong("Dataset", "got one without items, wanted at least one item")),
        len => Ok(len as u64),
    }
}

fn name((epoch, item): (u64, u64)) -> String {
    format!("item {item} in epoch {epoch}")
}

impl<D: Dataset> Samples for Shuffled<D> {
    fn counted(&self, number: u64) -> Option<usize> {
        self.dataset.counted(self.order.draw(number).1 as usize)
    }

    fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
        let (epoch, item) = self.order.draw(number);
        self.dataset.item(item as usize, epoch)
    }

    fn name(&self, number: u64) -> String {
        name(self.order.draw(number))
    }

    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        self.dataset.collate(items)
    }

    fn contents(&self) -> Vec<Content> {
        self.dataset.contents()
    }
}

impl<D: Dataset> Samples for Ordered<D> {
    fn counted(&self, number: u64) -> Option<usize> {
        self.dataset.counted(self.epoch_and_item(number).1 as usize)
    }

    fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
        let (epoch, item) = self.epoch_and_item(number);
        self.dataset.item(item as usize, epoch)
    }

    fn name(&self, number: u64) -> String {
        name(self.epoch_and_item(number))
    }

    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        self.dataset.collate(items)
    }

    fn contents(&self) -> Vec<Content> {
        self.dataset.contents()
    }
}

/// Samples of several sources by weight. Each source's samples are taken one after the other, so a source goes on drawing without
/// replacement, epoch after epoch of its own, whatever its weight is.
///
/// Samples come in blocks of 1,000 (more if a weight is so small that its source would have none in that many). After any number n of
/// whole blocks, a source of weight w (all weights being 1 together) has yielded w n samples, rounded down or up. The order inside a
/// block is drawn by (seed, block). Any sample is found by its number in constant memory.
pub struct Blend {
    sources: Vec<Box<dyn Samples>>,
    /// 2^60 together.
    weights: Vec<u64>,
    /// Of a block.
    order: Permutation,
}

/// Samples of a block at least.
const BLOCK_MIN: u64 = 1000;
/// Samples of a block at most. The smallest weight decides how many a block needs.
const BLOCK_MAX: u64 = 1 << 40;
/// The sum of all weights.
const WHOLE: u64 = 1 << 60;
/// The site of the mixture's random draws.
const SITE: u64 = 0x626c_656e;

impl Blend {
    /// The sources, each with its weight, which need not add up to 1. A source of weight 0 is never drawn.
    ///
    /// # Errors
    /// If a weight is negative or not finite, none is above 0, or one is less than 2^-40 of all; if the samples of some sources count
    /// unlike often ([`Samples::counted`]), and those of others do not.
    pub fn new(sources: Vec<(Box<dyn Samples>, f64)>, seed: u64) -> Result<Blend> {
        let (sources, weights): (Vec<_>, Vec<f64>) = sources.into_iter().unzip();
        let sum: f64 = weights.iter().sum();
        if weights.iter().any(|w| !w.is_finite() || *w < 0.0) || !(sum > 0.0 && sum.is_finite()) {
            let why =
                format!("got the weights {weights:?}, wanted finite numbers from 0 up, one of them above 0");
            return Err(wrong("Blend", why));
        }
        let unlike = sources.iter().filter(|source| source.counted(0).is_some()).count();
        if unlike > 0 && unlike < sources.len() {
            let got = format!("got {unlike} of {} sources whose samples count unlike often", sources.len());
            return Err(wrong("Blend", format!("{got}, such as conversations, wanted all or none of them")));
        }
        let fixed = fixed_point(&weights, sum);
        let smallest = fixed.iter().zip(&weights).filter(|(_, w)| **w > 0.0).map(|(&w, _)| w).min();
        // Every source with a weight has a sample in each block, so counts never go back from one block to the next.
        let block = WHOLE.div_ceil(smallest.unwrap_or(WHOLE).max(1)).max(BLOCK_MIN);
        if block > BLOCK_MAX {
            return Err(wrong(
                "Blend",
                format!("got the weights {weights:?}, wanted none below 2^-40 of all but 0"),
            ));
        }
        let order = Permutation::new(block, RngKey { seed, step: 0 }.site(SITE));
        Ok(Blend { sources, weights: fixed, order })
    }

    /// Samples of a block.
    pub fn block(&self) -> u64 {
        self.order.count()
    }

    /// The source of a sample, and the sample's number in that source.
    pub fn draw(&self, sample: u64) -> (usize, u64) {
        let (block, mut place) = self.order.draw(sample);
        let before = self.counts(block);
        let after = self.counts(block + 1);
        for (source, (before, after)) in before.into_iter().zip(after).enumerate() {
            match place.checked_sub(after - before) {
                None => return (source, before + place),
                Some(rest) => place = rest,
            }
        }
        unreachable!("the counts of a block add up to its samples")
    }

    /// How many samples each source has yielded before `block`: its weight's share rounded down, and one more for those with the
    /// largest remainders, so that the sum is right.
    fn counts(&self, block: u64) -> Vec<u64> {
        let all = u128::from(block) * u128::from(self.block());
        let share = |&weight: &u64| u128::from(weight) * all;
        let mut counts: Vec<u64> =
            self.weights.iter().map(|w| (share(w) / u128::from(WHOLE)) as u64).collect();
        let missing = all as u64 - counts.iter().sum::<u64>();
        let mut by_remainder: Vec<usize> = (0..counts.len()).collect();
        by_remainder
            .sort_by_key(|&source| std::cmp::Reverse(share(&self.weights[source]) % u128::from(WHOLE)));
        by_remainder.iter().take(missing as usize).for_each(|&source| counts[source] += 1);
        counts
    }
}

/// The weights in fixed point, with the sum 2^60. The largest weight takes the rounding error.
fn fixed_point(weights: &[f64], sum: f64) -> Vec<u64> {
    let mut fixed: Vec<u64> = weights.iter().map(|w| ((w / sum * WHOLE as f64) as u64).min(WHOLE)).collect();
    let total: u64 = fixed.iter().sum();
    if let Some(largest) = (0..fixed.len()).max_by_key(|&i| fixed[i]) {
        fixed[largest] = (fixed[largest] + WHOLE).saturating_sub(total);
    }
    fixed
}

impl Samples for Blend {
    fn counted(&self, number: u64) -> Option<usize> {
        let (source, number) = self.draw(number);
        self.sources[source].counted(number)
    }

    fn contents(&self) -> Vec<Content> {
        self.sources.iter().flat_map(Samples::contents).collect()
    }

    fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
        let (source, number) = self.draw(number);
        self.sources[source].sample(number)
    }

    fn name(&self, number: u64) -> String {
        let (source, own) = self.draw(number);
        format!("sample {number}, from source {source}: {}", self.sources[source].name(own))
    }

    fn collate(&self, items: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        // There is a source, since a weight is above 0.
        self.sources[0].collate(items)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::scratch::numbers;
    use super::*;

    #[test]
    fn a_shuffled_epoch_has_every_item_once_and_the_next_is_another() {
        let samples = Shuffled::new(numbers(30), 5).unwrap();
        let epoch = |e: u64| -> Vec<i64> {
            (e * 30..e * 30 + 30).map(|n| samples.sample(n).unwrap()[0].item().unwrap()).collect()
        };
        let mut sorted = epoch(2);
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..30));
        assert_ne!(epoch(0), epoch(1));
        assert_eq!(samples.name(31), format!("item {} in epoch 1", epoch(1)[1]));
    }

    #[test]
    fn ordered_items_come_in_order_and_again() {
        let samples = Ordered::new(numbers(3)).unwrap();
        let values: Vec<i64> = (0..7).map(|n| samples.sample(n).unwrap()[0].item().unwrap()).collect();
        assert_eq!(values, [0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(samples.name(5), "item 2 in epoch 1");
    }

    #[test]
    fn a_data_set_without_items_is_refused() {
        let why = "Dataset: got one without items, wanted at least one item";
        assert_eq!(Shuffled::new(numbers(0), 0).err().unwrap().to_string(), why);
        assert_eq!(Ordered::new(numbers(0)).err().unwrap().to_string(), why);
    }

    /// Yields its own number and that of the sample.
    struct Numbered(i64);

    impl Samples for Numbered {
        fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
            Ok(vec![Tensor::from_slice(&[self.0, number as i64], &[2], super::super::HOST)?])
        }
    }

    fn blend(weights: &[f64], seed: u64) -> Result<Blend> {
        let source = |(i, &w): (usize, &f64)| (Box::new(Numbered(i as i64)) as Box<dyn Samples>, w);
        Blend::new(weights.iter().enumerate().map(source).collect(), seed)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn counts_are_within_1_of_the_weights_and_every_sample_of_a_source_comes_once(
            weights in prop::collection::vec(0.01f64..10.0, 1..6), seed: u64, first in 0u64..1_000_000,
        ) {
            let blend = blend(&weights, seed).unwrap();
            let sum: f64 = weights.iter().sum();
            let block = blend.block();
            let (before, after) = (blend.counts(first), blend.counts(first + 2));
            for (i, weight) in weights.iter().enumerate() {
                let exact = weight / sum * (first * block) as f64;
                prop_assert!((before[i] as f64 - exact).abs() < 1.0 + 1e-6 * exact.max(1.0) / 1e3, "{} {exact}", before[i]);
            }
            let mut drawn: Vec<(usize, u64)> = (first * block..(first + 2) * block).map(|n| blend.draw(n)).collect();
            drawn.sort_unstable();
            let wanted = (0..weights.len()).flat_map(|i| (before[i]..after[i]).map(move |n| (i, n)));
            prop_assert!(drawn.into_iter().eq(wanted));
        }
    }

    #[test]
    fn the_first_blocks_have_the_quotas_of_the_largest_remainders() {
        let blend = blend(&[1.0, 1.0, 1.0], 0).unwrap();
        assert_eq!(blend.block(), 1000);
        assert_eq!(blend.counts(0), [0, 0, 0]);
        assert_eq!(blend.counts(1).iter().sum::<u64>(), 1000);
        assert!(blend.counts(1).iter().all(|&n| n == 333 || n == 334));
        assert_eq!(blend.counts(3), [1000, 1000, 1000]);
        let uneven = super::tests::blend(&[0.7, 0.2, 0.1], 0).unwrap();
        assert_eq!(uneven.counts(1), [700, 200, 100]);
        assert_eq!(uneven.counts(7), [4900, 1400, 700]);
    }

    #[test]
    fn a_small_weight_makes_longer_blocks_and_no_weight_is_never_drawn() {
        let blend = blend(&[1.0, 0.0, 1e-4], 3).unwrap();
        assert!((10_000..=10_002).contains(&blend.block()), "{}", blend.block());
        let from = |source| (0..3 * blend.block()).filter(|&n| blend.draw(n).0 == source).count();
        assert_eq!((from(1), from(2)), (0, 3));
        // Counts never go back, wherever they stand.
        for block in (0..2000).chain(1 << 40..(1 << 40) + 2000) {
            let (before, after) = (blend.counts(block), blend.counts(block + 1));
            assert!(before.iter().zip(&after).all(|(a, b)| a <= b), "{block}");
        }
    }

    #[test]
    fn samples_are_found_by_number_and_orders_differ_from_block_to_block_and_seed_to_seed() {
        let one = blend(&[0.5, 0.5], 1).unwrap();
        let sources = |blend: &Blend, block: u64| -> Vec<usize> {
            (block * 1000..block * 1000 + 1000).map(|n| blend.draw(n).0).collect()
        };
        assert_eq!(sources(&one, 4), sources(&one, 4));
        assert_ne!(sources(&one, 4), sources(&one, 5));
        assert_ne!(sources(&one, 4), sources(&blend(&[0.5, 0.5], 2).unwrap(), 4));
        let (source, own) = one.draw(123_456_789);
        assert_eq!(one.sample(123_456_789).unwrap()[0].to_vec::<i64>().unwrap(), [source as i64, own as i64]);
        assert_eq!(one.name(123_456_789), format!("sample 123456789, from source {source}: sample {own}"));
    }

    #[test]
    fn weights_that_make_no_sense_are_refused() {
        for weights in
            [vec![], vec![0.0], vec![1.0, -0.5], vec![f64::NAN], vec![f64::INFINITY, 1.0], vec![f64::MAX; 2]]
        {
            let error = blend(&weights, 0).err().unwrap().to_string();
            assert!(error.starts_with("Blend: got the weights"), "{error}");
        }
        let error = blend(&[1.0, 1e-15], 0).err().unwrap().to_string();
        assert!(error.contains("none below 2^-40"), "{error}");
    }
}
