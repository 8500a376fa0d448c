//! [`Permutation`]: a shuffled order that is computed place by place, so that no list of it is kept.

use phalanx_tensor::{RngKey, Stream4};

/// The draws of the data, apart from those of every parameter and layer.
const SITE: u64 = 0x6461_7461;

/// The numbers `0 .. count` in an order that is drawn anew for each epoch. Every place is computed by itself, in constant memory.
///
/// It is a Feistel network over the next even power of two, walked until it comes back inside. Lanes from 1 on of the
/// stream are its own; lane 0 is free for others.
/// Source: Black and Rogaway: Ciphers with arbitrary finite domains (2002).
#[derive(Clone, Debug)]
pub struct Permutation {
    count: u64,
    stream: Stream4,
}

impl Permutation {
    /// Orders of `0 .. count`, drawn from `stream`. There is no order of nothing: a count of 0 is taken for 1.
    pub fn new(count: u64, stream: Stream4) -> Permutation {
        Permutation { count: count.max(1), stream }
    }

    /// The orders of `count` items of a run's data, as its seed draws them.
    pub fn of_data(count: u64, seed: u64) -> Permutation {
        Permutation::new(count, RngKey { seed, step: 0 }.site(SITE))
    }

    /// How many numbers are ordered.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The draws that the order is made of.
    pub fn stream(&self) -> &Stream4 {
        &self.stream
    }

    /// The number at place `index` of the epoch's order.
    ///
    /// # Panics
    /// If `index` is not below the count.
    pub fn at(&self, epoch: u64, index: u64) -> u64 {
        assert!(index < self.count, "Permutation: got place {index}, wanted one below {}", self.count);
        let half = (64 - (self.count - 1).leading_zeros()).div_ceil(2).max(1);
        let mask = (1u64 << half) - 1;
        let mut place = index;
        loop {
            let (mut left, mut right) = (place >> half, place & mask);
            for round in 0..4 {
                let [word, ..] = self.stream.block(epoch, 1 + round + (right << 3));
                (left, right) = (right, left ^ (u64::from(word) & mask));
            }
            place = (left << half) | right;
            if place < self.count {
                return place;
            }
        }
    }

    /// The epoch of a sample that is counted over all epochs, and the number that the epoch's order has at its place.
    pub fn draw(&self, sample: u64) -> (u64, u64) {
        let (epoch, index) = (sample / self.count, sample % self.count);
        (epoch, self.at(epoch, index))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_epoch_has_every_number_once(count in 1u64..3000, seed: u64, epoch: u64) {
            let order = Permutation::of_data(count, seed);
            let mut seen: Vec<u64> = (0..count).map(|index| order.at(epoch, index)).collect();
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..count));
        }

        #[test]
        fn different_places_of_a_huge_count_have_different_numbers(count in 1u64 << 40.., index: u64, step in 1u64..1000) {
            let order = Permutation::of_data(count, 1);
            let (a, b) = (index % count, (index % count + step) % count);
            let (x, y) = (order.at(0, a), order.at(0, b));
            prop_assert!(x < count && y < count && x != y);
        }
    }

    #[test]
    fn every_small_count_and_every_count_beside_a_power_of_two_is_a_permutation() {
        for count in (1..70).chain([127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097]) {
            let order = Permutation::of_data(count, 3);
            let mut seen: Vec<u64> = (0..count).map(|index| order.at(5, index)).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn epochs_and_seeds_have_orders_of_their_own_and_repeat() {
        let order = |seed: u64, epoch: u64| -> Vec<u64> {
            let order = Permutation::of_data(50, seed);
            (0..50).map(|index| order.at(epoch, index)).collect()
        };
        assert_eq!(order(1, 2), order(1, 2));
        assert!(order(1, 2) != order(1, 3) && order(1, 2) != order(2, 2));
        assert!(!order(1, 0).into_iter().eq(0..50));
    }

    #[test]
    fn samples_are_counted_over_epochs() {
        let order = Permutation::of_data(7, 4);
        assert_eq!(order.draw(16), (2, order.at(2, 2)));
        assert_eq!(Permutation::of_data(0, 4).draw(3), (3, 0));
    }

    #[test]
    #[should_panic(expected = "got place 7, wanted one below 7")]
    fn a_place_outside_is_a_panic_and_no_endless_walk() {
        Permutation::of_data(7, 4).at(0, 7);
    }
}
