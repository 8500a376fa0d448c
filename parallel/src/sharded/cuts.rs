//! Where a flat buffer is cut into the shards of the ranks (the elements that each owns). Pure functions: no
//! communication.
//!
//! ```text
//! parameters   | a: 100         | b: 300                                      |     400 elements
//! even         |          rank 0: 228                |   rank 1: 172         |     b is cut at 128, not at 100
//! whole        | rank 1: a      | rank 0: b                                   |     laid out as b, a
//! ```

use std::ops::Range;

use phalanx_kernels::NORM_BLOCK;

/// How parameters are spread over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ownership {
    /// Every rank owns as many elements as the others, but for less than a block of 64 at each cut: parameters are cut
    /// at multiples of 64 elements, where sums of squares for the gradient's norm are cut too.
    #[default]
    Even,
    /// Every parameter is owned whole by one rank: one after the other goes to the rank that owns least. Source: the
    /// optimizer state sharding of FairScale, after Rajbhandari et al. (2020).
    Whole,
}

/// The order in which parameters lie in a buffer, and where the ranks' shards of it begin and end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// Numbers of the parameters.
    pub order: Vec<usize>,
    /// One more than there are ranks.
    pub bounds: Vec<usize>,
}

impl Cuts {
    /// For parameters of these many elements. `loads`, which is added to, counts the elements of other buffers
    /// that each rank owns.
    pub fn new(ownership: Ownership, elements: &[usize], loads: &mut [usize]) -> Cuts {
        match ownership {
            Ownership::Even => even(elements, loads),
            Ownership::Whole => whole(elements, loads),
        }
    }

    /// A rank's elements.
    pub fn range(&self, rank: usize) -> Range<usize> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// How many elements each rank owns.
    pub fn counts(&self) -> Vec<usize> {
        self.bounds.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }
}

/// Cuts near `total * rank / ranks`, at the nearest block of a parameter. It is no `even_piece`, whose cuts would lie inside blocks, so
/// that two ranks would have parts of one node of the norm's tree.
fn even(elements: &[usize], loads: &mut [usize]) -> Cuts {
    let (total, ranks) = (elements.iter().sum::<usize>(), loads.len());
    let mut bounds = vec![0];
    let (mut number, mut start) = (0, 0);
    for rank in 1..ranks {
        let target = (total as u128 * rank as u128 / ranks as u128) as usize;
        while number < elements.len() && start + elements[number] <= target {
            start += elements[number];
            number += 1;
        }
        let inside = target - start;
        let below = inside - inside % NORM_BLOCK;
        let above = (below + NORM_BLOCK).min(elements.get(number).copied().unwrap_or(below));
        bounds.push(start + if inside - below <= above - inside { below } else { above });
    }
    bounds.push(total);
    loads.iter_mut().zip(bounds.windows(2)).for_each(|(load, pair)| *load += pair[1] - pair[0]);
    Cuts { order: (0..elements.len()).collect(), bounds }
}

fn whole(elements: &[usize], loads: &mut [usize]) -> Cuts {
    let mut owned: Vec<Vec<usize>> = vec![Vec::new(); loads.len()];
    for (number, elements) in elements.iter().enumerate() {
        let least = (0..loads.len()).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        owned[least].push(number);
        loads[least] += elements;
    }
    let mut bounds = vec![0];
    for numbers in &owned {
        let shard: usize = numbers.iter().map(|&number| elements[number]).sum();
        bounds.push(bounds[bounds.len() - 1] + shard);
    }
    Cuts { order: owned.concat(), bounds }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bounds(ownership: Ownership, elements: &[usize], ranks: usize) -> Vec<usize> {
        Cuts::new(ownership, elements, &mut vec![0; ranks]).bounds
    }

    #[test]
    fn even_cuts_are_at_blocks_of_parameters() {
        for (elements, ranks, wanted) in [
            (&[400][..], 2, vec![0, 192, 400]),
            (&[100, 300], 2, vec![0, 228, 400]),
            (&[100, 300], 4, vec![0, 100, 228, 292, 400]),
            (&[64, 64], 2, vec![0, 64, 128]),
            (&[7], 3, vec![0, 0, 7, 7]),
            (&[], 2, vec![0, 0, 0]),
            (&[0, 10, 0], 1, vec![0, 10]),
            (&[129, 33, 1], 8, vec![0, 0, 64, 64, 64, 128, 128, 129, 163]),
        ] {
            let got = bounds(Ownership::Even, elements, ranks);
            assert_eq!(got, wanted, "{elements:?} over {ranks}");
        }
    }

    #[test]
    fn even_shards_differ_by_less_than_a_block() {
        for (ranks, seed) in (1..9).flat_map(|ranks| (0..50).map(move |seed| (ranks, seed))) {
            let elements: Vec<usize> =
                (0..1 + seed % 7).map(|i| (seed * 7919 + i * 104_729) % 1000).collect();
            let total: usize = elements.iter().sum();
            let cuts = Cuts::new(Ownership::Even, &elements, &mut vec![0; ranks]);
            assert_eq!(cuts.counts().iter().sum::<usize>(), total);
            for (rank, &bound) in cuts.bounds.iter().enumerate() {
                assert!(bound.abs_diff(total * rank / ranks) <= 32, "{elements:?} over {ranks}: {cuts:?}");
            }
        }
    }

    #[test]
    fn whole_parameters_go_to_the_rank_that_owns_least() {
        let mut loads = vec![0, 5];
        let cuts = Cuts::new(Ownership::Whole, &[10, 3, 4, 2], &mut loads);
        assert_eq!(cuts, Cuts { order: vec![0, 3, 1, 2], bounds: vec![0, 12, 19] });
        assert_eq!(loads, [12, 12]);
        let cuts = Cuts::new(Ownership::Whole, &[1, 7], &mut loads);
        assert_eq!(cuts, Cuts { order: vec![0, 1], bounds: vec![0, 1, 8] });
        let cuts = Cuts::new(Ownership::Whole, &[1, 7, 3], &mut [2, 0]);
        assert_eq!(cuts, Cuts { order: vec![2, 0, 1], bounds: vec![0, 3, 11] });
    }
}
