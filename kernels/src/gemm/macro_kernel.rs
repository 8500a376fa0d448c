//! The macro-kernel: the loops around the micro-kernel, run by each thread of a range of C's columns.
//!
//! `product.rs` makes a [`MacroKernel`] for each range of columns and runs it on several threads. Each thread takes chunks of rows until none is
//! left, packs what its tiles read again, and calls the micro-kernel for strips of tiles. Where C cannot hold the sums (halves, an activation),
//! they wait in the thread's buffers, and the epilogue writes them to C once all of k is summed.

#![allow(unsafe_code)]

use std::ops::Range;

use phalanx_tensor::Pool;

use super::chunks::{Chunk, ChunkQueue};
use super::element::{GemmElem, PanelElem, steps_on};
use super::epilogue::{Epilogue, FinishTile, Write};
use super::mat::MatRef;
use super::micro_kernel::run_tile;
use super::pack::{Panels, WidenedPanel};
use super::plan::{BlockingPlan, blocks};
use super::product::{Product, wide_start};
use super::tile::Tile;
use crate::scratch::with_scratch;
use crate::simd::{Float, LANES_MAX};

/// Panels that a thread packs at a time where all threads pack an operand together.
const PACKED_TOGETHER: usize = 4;

/// A range of C's columns, whose chunks threads take in turns.
pub(super) struct MacroKernel<'a, 'p, T: GemmElem> {
    pub(super) product: &'a Product<'p, T>,
    pub(super) plan: &'a BlockingPlan,
    pub(super) chunks: ChunkQueue,
    /// The panels of A, if they are packed before: all rows of a block of steps, then the next block's. Empty if not.
    pub(super) packed_a: &'a [T::Acc],
    /// The same of B and these columns.
    pub(super) packed_b: &'a [T::Acc],
}

/// A block of A: some rows of a chunk, for the steps of one block of k.
struct ABlock<'a> {
    chunk: &'a Chunk,
    steps: Range<usize>,
    is_first: bool,
    is_last: bool,
    rows: Range<usize>,
    /// Where the panels of B for these steps begin in the buffer, and whether they are still to be packed.
    b_start: usize,
    packs_b: bool,
}

/// An operand to pack, with a row for each line: A, or B transposed. The other fields are those of [`Panels`].
struct Operand<'a, T> {
    matrix: MatRef<'a, T>,
    width: usize,
    line_pitch: usize,
    beyond: T,
    near: bool,
}

/// A thread's scratch memory: packed panels of A (and a vector that a tile may write behind them) and of B, each empty if the operand is
/// read in place, and the sums of tiles that wait for C.
struct PackBuffers<'a, A> {
    a: &'a mut [A],
    b: &'a mut [A],
    sums: &'a mut [A],
}

impl<T: GemmElem> MacroKernel<'_, '_, T> {
    /// Takes and computes chunks until none is left.
    ///
    /// # Safety
    ///
    /// C's elements in these columns are valid, and only threads that run this macro-kernel touch them.
    pub(super) unsafe fn run(&self) {
        let (plan, chunks) = (self.plan, &self.chunks);
        let Some(first) = chunks.take() else { return };
        let width = plan.shape.cols();
        let row_block = plan.row_block().min(plan.row_panels);
        let a_len = match plan.a_in_place || !self.packed_a.is_empty() {
            true => 0,
            false => plan.a_places(row_block * plan.height, plan.steps_max()) + LANES_MAX,
        };
        let b_steps = if chunks.keeps_b { plan.problem.k } else { plan.steps_max() };
        let b_panels = if plan.by_panel { 1 } else { chunks.cols_max };
        let b_len = if plan.b_in_place || chunks.shares_packed_b { 0 } else { b_panels * width * b_steps };
        let slots = match plan.k_blocks {
            _ if self.product.is_in_place() && self.product.write != Write::Accumulate => 0,
            1 => 1,
            _ => chunks.rows_max * chunks.cols_max,
        };
        with_scratch::<T::Acc, _>(a_len + b_len + slots * plan.shape.rows * width, |scratch| {
            let (b, rest) = scratch.split_at_mut(b_len);
            let (a, sums) = rest.split_at_mut(a_len);
            let mut buffers = PackBuffers { a, b, sums };
            let mut packed = None;
            let mut next = Some(first);
            while let Some(chunk) = next {
                let packs_b = !chunks.keeps_b
                    || !chunks.shares_packed_b && packed.replace(chunk.cols.start) != Some(chunk.cols.start);
                for k_block in 0..plan.k_blocks {
                    let steps = plan.steps(k_block);
                    for rows in blocks(&chunk.rows, row_block) {
                        let block = ABlock {
                            chunk: &chunk,
                            is_first: k_block == 0,
                            is_last: k_block + 1 == plan.k_blocks,
                            b_start: if chunks.keeps_b { chunk.cols.len() * width * steps.start } else { 0 },
                            packs_b: packs_b && rows.start == chunk.rows.start,
                            steps: steps.clone(),
                            rows,
                        };
                        // SAFETY: the caller's; the chunk was taken by this thread alone.
                        unsafe {
                            match plan.by_panel {
                                true => self.run_by_panel(&block, &mut buffers),
                                false => self.run_block(&block, &mut buffers),
                            }
                        }
                    }
                }
                // Taken only now, not ahead as `iter::successors` would: another thread may have no work.
                next = chunks.take();
            }
        });
    }

    /// Where the packed panel of A with number `row` begins, in the buffer or in all of A's; [`MacroKernel::b_start`] likewise for B.
    fn a_start(&self, row: usize, block: &ABlock<'_>) -> usize {
        let (plan, steps) = (self.plan, &block.steps);
        let (first, before) = match self.packed_a.is_empty() {
            true => (plan.rows(block.rows.start).start, 0),
            false => (0, plan.a_places(plan.problem.m, steps.start)),
        };
        before + plan.a_places(plan.rows(row).start - first, steps.len())
    }

    fn b_start(&self, col: usize, block: &ABlock<'_>) -> usize {
        let before = if self.plan.by_panel { 0 } else { col - block.chunk.cols.start };
        block.b_start + before * self.plan.shape.cols() * block.steps.len()
    }

    /// Packs these panels of A for some steps.
    fn pack_a(&self, rows: Range<usize>, steps: &Range<usize>, mut rest: &mut [T::Acc]) {
        let plan = self.plan;
        if plan.a_in_place {
            return;
        }
        for panels in plan.blocks_of_a_height(&rows, rows.len()) {
            let (lines, width) = (plan.rows_of(&panels), plan.rows(panels.start).len());
            let dst = rest.split_off_mut(..plan.a_places(lines.len(), steps.len())).unwrap_or_default();
            let a = Operand {
                matrix: self.product.a,
                width,
                line_pitch: plan.a_packed(width).0,
                // A place of two steps may lack its second. A's -0 times B's 0 there leaves every sum as it is, -0 too.
                beyond: T::narrow(-T::Acc::ZERO),
                near: false,
            };
            self.pack(a, lines, steps, dst);
        }
    }

    /// Packs these panels of B for some steps.
    fn pack_b(&self, cols: Range<usize>, steps: &Range<usize>, dst: &mut [T::Acc]) {
        let (plan, b, width) = (self.plan, &self.product.b, self.plan.shape.cols());
        if b.is_in_panels() {
            let first = steps.start * steps_on::<T::PanelElem>(self.product.runner) * width;
            for (nth, col) in cols.enumerate() {
                let (src, len) = (&b.data()[b.column(col * width) + first..], width * steps.len());
                let panel = WidenedPanel { src, width, dst: &mut dst[nth * len..][..len] };
                T::PanelElem::run(self.product.runner, panel);
            }
            return;
        }
        let lines = plan.cols(cols.start).start..plan.cols(cols.end - 1).end;
        let (beyond, near) = (T::narrow(T::Acc::ZERO), plan.by_panel);
        self.pack(Operand { matrix: b.transposed(), width, line_pitch: 1, beyond, near }, lines, steps, dst);
    }

    /// The number of elements that [`MacroKernel::packed_b`] needs.
    pub(super) fn packed_b_len(&self) -> usize {
        let all = self.chunks.cols.len() * self.plan.shape.cols() * self.plan.problem.k;
        if self.chunks.shares_packed_b { all } else { 0 }
    }

    /// Packs all panels of B by all threads, if the plan shares them.
    pub(super) fn pack_b_together(&self, pool: Option<&Pool>, to: &mut [T::Acc]) {
        let width = self.plan.shape.cols();
        let pack = |cols, steps: &_, dst: &mut _| self.pack_b(cols, steps, dst);
        self.pack_together(pool, &self.chunks.cols, |cols, steps| cols.len() * width * steps, pack, to);
    }

    /// Packs all panels of A by all threads, if `to` has room for them.
    pub(super) fn pack_a_together(&self, pool: Option<&Pool>, to: &mut [T::Acc]) {
        let pack = |rows, steps: &_, dst: &mut _| self.pack_a(rows, steps, dst);
        self.pack_together(
            pool,
            &(0..self.plan.row_panels),
            |rows, steps| self.plan.a_places(self.plan.rows_of(rows).len(), steps),
            pack,
            to,
        );
    }

    /// Packs panels, whose places for so many steps `len` says, by all threads.
    fn pack_together(
        &self,
        pool: Option<&Pool>,
        panels: &Range<usize>,
        len: impl Fn(&Range<usize>, usize) -> usize,
        pack: impl Fn(Range<usize>, &Range<usize>, &mut [T::Acc]) + Sync,
        mut to: &mut [T::Acc],
    ) {
        if to.is_empty() {
            return;
        }
        let mut pieces = Vec::new();
        for steps in (0..self.plan.k_blocks).map(|block| self.plan.steps(block)) {
            for panels in blocks(panels, PACKED_TOGETHER) {
                let dst = to.split_off_mut(..len(&panels, steps.len())).unwrap_or_default();
                pieces.push((panels, steps.clone(), dst));
            }
        }
        let one = |(panels, steps, dst): &mut (Range<usize>, Range<usize>, &mut [T::Acc])| {
            pack(panels.clone(), steps, dst)
        };
        match pool {
            Some(pool) => pool.for_each_chunk(&mut pieces, 1, |_, pieces| pieces.iter_mut().for_each(one)),
            None => pieces.iter_mut().for_each(one),
        }
    }

    /// Packs some steps of some lines of an operand.
    fn pack(&self, of: Operand<'_, T>, lines: Range<usize>, places: &Range<usize>, dst: &mut [T::Acc]) {
        let Operand { matrix, width, line_pitch, beyond, near } = of;
        let (line_stride, step_stride) = matrix.strides();
        let per_place = steps_on::<T::PanelElem>(self.product.runner);
        let first = places.start * per_place;
        let start = lines.start * line_stride + first * step_stride;
        let panels = Panels {
            src: &matrix.data()[start.min(matrix.data().len())..],
            line_stride,
            step_stride,
            lines: lines.len(),
            steps: (places.len() * per_place).min(matrix.cols() - first),
            places: places.len(),
            width,
            line_pitch,
            beyond,
            near,
            dst: match line_pitch {
                1 => &mut dst[..lines.len().div_ceil(width) * width * places.len()],
                _ => &mut dst[..lines.len() * line_pitch],
            },
        };
        T::PanelElem::run(self.product.runner, panels);
    }

    /// Computes a block of A times a block of B: packs panels, then runs the tiles in strips.
    ///
    /// Each panel of A meets all panels of B before the next panel of A. If [`BlockingPlan::is_b_stationary`], each panel of B meets all panels
    /// of A instead; only the tiles that pack run before. With [`BlockingPlan::tiles_pack_b`] the tiles of the first panel of A pack B's panels,
    /// with [`BlockingPlan::tiles_pack_a`] the tiles of the first panel of B pack A's.
    ///
    /// # Safety
    ///
    /// [`MacroKernel::run`]'s.
    unsafe fn run_block(&self, block: &ABlock<'_>, buffers: &mut PackBuffers<'_, T::Acc>) {
        let (plan, cols) = (self.plan, &block.chunk.cols);
        // The last panel of columns may be narrower.
        let whole_end = cols.end - usize::from(plan.cols(cols.end - 1).len() < plan.shape.cols());
        let tiles_pack_b = plan.tiles_pack_b && plan.tiles_pack(block.rows.start);
        let tiles_pack_a = plan.tiles_pack_a && whole_end > cols.start;
        if block.packs_b && !plan.b_in_place {
            let cols = if tiles_pack_b { whole_end..cols.end } else { cols.clone() };
            let start = self.b_start(cols.start, block);
            self.pack_b(cols, &block.steps, &mut buffers.b[start..]);
        }
        if !tiles_pack_a && self.packed_a.is_empty() {
            self.pack_a(block.rows.clone(), &block.steps, buffers.a);
        }
        // Tiles that the epilogue takes one by one are not run in strips.
        let finishes = block.is_last && !self.product.is_in_place();
        let first_packs_b = tiles_pack_b && block.packs_b;
        // Panels of A that meet a stationary panel of B: all but the first if its tiles pack B.
        let stationary = match !finishes && plan.is_b_stationary(cols.len(), block.rows.len()) {
            true => block.rows.start + usize::from(first_packs_b)..block.rows.end,
            false => block.rows.end..block.rows.end,
        };
        let packing_end = cols.start + usize::from(tiles_pack_a);
        for row in block.rows.clone() {
            let packs_a = tiles_pack_a && plan.tiles_pack(row);
            if tiles_pack_a && !packs_a {
                let start = self.a_start(row, block);
                self.pack_a(row..row + 1, &block.steps, &mut buffers.a[start..]); // not earlier: a tile writes behind the panel before
            }
            // With a stationary B, only the tiles that pack run now.
            let cols_end = if stationary.contains(&row) { packing_end } else { cols.end };
            let mut start = cols.start;
            while start < cols_end {
                let packs_a = packs_a && start == cols.start;
                let one = packs_a || finishes || start == whole_end;
                let end = if one { start + 1 } else { whole_end.min(cols_end) };
                let packs_b = first_packs_b && row == block.rows.start && start < whole_end;
                let strip = Strip { rows: row..row + 1, cols: start..end, packs_a, packs_b };
                // SAFETY: the caller's.
                unsafe { self.run_strip(block, &strip, buffers) }
                start = end;
            }
        }
        for rows in plan.blocks_of_a_height(&stationary, plan.stationary_rows()) {
            for col in packing_end..cols.end {
                let strip = Strip { rows: rows.clone(), cols: col..col + 1, packs_a: false, packs_b: false };
                // SAFETY: the caller's.
                unsafe { self.run_strip(block, &strip, buffers) }
            }
        }
    }

    /// [`MacroKernel::run_block`] with [`BlockingPlan::by_panel`]: packs a panel of B and multiplies all panels of A by it, then the next. Meanwhile
    /// the tiles prefetch the lines of the next panel.
    ///
    /// # Safety
    ///
    /// [`MacroKernel::run`]'s.
    unsafe fn run_by_panel(&self, block: &ABlock<'_>, buffers: &mut PackBuffers<'_, T::Acc>) {
        let (plan, rows) = (self.plan, &block.rows);
        if self.packed_a.is_empty() {
            self.pack_a(rows.clone(), &block.steps, buffers.a);
        }
        let finishes = block.is_last && !self.product.is_in_place();
        let at_once = if finishes { 1 } else { plan.shape.cols() };
        for col in block.chunk.cols.clone() {
            if !plan.b_in_place {
                self.pack_b(col..col + 1, &block.steps, buffers.b);
            }
            for rows in plan.blocks_of_a_height(rows, at_once) {
                let strip = Strip { rows, cols: col..col + 1, packs_a: false, packs_b: false };
                // SAFETY: the caller's.
                unsafe { self.run_strip(block, &strip, buffers) }
            }
        }
    }

    /// [`Tile::far`], `far_step` and `far_next` of a strip that begins at panels `row` of A and `col` of B. The first tiles prefetch a line each of
    /// the next panel of B, as many as it has; those after them nothing.
    fn far(&self, row: usize, col: usize, block: &ABlock<'_>) -> (*const u8, usize, usize) {
        let (step_stride, line_stride) = self.product.b.strides();
        let (lines, nth) = (self.plan.shape.cols(), row - block.rows.start);
        if !self.plan.by_panel || col + 1 >= block.chunk.cols.end || nth >= lines {
            return (std::ptr::null(), 0, 0);
        }
        let per_place = steps_on::<T::PanelElem>(self.product.runner);
        let (b, first) = (&self.product.b, self.plan.cols(col + 1).start);
        // A panel has its steps one after the other: each tile takes as many bytes of it as a line has.
        let line_stride = if b.is_in_panels() { block.steps.len() * per_place } else { line_stride };
        let start = b.column(first) + nth * line_stride + block.steps.start * per_place * step_stride;
        let far = b.data().as_ptr().wrapping_add(start).cast();
        (far, per_place * size_of::<T>(), line_stride * size_of::<T>())
    }

    /// Runs the micro-kernel for the tiles of a strip, and the epilogue for one that is complete.
    ///
    /// # Safety
    ///
    /// [`MacroKernel::run`]'s.
    unsafe fn run_strip(&self, block: &ABlock<'_>, strip: &Strip, buffers: &mut PackBuffers<'_, T::Acc>) {
        let (plan, product) = (self.plan, self.product);
        let (rows, cols, width) =
            (plan.rows(strip.rows.start), plan.cols(strip.cols.start), plan.shape.cols());
        let a_start = self.a_start(strip.rows.start, block);
        let a_packed =
            if self.packed_a.is_empty() { &*buffers.a } else { self.packed_a }.as_ptr().wrapping_add(a_start);
        let (a, a_row, a_step, a_next) = if plan.a_in_place || strip.packs_a {
            let (row_stride, step_stride) = product.a.strides();
            let start = rows.start * row_stride + block.steps.start * step_stride;
            (wide_start(&product.a).wrapping_add(start), row_stride, step_stride, rows.len() * row_stride)
        } else {
            let (row_stride, step_stride) = plan.a_packed(rows.len());
            (a_packed, row_stride, step_stride, plan.a_places(rows.len(), block.steps.len()))
        };
        let b_start = self.b_start(strip.cols.start, block);
        let b_packed = if self.chunks.shares_packed_b { self.packed_b } else { &*buffers.b }
            .as_ptr()
            .wrapping_add(b_start);
        let (b, b_step, b_col, b_next) = if plan.b_in_place || strip.packs_b {
            let (step_stride, col_stride) = product.b.strides();
            let col_stride = if plan.problem.b_contiguous { 1 } else { col_stride };
            let start = block.steps.start * step_stride + product.b.column(cols.start);
            (wide_start(&product.b).wrapping_add(start), step_stride, col_stride, product.b.column(width))
        } else {
            (b_packed, width, 1, width * block.steps.len())
        };
        let tile_len = plan.shape.rows * width;
        let slots_apart = block.chunk.rows.len() * tile_len;
        let slot = match plan.k_blocks {
            1 => 0,
            _ => {
                (strip.cols.start - block.chunk.cols.start) * slots_apart
                    + (strip.rows.start - block.chunk.rows.start) * tile_len
            }
        };
        let (c_row, c_col) = product.c_strides;
        let c = product.c.ptr().wrapping_add(product.c_start + rows.start * c_row + cols.start * c_col);
        let Epilogue { bias, activation } = product.epilogue;
        let bias = bias.map(|bias| &bias[cols.clone()]);
        let in_place = product.is_in_place();
        let finishes = block.is_last && !in_place;
        // Where sums lie, with the strides from row to row and from tile to tile.
        let is_down = strip.rows.len() > 1;
        let next = |down_by: usize, across_by: usize| if is_down { down_by } else { across_by };
        let whole = (c.cast::<T::Acc>(), c_row, next(rows.len() * c_row, width));
        let scratch = (buffers.sums.as_mut_ptr().wrapping_add(slot), width, next(tile_len, slots_apart));
        let partial = if in_place && product.write != Write::Accumulate { whole } else { scratch };
        let out = if in_place && block.is_last { whole } else { partial };
        let (far, far_step, far_next) = self.far(strip.rows.start, strip.cols.start, block);
        let mut tile = Tile {
            far,
            far_step,
            far_next,
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
            from: match product.write {
                _ if !block.is_first => partial.0,
                Write::Continue => partial.0,
                Write::Store | Write::Accumulate => std::ptr::null(),
            },
            from_row: partial.1,
            bias: match bias.and_then(T::as_wide) {
                Some(bias) if in_place && block.is_last => bias.as_ptr(),
                _ => std::ptr::null(),
            },
            out: out.0,
            out_row: out.1,
            prefetch: if finishes { c.cast_const().cast() } else { out.0.wrapping_add(out.2) },
            prefetch_row: if finishes { c_row * size_of::<T>() / size_of::<T::Acc>() } else { out.1 },
            add: in_place && block.is_last && product.write == Write::Accumulate,
            pack_a_to: if strip.packs_a {
                buffers.a.as_mut_ptr().wrapping_add(a_start)
            } else {
                std::ptr::null_mut()
            },
            pack_b_to: if strip.packs_b {
                buffers.b.as_mut_ptr().wrapping_add(b_start)
            } else {
                std::ptr::null_mut()
            },
            ..Tile::default()
        };
        // SAFETY: A's and B's pointers lead to these rows, columns and steps within the matrices (bounds proven when
        // those were made) or their packed panels, as do those to where panels are packed; the sums are C's own elements or whole
        // slots of scratch.
        unsafe { run_tile::<T::PanelElem>(product.runner, plan.shape.lanes, rows.len(), &mut tile) }
        if finishes {
            let finish = FinishTile {
                sums: &mut buffers.sums[slot..],
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

/// Tiles that one call of the micro-kernel computes: side by side (one panel of rows, several of columns), or below each other (several
/// panels of rows of one height, one of columns).
struct Strip {
    rows: Range<usize>,
    cols: Range<usize>,
    /// Whether the tiles pack A's panel, and B's panels, beside their multiplications.
    packs_a: bool,
    packs_b: bool,
}
