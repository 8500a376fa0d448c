//! A job: a block of C's tiles, computed by one thread from what it packs for itself.

#![allow(unsafe_code)]

use std::ops::Range;

use phalanx_tensor::Pool;

use super::element::{GemmElem, PanelElem, steps_on};
use super::epilogue::FinishTile;
use super::epilogue::{Epilogue, Write};
use super::mat::MatRef;
use super::micro_kernel::run_tile;
use super::pack::Panels;
use super::plan::Plan;
use super::plan::{Part, Parts};
use super::product::{Product, wide_start};
use super::tile::Tile;
use crate::scratch::with_scratch;
use crate::simd::{Float, LANES_MAX};

/// Panels of B that a thread packs at a time where all pack them together.
const PACKED_TOGETHER: usize = 4;

/// Columns of C, whose parts threads take in turns.
pub(super) struct Job<'a, 'p, T: GemmElem> {
    pub(super) product: &'a Product<'p, T>,
    pub(super) plan: &'a Plan,
    pub(super) parts: Parts,
    /// The panels of B, if they are packed before: all columns of a block of k, then the next block's.
    pub(super) packed_b: &'a [T::Acc],
}

/// Some rows of a part, for the steps of one block of k.
struct Block<'a> {
    part: &'a Part,
    steps: Range<usize>,
    is_first: bool,
    is_last: bool,
    rows: Range<usize>,
    /// Where its panels of B lie in memory, and whether they are still to be packed.
    b_start: usize,
    packs_b: bool,
}

/// A thread's working memory: packed panels of A (and what a tile may write behind them) and of B, empty where an operand is
/// read in place, and sums that wait for C.
struct Memory<'a, A> {
    a: &'a mut [A],
    b: &'a mut [A],
    sums: &'a mut [A],
}

impl<T: GemmElem> Job<'_, '_, T> {
    /// Takes and computes parts until none is left.
    ///
    /// # Safety
    ///
    /// C's elements in these columns are valid, and only threads that run this job touch them.
    pub(super) unsafe fn run(&self) {
        let (plan, parts) = (self.plan, &self.parts);
        let Some(first) = parts.take() else { return };
        let width = plan.shape.cols();
        let row_block = plan.row_block().min(plan.row_panels);
        let a_len = if plan.a_direct { 0 } else { row_block * plan.a_panel(plan.steps_max()) + LANES_MAX };
        let b_steps = if parts.holds_b { plan.problem.k } else { plan.steps_max() };
        let b_len = if plan.b_direct || parts.shares_b { 0 } else { parts.cols_max * width * b_steps };
        let slots = match plan.k_blocks {
            _ if self.product.is_in_place() && self.product.write == Write::Store => 0,
            1 => 1,
            _ => parts.rows_max * parts.cols_max,
        };
        with_scratch::<T::Acc, _>(a_len + b_len + slots * plan.shape.rows * width, |scratch| {
            let (b, rest) = scratch.split_at_mut(b_len);
            let (a, sums) = rest.split_at_mut(a_len);
            let mut memory = Memory { a, b, sums };
            let mut packed = None;
            let mut next = Some(first);
            while let Some(part) = next {
                let packs_b = !parts.holds_b
                    || !parts.shares_b && packed.replace(part.cols.start) != Some(part.cols.start);
                for k_block in 0..plan.k_blocks {
                    let steps = plan.steps(k_block);
                    for rows in blocks(&part.rows, row_block) {
                        let block = Block {
                            part: &part,
                            is_first: k_block == 0,
                            is_last: k_block + 1 == plan.k_blocks,
                            b_start: if parts.holds_b { part.cols.len() * width * steps.start } else { 0 },
                            packs_b: packs_b && rows.start == part.rows.start,
                            steps: steps.clone(),
                            rows,
                        };
                        // SAFETY: the caller's; what was taken is this thread's.
                        unsafe { self.run_block(&block, &mut memory) }
                    }
                }
                // Not before, as `iter::successors` would: another thread may be waiting for it.
                next = parts.take();
            }
        });
    }

    /// Where a packed panel of A, or of B, begins.
    fn a_start(&self, row: usize, block: &Block<'_>) -> usize {
        (row - block.rows.start) * self.plan.a_panel(block.steps.len())
    }

    fn b_start(&self, col: usize, block: &Block<'_>) -> usize {
        block.b_start + (col - block.part.cols.start) * self.plan.shape.cols() * block.steps.len()
    }

    /// Packs those panels of A that the tiles do not pack themselves.
    fn pack_a(&self, rows: Range<usize>, block: &Block<'_>, dst: &mut [T::Acc]) {
        let plan = self.plan;
        if !plan.a_direct && !rows.is_empty() {
            let lanes = plan.rows(rows.start).start..plan.rows(rows.end - 1).end;
            // What stands beside A's last step leaves the sum as it is, -0 too, where B has a zero there.
            let beyond = T::narrow(-T::Acc::ZERO);
            let lanes_apart = plan.a_packed().0;
            let dst = &mut dst[self.a_start(rows.start, block)..];
            self.pack(self.product.a, lanes, (plan.height, lanes_apart), &block.steps, beyond, dst);
        }
    }

    /// Packs panels of B.
    fn pack_b(&self, cols: Range<usize>, steps: &Range<usize>, dst: &mut [T::Acc]) {
        let plan = self.plan;
        if !cols.is_empty() {
            let lanes = plan.cols(cols.start).start..plan.cols(cols.end - 1).end;
            let beyond = T::narrow(T::Acc::ZERO);
            let matrix = self.product.b.transposed();
            self.pack(matrix, lanes, (plan.shape.cols(), 1), steps, beyond, dst);
        }
    }

    /// The elements of [`Job::packed_b`].
    pub(super) fn packed_b_len(&self) -> usize {
        let all = self.parts.cols.len() * self.plan.shape.cols() * self.plan.problem.k;
        if self.parts.shares_b { all } else { 0 }
    }

    /// Packs all panels of B, as far as they are shared.
    pub(super) fn pack_together(&self, pool: Option<&Pool>, mut to: &mut [T::Acc]) {
        if to.is_empty() {
            return;
        }
        let (cols, width) = (&self.parts.cols, self.plan.shape.cols());
        let mut pieces = Vec::new();
        for steps in (0..self.plan.k_blocks).map(|block| self.plan.steps(block)) {
            for cols in blocks(cols, PACKED_TOGETHER) {
                let dst = to.split_off_mut(..cols.len() * width * steps.len()).unwrap_or_default();
                pieces.push((cols, steps.clone(), dst));
            }
        }
        let one = |(cols, steps, dst): &mut (Range<usize>, Range<usize>, &mut [T::Acc])| {
            self.pack_b(cols.clone(), steps, dst)
        };
        match pool {
            Some(pool) => pool.for_each_chunk(&mut pieces, 1, |_, pieces| pieces.iter_mut().for_each(one)),
            None => pieces.iter_mut().for_each(one),
        }
    }

    /// Packs a block's steps of some lanes, which are `matrix`'s rows.
    fn pack(
        &self,
        matrix: MatRef<'_, T>,
        lanes: Range<usize>,
        (width, lanes_apart): (usize, usize),
        places: &Range<usize>,
        beyond: T,
        dst: &mut [T::Acc],
    ) {
        let (lane_stride, step_stride) = matrix.strides();
        let per_place = steps_on::<T::PanelElem>(self.product.runner);
        let first = places.start * per_place;
        let start = lanes.start * lane_stride + first * step_stride;
        let panels = Panels {
            src: &matrix.data()[start.min(matrix.data().len())..],
            lane_stride,
            step_stride,
            lanes: lanes.len(),
            steps: (places.len() * per_place).min(matrix.cols() - first),
            places: places.len(),
            width,
            lanes_apart,
            beyond,
            dst: match lanes_apart {
                1 => &mut dst[..lanes.len().div_ceil(width) * width * places.len()],
                _ => &mut dst[..lanes.len() * lanes_apart],
            },
        };
        T::PanelElem::run(self.product.runner, panels);
    }

    /// A panel of A at a time passes along B's panels. The first panel of rows packs B's, the first of columns A's, as far
    /// as [`Plan::keeps_b`] and [`Plan::keeps_a`] go. If the plan [`Plan::goes_down`], other tiles pass along one panel of B, then
    /// along the next.
    ///
    /// # Safety
    ///
    /// [`Job::run`]'s.
    unsafe fn run_block(&self, block: &Block<'_>, memory: &mut Memory<'_, T::Acc>) {
        let (plan, cols) = (self.plan, &block.part.cols);
        let is_high = |row: usize| plan.rows(row).len() == plan.height;
        // The last panel of columns may be narrower.
        let whole_end = cols.end - usize::from(plan.cols(cols.end - 1).len() < plan.shape.cols());
        let keeps_b = plan.keeps_b && is_high(block.rows.start);
        let keeps_a = plan.keeps_a && whole_end > cols.start;
        if block.packs_b && !plan.b_direct {
            let cols = if keeps_b { whole_end..cols.end } else { cols.clone() };
            let start = self.b_start(cols.start, block);
            self.pack_b(cols, &block.steps, &mut memory.b[start..]);
        }
        if !keeps_a {
            self.pack_a(block.rows.clone(), block, memory.a);
        }
        // Tiles that are finished one by one are not run in strips.
        let finishes = block.is_last && !self.product.is_in_place();
        let first_packs_b = keeps_b && block.packs_b;
        // Rows that go down: all high ones, but the first if it packs B.
        let high_end = block.rows.end - usize::from(!is_high(block.rows.end - 1));
        let down = match !finishes && plan.goes_down(cols.len(), block.rows.len()) {
            true => block.rows.start + usize::from(first_packs_b)..high_end,
            false => block.rows.end..block.rows.end,
        };
        let packing_end = cols.start + usize::from(keeps_a);
        for row in block.rows.clone() {
            let keep_a = keeps_a && is_high(row);
            if keeps_a && !keep_a {
                self.pack_a(row..row + 1, block, memory.a); // now, after what was written behind the panel before
            }
            // Of rows that go down, only the tiles that pack.
            let cols_end = if down.contains(&row) { packing_end } else { cols.end };
            let mut start = cols.start;
            while start < cols_end {
                let keep_a = keep_a && start == cols.start;
                let end = if keep_a || finishes || start == whole_end { start + 1 } else { whole_end };
                let keep_b = first_packs_b && row == block.rows.start && start < whole_end;
                let strip = Strip { rows: row..row + 1, cols: start..end, keep_a, keep_b };
                // SAFETY: the caller's.
                unsafe { self.run_strip(block, &strip, memory) }
                start = end;
            }
        }
        for rows in blocks(&down, plan.rows_down()) {
            for col in packing_end..cols.end {
                let strip = Strip { rows: rows.clone(), cols: col..col + 1, keep_a: false, keep_b: false };
                // SAFETY: the caller's.
                unsafe { self.run_strip(block, &strip, memory) }
            }
        }
    }

    /// # Safety
    ///
    /// [`Job::run`]'s.
    unsafe fn run_strip(&self, block: &Block<'_>, strip: &Strip, memory: &mut Memory<'_, T::Acc>) {
        let (plan, product) = (self.plan, self.product);
        let (rows, cols, width) =
            (plan.rows(strip.rows.start), plan.cols(strip.cols.start), plan.shape.cols());
        let a_packed = memory.a.as_mut_ptr().wrapping_add(self.a_start(strip.rows.start, block));
        let (a, a_row, a_step, a_next) = if plan.a_direct || strip.keep_a {
            let (row_stride, step_stride) = product.a.strides();
            let start = rows.start * row_stride + block.steps.start * step_stride;
            (wide_start(&product.a).wrapping_add(start), row_stride, step_stride, plan.height * row_stride)
        } else {
            let (row_stride, step_stride) = plan.a_packed();
            (a_packed.cast_const(), row_stride, step_stride, plan.a_panel(block.steps.len()))
        };
        let b_start = self.b_start(strip.cols.start, block);
        let b_packed =
            if self.parts.shares_b { self.packed_b } else { &*memory.b }.as_ptr().wrapping_add(b_start);
        let (b, b_step, b_col, b_next) = if plan.b_direct || strip.keep_b {
            let (step_stride, col_stride) = product.b.strides();
            let col_stride = if plan.problem.b_contiguous { 1 } else { col_stride };
            let start = block.steps.start * step_stride + cols.start * col_stride;
            (wide_start(&product.b).wrapping_add(start), step_stride, col_stride, width * col_stride)
        } else {
            (b_packed, width, 1, width * block.steps.len())
        };
        let tile_len = plan.shape.rows * width;
        let slots_apart = block.part.rows.len() * tile_len;
        let slot = match plan.k_blocks {
            1 => 0,
            _ => {
                (strip.cols.start - block.part.cols.start) * slots_apart
                    + (strip.rows.start - block.part.rows.start) * tile_len
            }
        };
        let (c_row, c_col) = product.c_strides;
        let c = product.c.ptr().wrapping_add(product.c_start + rows.start * c_row + cols.start * c_col);
        let Epilogue { bias, activation } = product.epilogue;
        let bias = bias.map(|bias| &bias[cols.clone()]);
        let in_place = product.is_in_place();
        let finishes = block.is_last && !in_place;
        // Where sums lie, with the distances from row to row and from tile to tile.
        let down = strip.rows.len() > 1;
        let next = |down_by: usize, across_by: usize| if down { down_by } else { across_by };
        let whole = (c.cast::<T::Acc>(), c_row, next(plan.height * c_row, width));
        let scratch = (memory.sums.as_mut_ptr().wrapping_add(slot), width, next(tile_len, slots_apart));
        let partial = if in_place && product.write == Write::Store { whole } else { scratch };
        let out = if in_place && block.is_last { whole } else { partial };
        let mut tile = Tile {
            count: strip.rows.len() * strip.cols.len(),
            a_next: next(a_next, 0),
            b_next: next(0, b_next),
            bias_next: next(0, width),
            from_next: partial.2,
            out_next: out.2,
            steps: block.steps.len(),
            a,
            a_row,
            a_step,
            b,
            b_step,
            b_col,
            cols: cols.len(),
            from: if block.is_first { std::ptr::null() } else { partial.0 },
            from_row: partial.1,
            bias: match bias.and_then(T::as_wide) {
                Some(bias) if in_place && block.is_last => bias.as_ptr(),
                _ => std::ptr::null(),
            },
            out: out.0,
            out_row: out.1,
            near: if finishes { c.cast_const().cast() } else { out.0.wrapping_add(out.2) },
            near_row: if finishes { c_row * size_of::<T>() / size_of::<T::Acc>() } else { out.1 },
            add: in_place && block.is_last && product.write == Write::Accumulate,
            keep_a: if strip.keep_a { a_packed } else { std::ptr::null_mut() },
            keep_b: if strip.keep_b {
                memory.b.as_mut_ptr().wrapping_add(b_start)
            } else {
                std::ptr::null_mut()
            },
            ..Tile::default()
        };
        // SAFETY: A's and B's pointers lead to these rows, columns and steps within the matrices (bounds proven when
        // those were made) or their packed panels, as do those to what is kept; the sums are C's own elements or whole
        // slots of scratch.
        unsafe { run_tile::<T::PanelElem>(product.runner, plan.shape.lanes, rows.len(), &mut tile) }
        if finishes {
            let finish = FinishTile {
                sums: &mut memory.sums[slot..],
                sums_row: width,
                bias,
                activation,
                write: product.write,
                rows: rows.len(),
                cols: cols.len(),
                c,
                c_strides: product.c_strides,
            };
            // SAFETY: these are the elements of the tile, the caller's alone.
            unsafe { finish.run_on(product.runner) }
        }
    }
}

/// Tiles side by side, a panel of rows and those of columns that it passes; or below each other, a panel of columns and
/// those of rows, all high.
struct Strip {
    rows: Range<usize>,
    cols: Range<usize>,
    /// Whether they pack A's panel, or B's panels, on the way.
    keep_a: bool,
    keep_b: bool,
}

/// `all` in blocks of so many.
fn blocks(all: &Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = all.end;
    all.clone().step_by(size.max(1)).map(move |start| start..end.min(start + size))
}
