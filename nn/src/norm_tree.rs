//! The order in which squares are added to a gradient's norm: a dyadic tree that no cut into shards changes.
//!
//! ```text
//!     level 2              (0..4)                    a node of level l and index k covers blocks
//!     level 1        (0..2)      (2..4)              k * 2^l .. (k + 1) * 2^l, as far as there are any;
//!     level 0       0      1    2      3   4         it is its left half plus its right half, or the
//!                                                    left half alone where the right one is empty
//! ```
//! A block is 64 elements of a parameter in row-major order. A shard that is cut at multiples of 64 sends the
//! largest nodes that lie inside it ([`nodes`]); whoever has all of them finishes the tree ([`root`]).

use std::collections::BTreeMap;

/// A node of the tree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TreeNode {
    /// Distance from the leaves.
    pub level: u32,
    /// Number among those of the level.
    pub index: u64,
    /// The sum below it.
    pub sum: f64,
}

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

/// The nodes of [`cover`] with their sums, of a shard that holds `blocks`.
pub fn nodes(first: u64, blocks: &[f64]) -> Vec<TreeNode> {
    let node = |(level, index): (u32, u64)| {
        let start = ((index << level) - first) as usize;
        TreeNode { level, index, sum: sum(&blocks[start..start + (1 << level)]) }
    };
    cover(first, blocks.len() as u64).into_iter().map(node).collect()
}

/// The sum of a parameter of `total` blocks from nodes that cover it.
pub fn root(all: impl IntoIterator<Item = TreeNode>, total: u64) -> f64 {
    let mut levels: BTreeMap<(u32, u64), f64> = BTreeMap::new();
    let top = total.max(1).next_power_of_two().trailing_zeros();
    levels.extend(all.into_iter().map(|node| ((node.level, node.index), node.sum)));
    for level in 0..top {
        let here: Vec<(u64, f64)> =
            levels.range((level, 0)..(level + 1, 0)).map(|(&(_, index), &sum)| (index, sum)).collect();
        for (index, sum) in here {
            let parent = levels.entry((level + 1, index / 2));
            // In order of the index, so the left half comes first.
            parent.and_modify(|left| *left += sum).or_insert(sum);
        }
    }
    levels.get(&(top, 0)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(n: usize) -> Vec<f64> {
        (0..n).map(|i| 1.0 + (i as f64 * 0.37).sin() * 1e-3 + 1e-17 * i as f64).collect()
    }

    #[test]
    fn every_cut_gives_the_bits_of_the_whole() {
        for n in 0..40usize {
            let all = blocks(n);
            let whole = sum(&all);
            for a in 0..=n {
                for b in a..=n {
                    let cut = [0..a, a..b, b..n];
                    let sent = cut.into_iter().flat_map(|r| nodes(r.start as u64, &all[r.clone()]));
                    assert_eq!(root(sent, n as u64).to_bits(), whole.to_bits(), "{n} blocks cut at {a}, {b}");
                }
            }
        }
    }

    #[test]
    fn the_order_is_the_drawn_one() {
        let [a, b, c, d, e] = [1e16, 1.0, 1.0, 1.0, 1.0];
        assert_eq!(sum(&[a, b, c, d, e]), ((a + b) + (c + d)) + e);
        let sent = nodes(1, &[b, c, d, e]);
        assert_eq!(sent.iter().map(|n| (n.level, n.index)).collect::<Vec<_>>(), [(0, 1), (1, 1), (0, 4)]);
    }
}
