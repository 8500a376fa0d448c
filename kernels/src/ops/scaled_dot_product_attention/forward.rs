//! The forward pass: a head's queries in blocks, each block taking in the keys block by block with a running softmax.
//!
//! Source: Dao, Fu, Ermon, Rudra, Ré: FlashAttention (2022); Milakov, Gimelshein: Online normalizer calculation for
//! softmax (2018).

use phalanx_tensor::{Result, Tensor};

use super::Problem;
use super::dropout::Keep;
use super::operand::{Heads, Mask, carve, padded};
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
    keep: Option<&Keep>,
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
        parts.iter_mut().for_each(|part| part.run(&problem, &inputs, &mask, keep));
    });
    Ok(())
}

impl<T: Real> Part<'_, T> {
    fn run(
        &mut self,
        problem: &Problem,
        inputs: &[Heads<'_, T>; 3],
        mask: &Mask<'_, T>,
        keep: Option<&Keep>,
    ) {
        let sizes = problem.sizes::<T::Wide>();
        let seen = problem.keys_before(self.first + self.stats.len() / 2);
        let lens = [
            (seen + ROWS) * sizes.depth_row,
            (seen + ROWS) * sizes.value_row,
            QUERIES * sizes.depth_row,
            QUERIES * sizes.depth_row,
            QUERIES * sizes.value_row,
            KEYS * QUERIES,
            KEYS * QUERIES,
            if keep.is_some() { KEYS * QUERIES } else { 0 },
        ];
        carve(lens, |[keys, values, rows, columns, out, scores, bias, kept]| {
            let key_head = self.head / problem.group;
            inputs[1].rows(key_head, 0, seen, keys, sizes.depth_row);
            inputs[2].rows(key_head, 0, seen, values, sizes.value_row);
            let mut scratch = Scratch { keys, values, rows, columns, out, scores, bias, kept };
            for at in (0..self.stats.len() / 2).step_by(QUERIES) {
                self.block(problem, sizes, &inputs[0], (mask, keep), at, &mut scratch);
            }
        });
    }

    /// The block of queries from number `at` of this part on.
    fn block(
        &mut self,
        problem: &Problem,
        sizes: Sizes,
        query: &Heads<'_, T>,
        (mask, keep): (&Mask<'_, T>, Option<&Keep>),
        at: usize,
        s: &mut Scratch<'_, T::Wide>,
    ) {
        let count = QUERIES.min(self.stats.len() / 2 - at);
        let (width, first) = (padded::<T::Wide>(count), self.first + at);
        let Sizes { depth_row, value_row, .. } = sizes;
        let rows = &mut s.rows[..width * depth_row];
        query.rows(self.head, first, count, rows, depth_row);
        let scale = T::Wide::from_f64(problem.scale);
        rows.iter_mut().for_each(|x| *x = *x * scale);
        dispatch(tile::Transpose { rows, row: depth_row, to: s.columns, width });
        let (mut max, mut sum) = ([-T::Wide::INFINITY; QUERIES], [T::Wide::ZERO; QUERIES]);
        let out = &mut s.out[..width * value_row];
        out.fill(T::Wide::ZERO);
        let end = problem.keys_before(first + count);
        for key in (0..end).step_by(KEYS) {
            let keys = KEYS.min(end - key);
            let bias = mask.tile(problem, self.head, [first, count, width], [key, keys], s.bias);
            let keep = keep.map(|k| {
                k.tile(self.head, [problem.queries, problem.keys], [first, count, width], [key, keys], s.kept)
            });
            dispatch(tile::Forward {
                sizes: Sizes { keys, width, ..sizes },
                block: KeyBlock {
                    keys: &s.keys[key * depth_row..],
                    values: &s.values[key * value_row..],
                    bias,
                    keep,
                },
                queries: s.columns,
                scores: s.scores,
                max: &mut max[..width],
                sum: &mut sum[..width],
                out,
            });
        }
        for (q, stats) in self.stats[at * 2..].chunks_exact_mut(2).take(count).enumerate() {
            let hidden = sum[q] == T::Wide::ZERO;
            let inverse = if hidden { T::Wide::ZERO } else { T::Wide::ONE / sum[q] };
            let base = if max[q] == -T::Wide::INFINITY { T::Wide::ZERO } else { max[q] };
            stats.copy_from_slice(&[base, inverse]);
            let row = &mut out[q * value_row..][..problem.value_depth];
            row.iter_mut().for_each(|x| *x = *x * inverse);
            T::narrow_all(row, &mut self.out[(at + q) * problem.value_depth..][..problem.value_depth]);
        }
    }
}

/// A thread's working memory.
struct Scratch<'a, T> {
    keys: &'a [T],
    values: &'a [T],
    rows: &'a mut [T],
    columns: &'a mut [T],
    out: &'a mut [T],
    scores: &'a mut [T],
    bias: &'a mut [T],
    kept: &'a mut [T],
}
