//! The forward pass: a head's queries in blocks, each block taking in the keys block by block with a running softmax.
//!
//! Source: Dao, Fu, Ermon, Rudra, Ré: FlashAttention (2022); Milakov, Gimelshein: Online normalizer calculation for
//! softmax (2018).

use phalanx_tensor::{Result, Tensor};

use super::Problem;
use super::operand::{Heads, Mask, padded, transpose};
use super::product::ROWS;
use super::tile::{self, KEYS, KeyBlock, QUERIES, Sizes};
use crate::real::Real;
use crate::simd::{Float, dispatch};

/// A part of one head's queries, worked on by one thread.
struct Part<'a, T: Real> {
    head: usize,
    first: usize,
    out: &'a mut [T],
    stats: &'a mut [T::Wide],
}

pub(super) fn run<T: Real>(
    op: &'static str,
    problem: Problem,
    [query, key, value]: [&Tensor; 3],
    mask: Option<&Tensor>,
    [out, stats]: [&mut Tensor; 2],
) -> Result<()> {
    let pool = query.device().pool()?;
    let mask = Mask::<T>::open(op, mask, &problem.scores_shape(query))?;
    let [query, key, value] = [query, key, value].map(|t| Heads::<T>::open(op, t));
    let inputs = [query?, key?, value?];
    let mut out = out.write::<T>(op)?;
    let mut stats = stats.write::<T::Wide>(op)?;
    // Blocks of queries do not depend on each other, so how a head is cut does not show in the bits.
    let cuts = (2 * pool.threads()).div_ceil(problem.heads.max(1));
    let cuts = if problem.heads >= 4 * pool.threads() { 1 } else { cuts };
    let size = problem.queries.div_ceil(cuts).next_multiple_of(QUERIES);
    let mut parts = Vec::new();
    let rows = |row: usize| (problem.queries * row).max(1);
    let outs = out.chunks_mut(rows(problem.value_depth));
    for (head, (out, stats)) in outs.zip(stats.chunks_mut(rows(2))).enumerate() {
        let outs = out.chunks_mut((size * problem.value_depth).max(1));
        let parted = outs.zip(stats.chunks_mut((size * 2).max(1))).enumerate();
        parts.extend(parted.map(|(i, (out, stats))| Part { head, first: i * size, out, stats }));
    }
    pool.for_each_chunk(&mut parts, 1, |_, parts| {
        parts.iter_mut().for_each(|part| part.run(&problem, &inputs, &mask));
    });
    Ok(())
}

impl<T: Real> Part<'_, T> {
    fn run(&mut self, problem: &Problem, [query, key, value]: &[Heads<'_, T>; 3], mask: &Mask<'_, T>) {
        let (depth_row, value_row) =
            (padded::<T::Wide>(problem.depth), padded::<T::Wide>(problem.value_depth));
        let zeros = |len: usize| vec![T::Wide::ZERO; len];
        let queries = self.stats.len() / 2;
        let seen = problem.keys_before(self.first + queries);
        let key_head = self.head / problem.group;
        let (mut keys, mut values) = (zeros((seen + ROWS) * depth_row), zeros((seen + ROWS) * value_row));
        key.rows(key_head, 0, seen, &mut keys, depth_row);
        value.rows(key_head, 0, seen, &mut values, value_row);
        let [mut rows, mut columns] = [zeros(QUERIES * depth_row), zeros(QUERIES * problem.depth)];
        let [mut scores, mut bias] = [zeros(KEYS * QUERIES), zeros(KEYS * QUERIES)];
        let mut sums = zeros(QUERIES * value_row);
        let scale = T::Wide::from_f64(problem.scale);
        for at in (0..queries).step_by(QUERIES) {
            let count = QUERIES.min(queries - at);
            let width = padded::<T::Wide>(count);
            let first = self.first + at;
            query.rows(self.head, first, count, &mut rows[..width * depth_row], depth_row);
            rows.iter_mut().for_each(|x| *x = *x * scale);
            transpose(&rows, depth_row, problem.depth, &mut columns, width);
            let (mut max, mut sum) = ([-T::Wide::INFINITY; QUERIES], [T::Wide::ZERO; QUERIES]);
            sums[..width * value_row].fill(T::Wide::ZERO);
            let end = problem.keys_before(first + count);
            for key in (0..end).step_by(KEYS) {
                let block = KEYS.min(end - key);
                let bias = mask.tile(problem, self.head, [first, count, width], [key, block], &mut bias);
                dispatch(tile::Forward {
                    sizes: Sizes {
                        keys: block,
                        width,
                        depth: problem.depth,
                        depth_row,
                        value_depth: problem.value_depth,
                        value_row,
                    },
                    block: KeyBlock {
                        keys: &keys[key * depth_row..],
                        values: &values[key * value_row..],
                        bias,
                    },
                    queries: &columns,
                    scores: &mut scores,
                    max: &mut max[..width],
                    sum: &mut sum[..width],
                    out: &mut sums[..width * value_row],
                });
            }
            let stats = self.stats[at * 2..].chunks_exact_mut(2);
            for (q, stats) in stats.take(count).enumerate() {
                let hidden = sum[q] == T::Wide::ZERO;
                let inverse = if hidden { T::Wide::ZERO } else { T::Wide::ONE / sum[q] };
                let base = if max[q] == -T::Wide::INFINITY { T::Wide::ZERO } else { max[q] };
                stats.copy_from_slice(&[base, inverse]);
                let out = &mut self.out[(at + q) * problem.value_depth..][..problem.value_depth];
                let sums = &sums[q * value_row..];
                out.iter_mut().zip(sums).for_each(|(to, &x)| *to = T::narrow(x * inverse));
            }
        }
    }
}
