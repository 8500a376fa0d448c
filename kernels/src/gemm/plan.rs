//! How a product is cut: panels, blocks of k, who packs what, and the jobs threads share. Pure numbers; nothing here
//! can change a bit of the result.

use super::kernel::TileShape;
use std::ops::Range;

/// Steps of k after which a tile's sums go through memory, so that a panel of B stays in the first-level cache.
const STEPS_MAX: usize = 1024;
/// A job's size in panels at most: what it reads of A for one block of k fits the second-level cache.
const JOB_ROW_PANELS_MAX: usize = 14;
const JOB_COL_PANELS_MAX: usize = 64;
/// B is packed by the job that uses it, just before, if so few panels of rows use it.
const LOCAL_ROW_PANELS_MAX: usize = 3;
/// B is read where it lies if so few panels of rows use it.
const DIRECT_ROW_PANELS_MAX: usize = 2;
/// A is read where it lies, however that is, if so few panels of columns use it besides.
const DIRECT_COL_PANELS_MAX: usize = 2;
/// Addresses so far apart share the places of the first-level cache.
const CACHE_PERIOD_BYTES: usize = 4096;
/// Elements of A or B packed at a time.
const PACKED_ELEMENTS_MAX: usize = 1 << 23;
/// Multiplications below which starting threads costs more than it brings.
pub(super) const PARALLEL_WORK_MIN: usize = 1 << 19;

/// Where a tile finds an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operand {
    /// In the matrix itself.
    Direct,
    /// In a panel packed by the job for itself.
    Local,
    /// In panels packed for all jobs beforehand.
    Shared,
}

/// A product's shape and what is possible with its operands.
#[derive(Clone, Copy)]
pub(super) struct Problem {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Whether A's and B's elements are of the sums' type, so that a tile can read them.
    pub(super) readable: bool,
    /// Whether a panel of A's rows can be read in place without falling out of the cache, see [`rows_cache_well`].
    pub(super) a_cacheable: bool,
    /// Whether B's columns are next to each other.
    pub(super) b_contiguous: bool,
}

/// The cut.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    pub(super) problem: Problem,
    pub(super) shape: TileShape,
    pub(super) row_panels: usize,
    pub(super) col_panels: usize,
    pub(super) k_blocks: usize,
    pub(super) a: Operand,
    pub(super) b: Operand,
}

impl Plan {
    pub(super) fn new(problem: Problem, shape: TileShape) -> Plan {
        let row_panels = problem.m.div_ceil(shape.rows);
        let col_panels = problem.n.div_ceil(shape.cols());
        let direct_b = problem.readable && problem.b_contiguous && row_panels <= DIRECT_ROW_PANELS_MAX;
        let k_blocks = problem.k.div_ceil(STEPS_MAX).max(1);
        let tiny = col_panels <= DIRECT_COL_PANELS_MAX && row_panels <= DIRECT_ROW_PANELS_MAX;
        Plan {
            problem,
            shape,
            row_panels,
            col_panels,
            k_blocks,
            a: match problem.readable && (tiny || problem.a_cacheable && k_blocks == 1) {
                true => Operand::Direct,
                false => Operand::Shared,
            },
            b: match row_panels {
                _ if direct_b => Operand::Direct,
                0..=LOCAL_ROW_PANELS_MAX => Operand::Local,
                _ => Operand::Shared,
            },
        }
    }

    /// The rows of a panel: near-equal shares, so that no tile is much lower than the others.
    pub(super) fn rows(&self, panel: usize) -> Range<usize> {
        share(self.problem.m, self.row_panels, panel)
    }

    /// The columns of a panel: full tiles, then what is left.
    pub(super) fn cols(&self, panel: usize) -> Range<usize> {
        let width = self.shape.cols();
        panel * width..((panel + 1) * width).min(self.problem.n)
    }

    /// The vectors a panel of columns fills.
    pub(super) fn vectors(&self, panel: usize) -> usize {
        self.cols(panel).len().div_ceil(self.shape.lanes)
    }

    /// The steps of a block of k: near-equal shares too.
    pub(super) fn steps(&self, block: usize) -> Range<usize> {
        share(self.problem.k, self.k_blocks, block)
    }

    /// Panels of rows (columns) that are packed and worked on at a time; all of them unless packing all is too much.
    pub(super) fn row_chunk(&self) -> usize {
        chunk(self.a, self.row_panels, self.shape.rows * self.problem.k)
    }

    pub(super) fn col_chunk(&self) -> usize {
        chunk(self.b, self.col_panels, self.shape.cols() * self.problem.k)
    }

    /// Into how many jobs so many panels of rows and columns are cut.
    pub(super) fn jobs(&self, row_panels: usize, col_panels: usize, threads: usize) -> (usize, usize) {
        let mut rows = row_panels.div_ceil(JOB_ROW_PANELS_MAX);
        let mut cols = col_panels.div_ceil(JOB_COL_PANELS_MAX);
        let wanted = if threads == 1 { 1 } else { 4 * threads };
        while rows * cols < wanted {
            let cut_rows = rows < row_panels && self.b != Operand::Local;
            let wider = col_panels * self.shape.cols() * rows >= row_panels * self.shape.rows * cols;
            if cols < col_panels && (wider || !cut_rows) {
                cols = (2 * cols).min(col_panels);
            } else if cut_rows {
                rows = (2 * rows).min(row_panels);
            } else {
                break;
            }
        }
        (rows, cols)
    }

    /// Whether the product is worth more than one thread.
    pub(super) fn is_parallel(&self) -> bool {
        let Problem { m, n, k, .. } = self.problem;
        m.saturating_mul(n).saturating_mul(k) >= PARALLEL_WORK_MIN
    }
}

/// Whether the rows of a panel, read side by side along k, keep out of each other's way in the cache: they are near, and
/// not a multiple of the cache's period apart.
pub(super) fn rows_cache_well(row_stride: usize, step_stride: usize, k: usize, element_bytes: usize) -> bool {
    step_stride == 1
        && row_stride <= 2 * k
        && !(row_stride * element_bytes).is_multiple_of(CACHE_PERIOD_BYTES)
}

/// The `part`-th of `parts` near-equal shares of `0..total`.
pub(crate) fn share(total: usize, parts: usize, part: usize) -> Range<usize> {
    let (size, longer) = (total / parts, total % parts);
    let start = |part: usize| part * size + part.min(longer);
    start(part)..start(part + 1)
}

fn chunk(operand: Operand, panels: usize, panel_elements: usize) -> usize {
    match operand {
        Operand::Shared => (PACKED_ELEMENTS_MAX / panel_elements.max(1)).clamp(1, panels.max(1)),
        _ => panels.max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(m: usize, n: usize, k: usize) -> Plan {
        let problem = Problem { m, n, k, readable: true, a_cacheable: k != 1024, b_contiguous: true };
        Plan::new(problem, TileShape { rows: 14, lanes: 16 })
    }

    #[test]
    fn panels_cover_rows_columns_and_steps_once() {
        for (m, n, k) in [(1, 1, 1), (14, 32, 384), (15, 33, 385), (256, 256, 2048), (1000, 17, 777)] {
            let plan = plan(m, n, k);
            let join = |ranges: Vec<Range<usize>>| ranges.into_iter().flatten().collect::<Vec<_>>();
            assert_eq!(
                join((0..plan.row_panels).map(|p| plan.rows(p)).collect()),
                (0..m).collect::<Vec<_>>()
            );
            assert_eq!(
                join((0..plan.col_panels).map(|p| plan.cols(p)).collect()),
                (0..n).collect::<Vec<_>>()
            );
            assert_eq!(join((0..plan.k_blocks).map(|b| plan.steps(b)).collect()), (0..k).collect::<Vec<_>>());
            assert!((0..plan.row_panels).all(|p| (1..=14).contains(&plan.rows(p).len())));
            assert!((0..plan.col_panels).all(|p| (1..=2).contains(&plan.vectors(p))));
        }
    }

    #[test]
    fn small_products_are_not_packed_and_large_ones_are() {
        let tiny = plan(16, 16, 16);
        assert_eq!((tiny.a, tiny.b, tiny.is_parallel()), (Operand::Direct, Operand::Direct, false));
        let middle = plan(512, 512, 512);
        assert_eq!((middle.a, middle.b, middle.is_parallel()), (Operand::Direct, Operand::Shared, true));
        let large = plan(2048, 2048, 2048);
        assert_eq!((large.a, large.b, large.is_parallel()), (Operand::Shared, Operand::Shared, true));
        let problem = Problem { b_contiguous: false, ..plan(8, 512, 512).problem };
        assert_eq!(Plan::new(problem, TileShape { rows: 14, lanes: 16 }).b, Operand::Local);
    }

    #[test]
    fn two_threads_get_several_jobs_each_and_one_thread_no_more_than_it_must() {
        assert_eq!(plan(256, 256, 256).jobs(19, 8, 1), (2, 1));
        assert_eq!(plan(256, 256, 256).jobs(19, 8, 2), (4, 2));
        assert_eq!(plan(1, 32, 32).jobs(1, 1, 8), (1, 1));
    }
}
