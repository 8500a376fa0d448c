//! The chunks of a product that threads take in turns, and which panels of B they keep meanwhile.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use phalanx_tensor::Pool;

use super::plan::{BlockingPlan, SHARED_MAX};

/// Elements at most of a block of B with all of k that a thread keeps packed while all rows meet it.
const KEPT_B_MAX: usize = 1 << 20;
/// Fewer panels of columns than these, unless they are all, are not kept so: A would be packed too often.
const KEPT_COLS_MIN: usize = 16;

/// Bytes of one of the [`shares`] at least: a thread takes some microseconds for them, and much less to begin.
const PIECE_BYTES: usize = 64 << 10;

/// Panels of rows and of columns that a thread computes at a time, with all of k.
pub(super) struct Chunk {
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
}

/// The chunks of a range of columns. Its threads take them one after the other: first those of a block of columns, then the next block's.
pub(super) struct ChunkQueue {
    /// Whether a thread that takes several chunks keeps the block's packed panels of B, for all of k (or needs none).
    pub(super) keeps_b: bool,
    /// Whether all threads pack all panels of B together, before they multiply.
    pub(super) shares_packed_b: bool,
    /// Panels that a chunk has at most.
    pub(super) rows_max: usize,
    pub(super) cols_max: usize,
    rows: usize,
    pub(super) cols: Range<usize>,
    threads: usize,
    /// Panels of rows that are taken, counted through all blocks of columns.
    taken: AtomicUsize,
}

impl ChunkQueue {
    /// All rows of these panels of columns, for so many threads. If B is `kept` for further products, its panels are packed before,
    /// however many.
    pub(super) fn new(plan: &BlockingPlan, cols: Range<usize>, threads: usize, kept: bool) -> ChunkQueue {
        let kept_panels = |elements: usize| elements / (plan.shape.cols() * plan.problem.k).max(1);
        let packs_before = !plan.b_in_place && !plan.tiles_pack_b;
        let shares_packed_b = packs_before && (kept || threads > 1 && kept_panels(SHARED_MAX) >= cols.len());
        let kept_panels =
            if shares_packed_b || plan.b_in_place { cols.len() } else { kept_panels(KEPT_B_MAX) };
        let keeps_b = (threads > 1 || shares_packed_b) && kept_panels >= cols.len().min(KEPT_COLS_MIN);
        ChunkQueue {
            keeps_b,
            shares_packed_b,
            rows_max: if keeps_b { plan.row_block() } else { plan.row_panels.div_ceil(threads) }
                .min(plan.row_panels),
            cols_max: if keeps_b { kept_panels } else { plan.col_block() }.min(cols.len()),
            rows: plan.row_panels,
            cols,
            threads,
            taken: AtomicUsize::new(0),
        }
    }

    /// How many blocks of columns there are.
    pub(super) fn col_blocks(&self) -> usize {
        self.cols.len().div_ceil(self.cols_max.max(1))
    }

    /// Takes the next chunk; `None` if all are taken. Where threads keep B's panels, chunks get smaller as less is left, so
    /// that all threads end together (guided self-scheduling; Polychronopoulos and Kuck, 1987).
    pub(super) fn take(&self) -> Option<Chunk> {
        let all = self.rows * self.col_blocks();
        let end = |taken: usize| {
            let left = (all - taken) / (2 * self.threads);
            let len = if self.keeps_b { left.clamp(1, self.rows_max) } else { self.rows_max };
            taken + len.min(self.rows - taken % self.rows)
        };
        let more = |taken: usize| (taken < all).then(|| end(taken));
        let taken = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        let (row, col) = (taken % self.rows, self.cols.start + taken / self.rows * self.cols_max);
        Some(Chunk { rows: row..row + end(taken) - taken, cols: col..self.cols.end.min(col + self.cols_max) })
    }
}

/// Calls `run` with each piece, on the pool's threads or on this one.
pub(super) fn in_turns(pool: Option<&Pool>, pieces: usize, run: impl Fn(usize) + Sync) {
    match pool {
        Some(pool) if pieces > 1 => pool.for_each(pieces, run),
        _ => (0..pieces).for_each(run),
    }
}

/// Pieces of `0..len`, lines of so many `bytes` of which each is read once. A piece has `most` of them at most. For several threads pieces get shorter as
/// less is left, so that all threads end together (guided self-scheduling).
pub(crate) fn shares(
    threads: usize,
    len: usize,
    bytes: usize,
    most: usize,
) -> impl Iterator<Item = Range<usize>> + Clone + Sync {
    let least = PIECE_BYTES / bytes.max(1);
    let share = move |start: usize| {
        let left = len - start;
        let share = if threads > 1 { (left / (2 * threads)).max(least) } else { left };
        start..start + share.clamp(1, most).min(left)
    };
    let next = move |start: usize| (start < len).then(|| share(start));
    std::iter::successors(next(0), move |share| next(share.end))
}

/// Calls `run` with the [shares] of `0..len`, on the pool's threads or on this one.
pub(super) fn in_shares(
    pool: Option<&Pool>,
    len: usize,
    bytes: usize,
    most: usize,
    run: &(dyn Fn(Range<usize>) + Sync),
) {
    let shares = shares(pool.map_or(1, Pool::threads), len, bytes, most);
    in_turns(pool, shares.clone().count(), |piece| shares.clone().nth(piece).into_iter().for_each(run));
}

/// Lines of a matrix that is read once, in blocks: the first line of each, how far apart its lines are, and how many it has, `block` at most.
///
/// The lines of a block lie far apart, and those of the next block follow each of them. So memory is read in as many streams as a block has
/// lines, which is faster than one, and each of them goes on where it was. They are an odd number of lines apart, so that lines of a power of two
/// do not all fall into the same sets of the caches.
pub(super) fn far_apart(lines: usize, block: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let apart = (lines / block).saturating_sub(1) | 1;
    let far = if lines < block { 0 } else { apart };
    let near = (far * block..lines).step_by(block);
    (0..far)
        .map(move |first| (first, apart, block))
        .chain(near.map(move |first| (first, 1, block.min(lines - first))))
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::plan;
    use super::*;

    #[test]
    fn each_chunk_is_taken_once() {
        for (m, n, k, threads) in [
            (2048, 1024, 256, 2),
            (2048, 1024, 1700, 3),
            (150, 70, 4000, 2),
            (300, 2000, 9000, 4),
            (0, 5, 5, 2),
        ] {
            let plan = plan(m, n, k);
            let chunks = ChunkQueue::new(&plan, 1..plan.col_panels, threads, false);
            let mut seen = vec![0; plan.row_panels * plan.col_panels];
            let mut lens = Vec::new();
            while let Some(chunk) = chunks.take() {
                assert!(chunk.rows.len() <= chunks.rows_max && chunk.cols.len() <= chunks.cols_max);
                chunk.rows.clone().for_each(|row| {
                    chunk.cols.clone().for_each(|col| seen[row * plan.col_panels + col] += 1);
                });
                lens.push(chunk.rows.len());
            }
            let once = |panel: usize| usize::from(!panel.is_multiple_of(plan.col_panels));
            assert!(seen.iter().enumerate().all(|(panel, &times)| times == once(panel)), "{m} {n} {k}");
            assert!(!chunks.keeps_b || lens.last().is_none_or(|&len| len == 1));
        }
    }

    #[test]
    fn shares_are_each_line_once_and_small_at_the_end() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            let kib = 1 << 10;
            for (len, bytes, most) in [(0, kib, 9), (1, kib, 9), (7, 32 * kib, 3), (304, 28 * kib, 512)] {
                let least = PIECE_BYTES / bytes;
                let seen: Vec<_> = (0..len).map(|_| AtomicUsize::new(0)).collect();
                in_shares(Some(&pool), len, bytes, most, &|piece| {
                    assert!(!piece.is_empty() && piece.len() <= most);
                    assert!(threads == 1 || piece.len() >= least.min(most) || piece.end == len);
                    assert!(
                        threads == 1
                            || piece.len() <= ((len - piece.start) / (2 * threads)).max(least).max(1)
                    );
                    piece.for_each(|at| {
                        seen[at].fetch_add(1, Ordering::Relaxed);
                    });
                });
                assert!(seen.iter().all(|seen| seen.load(Ordering::Relaxed) == 1), "{len} for {threads}");
            }
        }
    }

    #[test]
    fn blocks_of_lines_far_apart_have_each_line_once() {
        for (lines, block) in
            [(0, 16), (5, 16), (16, 16), (47, 16), (64, 32), (97, 32), (896, 32), (2048, 16)]
        {
            let mut seen = vec![0; lines];
            for (first, apart, count) in far_apart(lines, block) {
                assert!(count == block || apart == 1, "{lines} by {block}: {count} of a block lie far apart");
                assert!(apart % 2 == 1);
                (0..count).for_each(|i| seen[first + i * apart] += 1);
            }
            assert!(seen.iter().all(|&times| times == 1), "{lines} by {block}");
        }
    }
}
