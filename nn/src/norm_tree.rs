//! The order in which the squares of a gradient's norm are added: a binary tree over blocks, the same however the gradient is sharded.
//!
//! ```text
//!     level 2              (0..4)                    a node of level l and index k covers blocks
//!     level 1        (0..2)      (2..4)              k * 2^l .. (k + 1) * 2^l, as far as there are any;
//!     level 0       0      1    2      3   4         it is its left half plus its right half, or the
//!                                                    left half alone where the right one is empty
//! ```
//! A block is 64 elements of a parameter in row-major order. A rank whose shard is cut at multiples of 64 sends the largest nodes
//! inside its shard ([`cover`]). A rank that has received all nodes adds them up to the root ([`joins`]).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// The sum of a whole parameter's blocks.
pub fn sum(blocks: &[f64]) -> f64 {
    let mut level = blocks.to_vec();
    while level.len() > 1 {
        level =
            level.chunks(2).map(|pair| pair.iter().copied().reduce(|a, b| a + b).unwrap_or(0.0)).collect();
    }
    level.first().copied().unwrap_or(0.0)
}

/// The largest nodes inside a shard of `count` blocks, the first of which is number `first`, from left to right, as
/// `(level, index)`.
pub fn cover(first: u64, count: u64) -> Vec<(u32, u64)> {
    let (mut at, end) = (first, first + count);
    let mut found = Vec::new();
    while at < end {
        // The largest node that begins here and ends inside.
        let fits = |level: &u32| at.is_multiple_of(1 << level) && at + (1 << level) <= end;
        let level = (0..63).rev().find(fits).unwrap_or(0);
        found.push((level, at >> level));
        at += 1 << level;
    }
    found
}

/// How to add nodes, given in any order, that cover a parameter of `total` blocks. The result has pairs of indices into `nodes`: the
/// second is added to the first, one pair after another. With them is the index of the sum, unless there are no blocks.
pub fn joins(nodes: &[(u32, u64)], total: u64) -> (Vec<(usize, usize)>, Option<usize>) {
    let mut levels: BTreeMap<(u32, u64), usize> = BTreeMap::new();
    let top = total.max(1).next_power_of_two().trailing_zeros();
    levels.extend(nodes.iter().enumerate().map(|(number, &node)| (node, number)));
    let mut pairs = Vec::new();
    for level in 0..top {
        let here: Vec<(u64, usize)> =
            levels.range((level, 0)..(level + 1, 0)).map(|(&(_, index), &number)| (index, number)).collect();
        for (index, number) in here {
            // In order of the index, so the left half comes first.
            match levels.entry((level + 1, index / 2)) {
                Entry::Vacant(parent) => drop(parent.insert(number)),
                Entry::Occupied(left) => pairs.push((*left.get(), number)),
            }
        }
    }
    (pairs, levels.get(&(top, 0)).copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(n: usize) -> Vec<f64> {
        (0..n).map(|i| 1.0 + (i as f64 * 0.37).sin() * 1e-3 + 1e-17 * i as f64).collect()
    }

    /// The sum of all blocks from those of nodes that cover them.
    fn root(blocks: &[f64], nodes: &[(u32, u64)]) -> f64 {
        let of = |&(level, index): &(u32, u64)| sum(&blocks[(index << level) as usize..][..1 << level]);
        let mut sums: Vec<f64> = nodes.iter().map(of).collect();
        let (pairs, root) = joins(nodes, blocks.len() as u64);
        pairs.into_iter().for_each(|(to, from)| sums[to] += sums[from]);
        root.map_or(0.0, |number| sums[number])
    }

    #[test]
    fn every_cut_gives_the_bits_of_the_whole() {
        for n in 0..40usize {
            let all = blocks(n);
            let whole = sum(&all);
            for a in 0..=n {
                for b in a..=n {
                    let cut = [0..a, a..b, b..n];
                    let nodes = cut.into_iter().flat_map(|r| cover(r.start as u64, r.len() as u64));
                    let root = root(&all, &nodes.collect::<Vec<_>>());
                    assert_eq!(root.to_bits(), whole.to_bits(), "{n} blocks cut at {a}, {b}");
                }
            }
        }
    }

    #[test]
    fn the_order_is_the_drawn_one() {
        let [a, b, c, d, e] = [1e16, 1.0, 1.0, 1.0, 1.0];
        assert_eq!(sum(&[a, b, c, d, e]), ((a + b) + (c + d)) + e);
        assert_eq!(cover(1, 4), [(0, 1), (1, 1), (0, 4)]);
        let (pairs, root) = joins(&[(0, 4), (0, 0), (0, 1), (1, 1)], 5);
        assert_eq!((pairs, root), (vec![(1, 2), (1, 3), (1, 0)], Some(1)));
        assert_eq!(joins(&[], 0), (vec![], None));
    }
}
