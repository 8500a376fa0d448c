//! The forward pass: a head's queries in blocks, each block taking in the keys block by block with a running softmax.
//!
//! Source: Dao, Fu, Ermon, Rudra, Ré: FlashAttention (2022); Milakov, Gimelshein: Online normalizer calculation for
//! softmax (2018).

use phalanx_tensor::{Result, Tensor};

use super::Problem;
use super::dropout::Keep;
use super::operand::{Heads, Mask, carve, padded, store};
use super::tile::{self, Changes, Exponentials, KEYS, QUERIES};
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
        let [depth_row, value_row] = problem.rows::<T::Wide>();
        let seen = problem.keys_before(self.first + self.stats.len() / 2);
        let tile = |wanted: bool| if wanted { KEYS * QUERIES } else { 0 };
        let lens = [
            seen * depth_row,
            seen * value_row,
            QUERIES * depth_row,
            QUERIES * depth_row,
            QUERIES * value_row,
            tile(true),
            tile(!matches!(mask, Mask::None)),
            tile(keep.is_some()),
        ];
        carve(lens, |[keys, values, rows, columns, out, scores, bias, kept]| {
            let key_head = self.head / problem.group;
            inputs[1].rows(key_head, 0, seen, keys, depth_row);
            inputs[2].rows(key_head, 0, seen, values, value_row);
            let mut scratch = Scratch { keys, values, rows, columns, out, scores, bias, kept };
            for at in (0..self.stats.len() / 2).step_by(QUERIES) {
                self.block(problem, &inputs[0], (mask, keep), at, &mut scratch);
            }
        });
    }

    /// The block of queries from number `at` of this part on.
    fn block(
        &mut self,
        problem: &Problem,
        query: &Heads<'_, T>,
        (mask, keep): (&Mask<'_, T>, Option<&Keep>),
        at: usize,
        s: &mut Scratch<'_, T::Wide>,
    ) {
        let count = QUERIES.min(self.stats.len() / 2 - at);
        let (width, first) = (padded::<T::Wide>(count), self.first + at);
        let [depth_row, value_row] = problem.rows::<T::Wide>();
        let (rows, out) = (&mut s.rows[..width * depth_row], &mut s.out[..width * value_row]);
        query.rows(self.head, first, count, rows, depth_row);
        tile::scale_rows(rows, depth_row, &[T::Wide::from_f64(problem.scale); QUERIES]);
        dispatch(tile::Transpose { rows, row: depth_row, to: s.columns, width });
        let (mut max, mut sum) = ([-T::Wide::INFINITY; QUERIES], [T::Wide::ZERO; QUERIES]);
        let mut factors = [T::Wide::ONE; QUERIES];
        out.fill(T::Wide::ZERO);
        for tile in problem.tiles::<T::Wide>(self.head, first, count, KEYS) {
            let keys = (&s.keys[tile.key * depth_row..], depth_row);
            tile.products(keys, (s.columns, problem.depth), s.scores);
            dispatch(Exponentials {
                tile,
                changes: Changes {
                    bias: mask.tile(&tile, s.bias),
                    keep: keep.map(|k| k.tile(&tile, [problem.queries, problem.keys], s.kept)),
                },
                scores: s.scores,
                max: &mut max,
                sum: &mut sum,
                shrink: &mut factors,
            });
            if tile.key > 0 {
                tile::scale_rows(out, value_row, &factors);
            }
            tile.sum_keys(s.scores, (&s.values[tile.key * value_row..], value_row), out);
        }
        for (q, stats) in self.stats[at * 2..].chunks_exact_mut(2).take(count).enumerate() {
            factors[q] = if sum[q] == T::Wide::ZERO { T::Wide::ZERO } else { T::Wide::ONE / sum[q] };
            let base = if max[q] == -T::Wide::INFINITY { T::Wide::ZERO } else { max[q] };
            stats.copy_from_slice(&[base, factors[q]]);
        }
        tile::scale_rows(out, value_row, &factors);
        let to = &mut self.out[at * problem.value_depth..][..count * problem.value_depth];
        store(to, out, problem.value_depth, value_row);
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
