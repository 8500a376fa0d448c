//! The parts of a job, which its threads take in turns. Pure numbers and a count.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::plan::Plan;

/// Elements of a block of B with all of its k at most, that is held while rows pass along it.
const HELD_B_MAX: usize = 1 << 20;
/// And at most of all of B that is packed before, once for all threads.
const SHARED_B_MAX: usize = 1 << 21;
/// Fewer panels of columns than these, unless they are all, are not held so: A would be packed too often.
const HELD_COLS_MIN: usize = 16;

/// Panels of rows and of columns that one thread works on, with all of k.
pub(super) struct Part {
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
}

/// The parts of a job, which its threads take in turns: first all of a block of columns, then the next block's.
pub(super) struct Parts {
    /// Whether a thread that takes several parts keeps the block's panels of B, for all of k (or needs none).
    pub(super) holds_b: bool,
    /// Whether all panels of B are packed before, together.
    pub(super) shares_b: bool,
    /// Panels that a part has at most.
    pub(super) rows_max: usize,
    pub(super) cols_max: usize,
    rows: usize,
    pub(super) cols: Range<usize>,
    threads: usize,
    /// Panels of rows that are taken, counted on through all blocks of columns.
    taken: AtomicUsize,
}

impl Parts {
    /// All rows, and these panels of columns, for so many threads. If B is `kept`, its panels are packed before, however many.
    pub(super) fn new(plan: &Plan, cols: Range<usize>, threads: usize, kept: bool) -> Parts {
        let held = |elements: usize| elements / (plan.shape.cols() * plan.problem.k).max(1);
        let packs_before = !plan.b_direct && !plan.keeps_b;
        let shares_b = packs_before && (kept || threads > 1 && held(SHARED_B_MAX) >= cols.len());
        let held = if shares_b || plan.b_direct { cols.len() } else { held(HELD_B_MAX) };
        let holds_b = (threads > 1 || shares_b) && held >= cols.len().min(HELD_COLS_MIN);
        Parts {
            holds_b,
            shares_b,
            rows_max: if holds_b { plan.row_block() } else { plan.row_panels.div_ceil(threads) }
                .min(plan.row_panels),
            cols_max: if holds_b { held } else { plan.col_block() }.min(cols.len()),
            rows: plan.row_panels,
            cols,
            threads,
            taken: AtomicUsize::new(0),
        }
    }

    /// A part that is from now on the caller's. Parts of held columns are the smaller the less there is left, so that all
    /// threads end together (guided self-scheduling; Polychronopoulos and Kuck, 1987).
    pub(super) fn take(&self) -> Option<Part> {
        let all = self.rows * self.cols.len().div_ceil(self.cols_max.max(1));
        let end = |taken: usize| {
            let left = (all - taken) / (2 * self.threads);
            let len = if self.holds_b { left.clamp(1, self.rows_max) } else { self.rows_max };
            taken + len.min(self.rows - taken % self.rows)
        };
        let more = |taken: usize| (taken < all).then(|| end(taken));
        let taken = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        let (row, col) = (taken % self.rows, self.cols.start + taken / self.rows * self.cols_max);
        Some(Part { rows: row..row + end(taken) - taken, cols: col..self.cols.end.min(col + self.cols_max) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::plan;
    use super::Parts;

    #[test]
    fn each_part_is_taken_once() {
        for (m, n, k, threads) in [
            (2048, 1024, 256, 2),
            (2048, 1024, 1700, 3),
            (150, 70, 4000, 2),
            (300, 2000, 9000, 4),
            (0, 5, 5, 2),
        ] {
            let plan = plan(m, n, k);
            let parts = Parts::new(&plan, 1..plan.col_panels, threads, false);
            let mut seen = vec![0; plan.row_panels * plan.col_panels];
            let mut lens = Vec::new();
            while let Some(part) = parts.take() {
                assert!(part.rows.len() <= parts.rows_max && part.cols.len() <= parts.cols_max);
                part.rows.clone().for_each(|row| {
                    part.cols.clone().for_each(|col| seen[row * plan.col_panels + col] += 1);
                });
                lens.push(part.rows.len());
            }
            let once = |panel: usize| usize::from(!panel.is_multiple_of(plan.col_panels));
            assert!(seen.iter().enumerate().all(|(panel, &times)| times == once(panel)), "{m} {n} {k}");
            assert!(!parts.holds_b || lens.last().is_none_or(|&len| len == 1));
        }
    }
}
