//! The forward pass on a CPU. Heads are cut into tasks of some queries each ([`QueryPart`]); a task takes its queries in blocks, and each block meets
//! the keys block by block with an online softmax (`tile.rs`).

use phalanx_tensor::{Result, Tensor};

use super::Problem;
use super::dropout::Keep;
use super::operand::{HeadLayout, Heads, Mask, Rows, padded_queries, store, with_slices};
use super::tile::{self, Exponentials, KEYS, QUERIES, ScoreChanges, Tile};
use crate::gemm::SubMatMut;
use crate::real::Real;
use crate::simd::{Float, dispatch};

/// Tasks for each thread, if there are so many heads.
pub(super) const PIECES: usize = 16;

/// A task: some queries of one head, with the parts of the results that they write.
struct QueryPart<'a, T: Real> {
    head: usize,
    first: usize,
    out: SubMatMut<'a, T>,
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
    let (layout, mut out) = HeadLayout::open::<T>(op, out)?;
    let mut stats = stats.write::<T::Wide>(op)?;
    // Blocks of queries do not depend on each other, so the cut changes no bit.
    let cuts = (2 * pool.threads()).div_ceil(problem.heads.max(1));
    let cuts = if problem.heads >= 4 * pool.threads() { 1 } else { cuts };
    let size = problem.queries.div_ceil(cuts).next_multiple_of(QUERIES).max(1);
    let places =
        (0..problem.heads).flat_map(|head| (0..problem.queries).step_by(size).map(move |at| (head, at)));
    let heads = stats.chunks_mut(problem.queries.max(1) * 2);
    let stats = heads.flat_map(|stats| stats.chunks_mut(size * 2));
    let parts = places.zip(layout.row_blocks(&mut out, size)).zip(stats);
    let mut parts: Vec<_> =
        parts.map(|(((head, first), out), stats)| QueryPart { head, first, out, stats }).collect();
    let together = (parts.len() / (PIECES * pool.threads())).max(1);
    pool.for_each_chunk(&mut parts, together, |_, parts| {
        parts.iter_mut().for_each(|part| part.run(&problem, &inputs, &mask, keep));
    });
    Ok(())
}

impl<T: Real> QueryPart<'_, T> {
    fn run(
        &mut self,
        problem: &Problem,
        inputs: &[Heads<'_, T>; 3],
        mask: &Mask<'_, T>,
        keep: Option<&Keep>,
    ) {
        let [depth_row, value_row] = problem.rows::<T::Wide>();
        let seen = problem.keys_before(self.first + self.out.rows());
        let tile = |wanted: bool| if wanted { KEYS * QUERIES } else { 0 };
        let by_tiles = self.out.rows() <= QUERIES;
        let [whole, of_tile] = if by_tiles { [0, seen.min(KEYS)] } else { [seen, 0] };
        let lens = [
            inputs[1].room(whole),
            inputs[2].room(whole),
            inputs[1].room(of_tile).max(inputs[2].room(of_tile)),
            QUERIES * depth_row,
            QUERIES * depth_row,
            QUERIES * value_row,
            tile(true),
            2 * tile(!matches!(mask, Mask::None)), // the second half is for the rows that a mask's tile is transposed from
            tile(keep.is_some()),
        ];
        with_slices(lens, |[keys, values, tile_rows, rows, columns, out, scores, bias, kept]| {
            let key_head = self.head / problem.group;
            let head_rows = |heads, room| match by_tiles {
                true => HeadRows::ByTiles { heads, head: key_head },
                false => HeadRows::Whole(Heads::rows(heads, key_head, 0, [seen; 2], room)),
            };
            let (keys, values) = (head_rows(&inputs[1], keys), head_rows(&inputs[2], values));
            let mut scratch =
                ForwardBuffers { keys, values, tile_rows, rows, columns, out, scores, bias, kept };
            let mut at = 0;
            while at < self.out.rows() {
                at += self.block(problem, &inputs[0], (mask, keep), at, &mut scratch);
            }
        });
    }

    /// Computes the block of queries from number `at` of this part on. Returns how many they are.
    fn block(
        &mut self,
        problem: &Problem,
        query: &Heads<'_, T>,
        (mask, keep): (&Mask<'_, T>, Option<&Keep>),
        at: usize,
        s: &mut ForwardBuffers<'_, T>,
    ) -> usize {
        let [_, value_row] = problem.rows::<T::Wide>();
        let first = self.first + at;
        let (count, seen) = mask.block(self.head, first, self.out.rows() - at);
        let width = padded_queries::<T::Wide>(count);
        let rows = query.rows(self.head, first, [count, width], s.rows);
        dispatch(tile::Transpose { rows, factor: T::Wide::from_f64(problem.scale), to: s.columns, width });
        let out = &mut s.out[..width * value_row];
        let (mut max, mut sum) = ([-T::Wide::INFINITY; QUERIES], [T::Wide::ZERO; QUERIES]);
        let mut factors = [T::Wide::ONE; QUERIES];
        out.fill(T::Wide::ZERO);
        let by_rows = count <= tile::few_queries::<T::Wide>() && !problem.causal && keep.is_none();
        for tile in problem.tiles::<T::Wide>(self.head, [first, count], seen, KEYS) {
            let tile = Tile { by_rows, ..tile };
            tile.products(s.keys.of(&tile, s.tile_rows), (s.columns, problem.depth), s.scores);
            Exponentials {
                tile,
                changes: ScoreChanges {
                    bias: mask.tile(&tile, s.bias),
                    keep: keep.map(|k| k.tile(&tile, [problem.queries, problem.keys], s.kept)),
                },
                scores: s.scores,
                max: &mut max,
                sum: &mut sum,
                shrink: &mut factors,
            }
            .compute();
            if tile.key > seen {
                tile::scale_rows(out, value_row, &factors);
            }
            tile.sum_keys(s.scores, s.values.of(&tile, s.tile_rows), out);
        }
        for (q, stats) in self.stats[at * 2..].chunks_exact_mut(2).take(count).enumerate() {
            factors[q] = if sum[q] == T::Wide::ZERO { T::Wide::ZERO } else { T::Wide::ONE / sum[q] };
            let base = if max[q] == -T::Wide::INFINITY { T::Wide::ZERO } else { max[q] };
            stats.copy_from_slice(&[base, factors[q]]);
        }
        tile::scale_rows(out, value_row, &factors);
        store(&mut self.out, at, &out[..count * value_row], value_row);
        count
    }
}

/// The rows of a key head, widened: all at once, or tile by tile where about one block of queries meets them, as in decoding. A tile stays in the
/// caches, where all rows of a long text would go by way of memory; keys and then values in the same place.
enum HeadRows<'a, T: Real> {
    Whole(Rows<'a, T::Wide>),
    ByTiles { heads: &'a Heads<'a, T>, head: usize },
}

impl<T: Real> HeadRows<'_, T> {
    /// The rows from a tile's first key on.
    fn of<'b>(&'b self, tile: &Tile, room: &'b mut [T::Wide]) -> Rows<'b, T::Wide> {
        match self {
            HeadRows::Whole(rows) => rows.from(tile.key),
            HeadRows::ByTiles { heads, head } => heads.rows(*head, tile.key, [tile.keys; 2], room),
        }
    }
}

/// Scratch memory of a task.
struct ForwardBuffers<'a, T: Real> {
    keys: HeadRows<'a, T>,
    values: HeadRows<'a, T>,
    /// For the rows of one tile.
    tile_rows: &'a mut [T::Wide],
    rows: &'a mut [T::Wide],
    columns: &'a mut [T::Wide],
    out: &'a mut [T::Wide],
    scores: &'a mut [T::Wide],
    bias: &'a mut [T::Wide],
    kept: &'a mut [T::Wide],
}
