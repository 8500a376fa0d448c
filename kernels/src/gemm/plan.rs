//! The blocking of a product: sizes of panels and blocks, and which operands are packed. Numbers only; nothing here can change a bit of the
//! result. `product.rs` makes a [`BlockingPlan`], `macro_kernel.rs` follows it.
//!
//! C's columns are cut into ranges. The threads of a range take its rows chunk by chunk (`chunks.rs`), so that a slower thread takes fewer.
//! Each thread packs for itself what its tiles do not pack: blocks of A, a panel of which stays in the L1 cache while it meets each panel of B's
//! block, and blocks of B unless all threads pack B together before (after Goto and van de Geijn, "Anatomy of High-Performance Matrix
//! Multiplication", 2008, with a B that outgrows the L2 cache).

use std::ops::Range;

use phalanx_tensor::even_piece;

use super::tile::{FEW_ROWS, TileShape, can_pack};
use crate::simd::LANES_MAX;

/// Steps of k in a block at most (kc): two panels of A of so many steps fit the L1 cache.
const STEPS_MAX: usize = 512;
/// Elements of A's block at most (mc kc): it fits the L2 cache.
const A_BLOCK_MAX: usize = 1 << 16;
/// Elements of B's block at most (kc nc). It may lie in the L3 cache, because it is read in order and prefetched. A is packed again for each
/// of B's blocks.
const B_BLOCK_MAX: usize = 1 << 19;
/// Elements of A's block at most if all panels of A are to meet a panel of B as soon as it is packed: it fits a large L2 cache. Twice as many if
/// there is one block of k, so that C is touched once.
const A_BLOCK_BY_PANEL_MAX: usize = 1 << 18;
/// Steps of k in a block at most then: the panel of B fits the L2 cache, too.
const STEPS_BY_PANEL_MAX: usize = 1 << 10;
/// Steps at least, unless k has fewer: each block reads and writes all of C.
const STEPS_BY_PANEL_MIN: usize = 384;
/// With up to this many panels of rows, B is read in place and not packed.
const DIRECT_ROW_PANELS_MAX: usize = 6;
/// With up to this many panels of rows, a B whose columns lie along k is transposed in registers; each panel of rows does it again.
const TRANSPOSED_ROW_PANELS_MAX: usize = 2;
/// A is read in place, whatever its strides, if at most so many panels of columns use it and rows are few too.
const DIRECT_COL_PANELS_MAX: usize = 2;
/// A is read in place, or copied as rows, if at most so many panels of columns use it. A step of a tile then takes an addition a row to find its
/// elements, which with more panels is dearer than to turn A into panels once.
const ROWS_COL_PANELS_MAX: usize = 7;
/// Both are read in place if neither has more elements than this: then they stay in the L1 cache.
const DIRECT_ELEMENTS_MAX: usize = 1 << 12;
/// An A whose rows are neighbours is read in place if it has no more elements than this: packing would take longer.
const NEAR_ELEMENTS_MAX: usize = 1 << 15;
/// With so few steps a product takes as long as writing C. Then tiles have few rows and are wide, so that C is written in long runs.
const SHORT_STEPS_MAX: usize = 16;
/// With so many steps a tile spends most of its time on multiplications, not on loading and storing sums.
const LONG_STEPS_MIN: usize = 64;
/// From this many panels of rows on, one panel of B stays in the L1 cache while all panels of rows meet it
/// ([`BlockingPlan::is_b_stationary`]).
const STATIONARY_ROW_PANELS_MIN: usize = 5;
/// That is done only if B's panels together have at least this many elements: fewer stay in the cache anyway.
pub(super) const FAR_B_MIN: usize = 1 << 15;
/// Vectors of B at most that stay in the L1 cache while many rows meet them.
const LOW_B_MAX: usize = 1 << 8;
/// With so few panels of columns, a row of C is a short run of memory.
const SHORT_RUNS_MAX: usize = 4;
/// Elements at most of a B, or of an A, that all threads pack together before they multiply.
pub(super) const SHARED_MAX: usize = 1 << 21;
/// Elements at most of such an A if each thread would pack all of it ([`BlockingPlan::by_panel`]).
const SHARED_BY_PANEL_MAX: usize = 1 << 23;
/// Addresses a multiple of this apart fall into the same set of the L1 cache.
const CACHE_PERIOD_BYTES: usize = 4096;
/// Multiplications below which starting threads costs more than it brings.
const PARALLEL_WORK_MIN: usize = 1 << 19;

/// A product's shape, and how its operands may be read.
#[derive(Clone, Copy)]
pub(super) struct Problem {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Whether A's and B's elements are of the sums' type, so that a tile can read them.
    pub(super) readable: bool,
    /// Whether a panel of A can be read in place without conflict misses, see [`rows_cache_well`].
    pub(super) a_cacheable: bool,
    /// Whether A's rows, or the steps of each, are next to each other.
    pub(super) a_rows_contiguous: bool,
    pub(super) a_steps_contiguous: bool,
    /// Whether B's columns are next to each other.
    pub(super) b_contiguous: bool,
    /// Whether, if they are not, the steps of each column are: then a tile can transpose them.
    pub(super) b_transposable: bool,
    /// Whether B's columns lie in panels, which are as wide as tiles.
    pub(super) b_in_panels: bool,
}

/// The blocking of one product.
#[derive(Clone, Copy)]
pub(super) struct BlockingPlan {
    pub(super) problem: Problem,
    pub(super) shape: TileShape,
    pub(super) row_panels: usize,
    pub(super) col_panels: usize,
    /// Rows of the first panels: m over the number of panels, rounded up. The other panels have one fewer, so that no tile has many fewer rows than
    /// the others.
    pub(super) height: usize,
    /// How many panels have all these rows.
    high_panels: usize,
    pub(super) k_blocks: usize,
    /// Whether tiles read an operand in place, or from panels packed before.
    pub(super) a_in_place: bool,
    pub(super) b_in_place: bool,
    /// Whether A is packed as rows, not as panels.
    pub(super) a_in_rows: bool,
    /// Whether the first tile that reads a panel packs it meanwhile, if tile and panel have full size.
    pub(super) tiles_pack_a: bool,
    pub(super) tiles_pack_b: bool,
    /// Whether each panel of B is packed when all panels of A are to meet it, and not a block of B before.
    pub(super) by_panel: bool,
}

impl BlockingPlan {
    pub(super) fn new(problem: Problem, shape: TileShape) -> BlockingPlan {
        let wide = shape.widened(problem.m.min(FEW_ROWS));
        let short = problem.readable
            && problem.k <= SHORT_STEPS_MAX
            && problem.n >= wide.cols()
            && !problem.b_in_panels;
        let shape = if short { TileShape { rows: FEW_ROWS, ..wide } } else { shape };
        let row_panels = panels(problem.m, shape.rows);
        let few_rows = row_panels <= DIRECT_ROW_PANELS_MAX;
        let small = problem.k.saturating_mul(problem.m.max(problem.n)) <= DIRECT_ELEMENTS_MAX;
        let b_transposed =
            problem.readable && problem.b_transposable && row_panels <= TRANSPOSED_ROW_PANELS_MAX;
        let b_in_place = b_transposed
            || problem.readable
                && problem.b_contiguous
                && (few_rows || small || short || problem.b_in_panels);
        let shape = match (b_transposed, b_in_place) {
            (true, _) => shape.narrow(),
            (_, true) if problem.m <= FEW_ROWS => wide,
            _ => shape,
        };
        let col_panels = panels(problem.n, shape.cols());
        let tiny = few_rows && col_panels <= DIRECT_COL_PANELS_MAX;
        let height = if row_panels <= 1 { problem.m } else { problem.m.div_ceil(row_panels) };
        let high_panels = row_panels - (row_panels * height - problem.m);
        // Rows that are neighbours and needed once.
        let once = col_panels <= 1 && problem.a_rows_contiguous;
        let as_rows = col_panels <= ROWS_COL_PANELS_MAX;
        let well = problem.a_cacheable && (as_rows || problem.a_rows_contiguous);
        let a_in_place = problem.readable && (tiny || small || short || once || well);
        let a_in_rows = !a_in_place && as_rows && problem.a_steps_contiguous;
        let can_pack = problem.readable && can_pack(height, shape.vectors, shape.rows);
        BlockingPlan {
            problem,
            shape,
            row_panels,
            col_panels,
            height,
            high_panels,
            k_blocks: problem.k.div_ceil(STEPS_MAX).max(1),
            a_in_place,
            b_in_place,
            a_in_rows,
            tiles_pack_a: can_pack && !a_in_place && !a_in_rows && problem.a_rows_contiguous,
            tiles_pack_b: can_pack && !b_in_place && problem.b_contiguous,
            by_panel: false,
        }
    }

    /// The plan for a thread that multiplies all rows and keeps no panel of B: [`BlockingPlan::by_panel`] if that pays, which is if B's columns lie
    /// along k, so that packing is dear, or in panels; and the panels of A are few enough to stay in the cache, but enough to hide the way of B's
    /// elements from memory.
    pub(super) fn for_all_rows(self) -> BlockingPlan {
        let Problem { n, k, b_transposable, b_in_panels, .. } = self.problem;
        let far = n.saturating_mul(k) >= FAR_B_MIN && k >= LONG_STEPS_MIN;
        let transposes = b_transposable && !self.b_in_place;
        if !(far && (transposes || b_in_panels)) || self.a_in_place || self.tiles_pack_a {
            return self;
        }
        let most = (k / STEPS_BY_PANEL_MIN).max(1);
        let mut plans = (k.div_ceil(STEPS_BY_PANEL_MAX)..=most).map(|k_blocks| BlockingPlan {
            k_blocks,
            by_panel: true,
            ..self
        });
        let fits = |plan: &BlockingPlan| {
            let most = plan.block(A_BLOCK_BY_PANEL_MAX << usize::from(plan.k_blocks == 1), plan.height);
            (STATIONARY_ROW_PANELS_MIN..=most).contains(&plan.row_panels)
        };
        plans.find(fits).unwrap_or(self)
    }

    /// The plan of some columns among those that this one is for.
    pub(super) fn of_columns(&self, n: usize) -> BlockingPlan {
        let problem = Problem { n, ..self.problem };
        BlockingPlan { problem, col_panels: panels(n, self.shape.cols()), ..*self }
    }

    /// The rows of a panel.
    pub(super) fn rows(&self, panel: usize) -> Range<usize> {
        let start = |panel: usize| panel * self.height - panel.saturating_sub(self.high_panels);
        start(panel)..start(panel + 1)
    }

    /// The rows of several panels, one at least.
    pub(super) fn rows_of(&self, panels: &Range<usize>) -> Range<usize> {
        self.rows(panels.start).start..self.rows(panels.end - 1).end
    }

    /// Panels of rows cut into blocks of `most`, each of panels of one height.
    pub(super) fn blocks_of_a_height(
        &self,
        panels: &Range<usize>,
        most: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let low = self.high_panels.clamp(panels.start, panels.end);
        blocks(&(panels.start..low), most).chain(blocks(&(low..panels.end), most))
    }

    /// Whether tiles of this panel of rows can pack what they read.
    pub(super) fn tiles_pack(&self, row: usize) -> bool {
        can_pack(self.rows(row).len(), self.shape.vectors, self.shape.rows)
    }

    /// The columns of a panel: full tiles, then what is left.
    pub(super) fn cols(&self, panel: usize) -> Range<usize> {
        let width = self.shape.cols();
        panel * width..((panel + 1) * width).min(self.problem.n)
    }

    /// The steps of a block of k; blocks have nearly equal sizes, all but the last in whole vectors.
    pub(super) fn steps(&self, block: usize) -> Range<usize> {
        let vectors = even_piece(self.problem.k.div_ceil(LANES_MAX), self.k_blocks, block);
        let step = |vector: usize| (vector * LANES_MAX).min(self.problem.k);
        step(vectors.start)..step(vectors.end)
    }

    /// The most steps a block has.
    pub(super) fn steps_max(&self) -> usize {
        let vectors = self.problem.k.div_ceil(LANES_MAX).div_ceil(self.k_blocks);
        (vectors * LANES_MAX).min(self.problem.k)
    }

    /// Strides of a packed panel of so many rows of A: places from one row to the next, and from one step to the next.
    pub(super) fn a_packed(&self, rows: usize) -> (usize, usize) {
        if self.a_in_rows { (self.steps_max().next_multiple_of(LANES_MAX) + LANES_MAX, 1) } else { (1, rows) }
    }

    /// The places that so many packed rows of A take for so many steps.
    pub(super) fn a_places(&self, rows: usize, steps: usize) -> usize {
        rows * if self.a_in_rows { self.a_packed(rows).0 } else { steps }
    }

    /// Whether all threads pack all of A together before they multiply: if it would be packed again for each of several blocks of columns, and
    /// tiles do not do that meanwhile.
    pub(super) fn shares_packed_a(&self, col_blocks: usize) -> bool {
        let packs_before = !self.a_in_place && !self.a_in_rows && !self.tiles_pack_a;
        let most = if self.by_panel { SHARED_BY_PANEL_MAX } else { SHARED_MAX };
        packs_before && col_blocks > 1 && self.a_places(self.problem.m, self.problem.k) <= most
    }

    /// Whether the inner loop runs over the panels of A while a panel of B stays in the L1 cache, and not over the `cols` panels of B while a
    /// panel of A stays there. `rows` and `cols` are the panels of a block.
    ///
    /// With many steps it is better where B is large: then A's panels come from the L2 cache, and they are smaller than B's.
    /// With few steps it is better for rows that are read in place. But if all panels of B stay in the L1 cache, writing C in longer runs
    /// is better, unless the runs are short anyway.
    pub(super) fn is_b_stationary(&self, cols: usize, rows: usize) -> bool {
        let far = cols * self.shape.cols() * self.steps_max() >= FAR_B_MIN;
        if far && self.problem.k >= LONG_STEPS_MIN && rows >= STATIONARY_ROW_PANELS_MIN {
            return true;
        }
        let panel = self.shape.vectors * self.steps_max();
        let short_runs = cols <= SHORT_RUNS_MAX;
        self.a_in_place && cols < rows && panel <= LOW_B_MAX && (short_runs || cols * panel > LOW_B_MAX)
    }

    /// How many panels of rows meet one panel of B before the next panel of B. They stay in the L2 cache.
    pub(super) fn stationary_rows(&self) -> usize {
        self.block(A_BLOCK_MAX, self.height)
    }

    /// Panels of rows in a block of A at most.
    pub(super) fn row_block(&self) -> usize {
        let all = self.a_in_place || self.by_panel;
        if all { self.row_panels.max(1) } else { self.block(A_BLOCK_MAX, self.height) }
    }

    /// Panels of columns in a block of B at most. If a single panel of rows reads the block, it does so soon after packing, so the block is to
    /// stay in the L2 cache.
    pub(super) fn col_block(&self) -> usize {
        let most = if self.row_panels <= 1 { A_BLOCK_MAX } else { B_BLOCK_MAX };
        if self.col_panels <= 1 { 1 } else { self.block(most, self.shape.cols()) }
    }

    fn block(&self, elements: usize, panel: usize) -> usize {
        (elements / (panel * self.steps_max()).max(1)).max(1)
    }

    /// How many threads share C's rows, and into how many ranges C's columns are cut: of all grids for so many threads the one that reads the
    /// least, since every thread reads (and packs) its rows of A and its columns of B.
    pub(super) fn thread_grid(&self, threads: usize) -> (usize, usize) {
        let cuts = (1..=threads).map(|rows| (rows, threads.div_ceil(rows)));
        let cuts = cuts.map(|(rows, cols)| (rows.min(self.row_panels), cols.min(self.col_panels)));
        let read = |&(rows, cols): &(usize, usize)| {
            (threads.saturating_sub(rows * cols), rows * self.problem.n + cols * self.problem.m)
        };
        cuts.min_by_key(read).unwrap_or((1, 1))
    }
}

/// The range `all` cut into blocks of `size`; the last may be shorter.
pub(super) fn blocks(all: &Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = all.end;
    all.clone().step_by(size.max(1)).map(move |start| start..end.min(start + size))
}

/// Whether m n k multiplications are worth more than one thread.
pub(crate) fn is_parallel(m: usize, n: usize, k: usize) -> bool {
    m.saturating_mul(n).saturating_mul(k) >= PARALLEL_WORK_MIN
}

/// `total.div_ceil(size)`, and no division where one panel holds all.
fn panels(total: usize, size: usize) -> usize {
    if total <= size { usize::from(total > 0) } else { total.div_ceil(size) }
}

/// Whether the rows of a panel of A can be read together along k without conflict misses in the L1 cache: their stride is not long beside k,
/// and no multiple of the cache's period. Up to [`FEW_ROWS`] rows never conflict. If rows are neighbours in memory, the stride of steps
/// counts, and the matrix has to fit the L2 cache.
pub(super) fn rows_cache_well(
    rows: usize,
    (row_stride, step_stride): (usize, usize),
    k: usize,
    element_bytes: usize,
) -> bool {
    if rows <= FEW_ROWS {
        return row_stride == 1 || step_stride == 1;
    }
    if row_stride == 1 && step_stride != 1 {
        return k.saturating_mul(step_stride) <= NEAR_ELEMENTS_MAX
            && !(step_stride * element_bytes).is_multiple_of(CACHE_PERIOD_BYTES / 2);
    }
    step_stride == 1
        && row_stride <= 4 * k
        && !(row_stride * element_bytes).is_multiple_of(CACHE_PERIOD_BYTES)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const SHAPE: TileShape = TileShape { rows: 14, lanes: 16, vectors: 2 };

    fn problem(m: usize, n: usize, k: usize) -> Problem {
        Problem {
            m,
            n,
            k,
            readable: true,
            a_cacheable: k != 1024,
            a_rows_contiguous: false,
            a_steps_contiguous: true,
            b_contiguous: true,
            b_transposable: false,
            b_in_panels: false,
        }
    }

    pub(in crate::gemm) fn plan(m: usize, n: usize, k: usize) -> BlockingPlan {
        BlockingPlan::new(problem(m, n, k), SHAPE)
    }

    #[test]
    fn panels_cover_rows_columns_and_steps_once() {
        for (m, n, k) in [(1, 1, 1), (14, 32, 512), (15, 33, 513), (129, 127, 2000), (1000, 7, 0)] {
            let plan = plan(m, n, k);
            let all = |parts: usize, part: &dyn Fn(usize) -> Range<usize>| {
                (0..parts).flat_map(part).collect::<Vec<_>>()
            };
            assert_eq!(all(plan.row_panels, &|p| plan.rows(p)), (0..m).collect::<Vec<_>>());
            assert_eq!(all(plan.col_panels, &|p| plan.cols(p)), (0..n).collect::<Vec<_>>());
            assert_eq!(all(plan.k_blocks, &|b| plan.steps(b)), (0..k).collect::<Vec<_>>());
            let heights = (0..plan.row_panels).map(|p| plan.rows(p).len());
            assert!(heights.clone().all(|rows| (1..=14).contains(&rows) && rows + 1 >= plan.height));
            assert!((0..plan.col_panels).all(|p| (1..=plan.shape.cols()).contains(&plan.cols(p).len())));
            assert!((0..plan.k_blocks).all(|b| plan.steps(b).len() <= plan.steps_max()));
        }
    }

    #[test]
    fn what_is_read_once_or_lies_well_is_not_packed() {
        let direct = |plan: BlockingPlan| (plan.a_in_place, plan.b_in_place);
        assert_eq!(direct(plan(16, 16, 16)), (true, true));
        assert_eq!(direct(plan(512, 200, 512)), (true, false));
        assert_eq!(direct(plan(512, 512, 512)), (false, false)); // rows that many panels of columns read
        assert_eq!(direct(plan(200, 20, 16)), (true, true));
        assert_eq!(direct(plan(512, 512, 1024)), (false, false));
        let transposed = |m: usize, b_transposable: bool| {
            let plan = BlockingPlan::new(
                Problem { b_contiguous: false, b_transposable, ..problem(m, 512, 512) },
                SHAPE,
            );
            (plan.b_in_place, plan.shape.vectors)
        };
        assert_eq!(transposed(8, false), (false, 2));
        assert_eq!(transposed(8, true), (true, 1));
        assert_eq!(transposed(29, true), (false, 2));
    }

    #[test]
    fn what_is_read_again_is_packed_by_tiles_where_its_order_allows() {
        let kept = |plan: BlockingPlan| (plan.tiles_pack_a, plan.tiles_pack_b, plan.a_in_rows);
        assert_eq!(kept(plan(512, 512, 512)), (false, true, false));
        assert_eq!(kept(plan(512, 200, 1024)), (false, true, true));
        assert_eq!(kept(plan(512, 512, 1024)), (false, true, false));
        let weight_gradient = |m: usize, readable: bool| {
            let rows =
                Problem { a_rows_contiguous: true, a_steps_contiguous: false, ..problem(m, 512, 1024) };
            BlockingPlan::new(Problem { readable, ..rows }, SHAPE)
        };
        assert_eq!(kept(weight_gradient(512, true)), (true, true, false));
        assert_eq!(kept(weight_gradient(512, false)), (false, false, false));
        assert_eq!(kept(weight_gradient(20, true)), (false, false, false)); // low tiles, and B is read in place
    }

    #[test]
    fn tiles_of_few_rows_are_wide_where_b_is_read_in_place() {
        assert_eq!([1, 2, 3, 4, 28].map(|m| plan(m, 512, 64).shape.vectors), [8, 8, 8, 2, 2]);
        assert_eq!([1, 28].map(|m| plan(m, 512, 16).shape.vectors), [8, 8]);
        assert_eq!(plan(28, 512, 16).height, 3);
        let narrow = TileShape { rows: 6, lanes: 8, vectors: 2 };
        assert_eq!(
            [1, 2, 3, 4].map(|m| BlockingPlan::new(problem(m, 512, 64), narrow).shape.vectors),
            [8, 4, 4, 2]
        );
    }

    #[test]
    fn a_panel_of_b_is_stationary_where_it_stays_in_the_cache() {
        let stationary = |m: usize, n: usize, k: usize| {
            let plan = plan(m, n, k);
            plan.is_b_stationary(plan.col_panels, plan.row_panels)
        };
        assert!(stationary(1000, 33, 33)); // few tiles side by side
        assert!(stationary(1000, 1000, 16)); // all of B falls out of the cache
        assert!(!stationary(1000, 1000, 2)); // all of B stays
        assert!(!stationary(14, 64, 16)); // one panel of rows
        assert!(stationary(1000, 1000, 512)); // many steps, and B is large
        assert!(!stationary(1000, 96, 160)); // B is small
        assert!(!stationary(56, 1000, 512)); // few panels of rows
    }

    #[test]
    fn panels_of_b_are_packed_one_by_one_for_a_prompt() {
        let planned = |m: usize, b_transposable: bool, k: usize| {
            let problem = Problem { b_contiguous: !b_transposable, b_transposable, ..problem(m, 9728, k) };
            BlockingPlan::new(problem, SHAPE).for_all_rows()
        };
        let by_panel = |m: usize, b_transposable: bool, k: usize| {
            let plan = planned(m, b_transposable, k);
            plan.by_panel.then_some(plan.k_blocks)
        };
        // All threads need all of A then, so they pack it together.
        assert!([896, 2048, 4864, 14336].iter().all(|&k| planned(512, true, k).shares_packed_a(8)));
        assert!(!planned(4096, true, 4864).shares_packed_a(8));
        assert!([70, 512, 570].iter().all(|&m| by_panel(m, true, 896) == Some(1)));
        assert_eq!([256, 512].map(|m| by_panel(m, true, 4864)), [Some(5), Some(10)]);
        // In as few blocks as the caches allow.
        assert_eq!([200, 2048, 14336].map(|k| by_panel(512, true, k)), [Some(1), Some(5), Some(29)]);
        assert_eq!(by_panel(512, false, 896), None); // tiles pack it
        assert!([8, 28, 56, 600, 4096].iter().all(|&m| by_panel(m, true, 896).is_none()));
    }

    #[test]
    fn one_thread_has_a_grid_of_one_and_several_have_the_grid_that_reads_least() {
        assert_eq!(plan(256, 256, 256).thread_grid(1), (1, 1));
        assert_eq!(plan(2048, 256, 256).thread_grid(4), (4, 1));
        assert_eq!(plan(256, 2048, 256).thread_grid(4), (1, 4));
        assert_eq!(plan(1024, 1024, 256).thread_grid(4), (2, 2));
        assert_eq!(plan(1, 32, 32).thread_grid(8), (1, 1));
    }
}
