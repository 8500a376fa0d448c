//! One product carried out: packs what the plan says, then runs the jobs, each a block of C's tiles.
//!
//! Where C itself can hold the sums (same type, columns side by side, nothing to do afterwards), tiles write there. Else
//! they go to the job's scratch, and from there to C once all of k is summed.

#![allow(unsafe_code)]

use std::any::TypeId;
use std::ops::Range;

use phalanx_tensor::Pool;

use super::element::GemmElem;
use super::epilogue::{Epilogue, Write};
use super::finish::FinishTile;
use super::kernel::{Tile, TileShape, run_tile};
use super::mat::MatRef;
use super::pack::{Panel, Shared};
use super::plan::{Operand, Plan, Problem, rows_cache_well, share};
use super::scratch::with_scratch;
use crate::simd::Runner;

/// A product to carry out. C is `m` x `n` from `c_start` on.
pub(super) struct Product<'a, T: GemmElem> {
    pub(super) runner: Runner,
    pub(super) a: MatRef<'a, T>,
    pub(super) b: MatRef<'a, T>,
    pub(super) c: Shared<'a, T>,
    pub(super) c_start: usize,
    pub(super) c_strides: (usize, usize),
    pub(super) write: Write,
    pub(super) epilogue: Epilogue<'a, T>,
}

/// Packed panels of both operands, empty where the plan has none.
#[derive(Clone, Copy)]
struct Packed<'a, T> {
    a: Shared<'a, T>,
    b: Shared<'a, T>,
    /// The panels that are there.
    rows: (usize, usize),
    cols: (usize, usize),
}

impl<T: GemmElem> Product<'_, T> {
    /// Carries it out on the pool's threads, or on this one alone.
    ///
    /// # Safety
    ///
    /// C's elements lie within `c`, each has a place of its own, and nobody else touches them meanwhile.
    pub(super) unsafe fn run(&self, pool: Option<&Pool>) {
        let plan = Plan::new(self.problem(), TileShape::of::<T::Acc>(self.runner));
        let pool = pool.filter(|pool| pool.threads() > 1 && plan.is_parallel());
        let (rows, cols) = (plan.row_chunk(), plan.col_chunk());
        let a_len = if plan.a == Operand::Shared { rows * plan.shape.rows * plan.problem.k } else { 0 };
        let b_len = if plan.b == Operand::Shared { cols * plan.shape.cols() * plan.problem.k } else { 0 };
        with_scratch::<T::Acc, _>(a_len, |a| {
            with_scratch::<T::Acc, _>(b_len, |b| {
                let (a, b) = (Shared::new(a), Shared::new(b));
                for first_col in (0..plan.col_panels).step_by(cols) {
                    for first_row in (0..plan.row_panels).step_by(rows) {
                        let rows = (first_row, plan.row_panels.min(first_row + rows));
                        let cols = (first_col, plan.col_panels.min(first_col + cols));
                        let packed = Packed { a, b, rows, cols };
                        // SAFETY: the caller's.
                        unsafe { self.run_chunk(&plan, pool, packed) }
                    }
                }
            });
        });
    }

    fn problem(&self) -> Problem {
        Problem {
            m: self.a.rows(),
            n: self.b.cols(),
            k: self.a.cols(),
            readable: is_acc::<T>(),
            a_cacheable: rows_cache_well(
                self.a.strides().0,
                self.a.strides().1,
                self.a.cols(),
                size_of::<T>(),
            ),
            b_contiguous: self.b.strides().1 == 1,
        }
    }

    /// Packs and multiplies the panels named in `packed`.
    ///
    /// # Safety
    ///
    /// [`Product::run`]'s.
    unsafe fn run_chunk(&self, plan: &Plan, pool: Option<&Pool>, packed: Packed<'_, T::Acc>) {
        let (rows, cols) = (packed.rows.1 - packed.rows.0, packed.cols.1 - packed.cols.0);
        let a_pieces = if plan.a == Operand::Shared { rows } else { 0 };
        // B's panels stay packed while the chunks of rows pass.
        let b_pieces = if plan.b == Operand::Shared && packed.rows.0 == 0 { cols } else { 0 };
        for_each(pool, a_pieces + b_pieces, |piece| {
            if piece < b_pieces {
                self.pack_b(plan, packed, packed.cols.0 + piece);
            } else {
                self.pack_a(plan, packed, packed.rows.0 + piece - b_pieces);
            }
        });
        let threads = pool.map_or(1, Pool::threads);
        let (row_jobs, col_jobs) = plan.jobs(rows, cols, threads);
        for_each(pool, row_jobs * col_jobs, |job| {
            let rows = share(rows, row_jobs, job % row_jobs);
            let cols = share(cols, col_jobs, job / row_jobs);
            let rows = packed.rows.0 + rows.start..packed.rows.0 + rows.end;
            let cols = packed.cols.0 + cols.start..packed.cols.0 + cols.end;
            // SAFETY: the caller's; jobs have different panels, hence different elements of C.
            unsafe { Job { product: self, plan, packed, rows, cols }.run() }
        });
    }

    fn pack_a(&self, plan: &Plan, packed: Packed<'_, T::Acc>, panel: usize) {
        let rows = plan.rows(panel);
        let start = (rows.start - plan.rows(packed.rows.0).start) * plan.problem.k;
        // SAFETY: each panel's place is its own and one thread packs it; nobody reads before all are packed.
        let dst = unsafe { packed.a.part(start, rows.len() * plan.problem.k) };
        let (row_stride, col_stride) = self.a.strides();
        self.runner.run(Panel {
            src: &self.a.data()[(rows.start * row_stride).min(self.a.data().len())..],
            lane_stride: row_stride,
            step_stride: col_stride,
            lanes: rows.len(),
            width: rows.len(),
            dst,
        });
    }

    fn pack_b(&self, plan: &Plan, packed: Packed<'_, T::Acc>, panel: usize) {
        let width = plan.vectors(panel) * plan.shape.lanes;
        let start = (panel - packed.cols.0) * plan.shape.cols() * plan.problem.k;
        // SAFETY: as in `pack_a`.
        let dst = unsafe { packed.b.part(start, width * plan.problem.k) };
        self.pack_b_steps(plan, panel, 0, dst);
    }

    /// Packs a panel of B from step `first` on, as many steps as `dst` has room for.
    fn pack_b_steps(&self, plan: &Plan, panel: usize, first: usize, dst: &mut [T::Acc]) {
        let cols = plan.cols(panel);
        let (row_stride, col_stride) = self.b.strides();
        let start = first * row_stride + cols.start * col_stride;
        self.runner.run(Panel {
            src: &self.b.data()[start.min(self.b.data().len())..],
            lane_stride: col_stride,
            step_stride: row_stride,
            lanes: cols.len(),
            width: plan.vectors(panel) * plan.shape.lanes,
            dst,
        });
    }
}

/// Whether the elements are of the sums' type.
fn is_acc<T: GemmElem>() -> bool {
    TypeId::of::<T>() == TypeId::of::<T::Acc>()
}

fn for_each(pool: Option<&Pool>, pieces: usize, f: impl Fn(usize) + Sync) {
    match pool {
        Some(pool) => pool.for_each(pieces, f),
        None => (0..pieces).for_each(f),
    }
}

/// A block of C's tiles, done by one thread.
struct Job<'a, 'p, T: GemmElem> {
    product: &'a Product<'p, T>,
    plan: &'a Plan,
    packed: Packed<'a, T::Acc>,
    rows: Range<usize>,
    cols: Range<usize>,
}

impl<T: GemmElem> Job<'_, '_, T> {
    /// # Safety
    ///
    /// C's elements in these panels are valid and this job's alone.
    unsafe fn run(&self) {
        let plan = self.plan;
        let tile_len = plan.shape.rows * plan.shape.cols();
        // Sums outlive a tile's turn only if k comes in several blocks.
        let slots = if plan.k_blocks == 1 { 1 } else { self.rows.len() * self.cols.len() };
        let panel_len = plan.shape.cols() * plan.problem.k.div_ceil(plan.k_blocks);
        with_scratch::<T::Acc, _>(panel_len + slots * tile_len, |scratch| {
            let (panel, sums) = scratch.split_at_mut(panel_len);
            for block in 0..plan.k_blocks {
                for col in self.cols.clone() {
                    let b = self.find_b(block, col, panel);
                    for row in self.rows.clone() {
                        let slot = (col - self.cols.start) * self.rows.len() + row - self.rows.start;
                        let slot = if slots == 1 { 0 } else { slot };
                        let sums = &mut sums[slot * tile_len..][..tile_len];
                        // SAFETY: the caller's.
                        unsafe { self.run_tile(block, row, col, b, sums) }
                    }
                }
            }
        });
    }

    /// Where a panel of B's steps lie and how far apart, packed into `panel` first if they have to be.
    fn find_b(&self, block: usize, col: usize, panel: &mut [T::Acc]) -> (*const T::Acc, usize) {
        let plan = self.plan;
        let width = plan.vectors(col) * plan.shape.lanes;
        let steps = plan.steps(block);
        if plan.b == Operand::Shared {
            let start = (col - self.packed.cols.0) * plan.shape.cols() * plan.problem.k + steps.start * width;
            return (self.packed.b.ptr().wrapping_add(start), width);
        }
        let b = &self.product.b;
        let whole = plan.cols(col).len() == width;
        if let (Operand::Direct, true, Some(data)) = (plan.b, whole, T::as_acc(b.data())) {
            let start = steps.start * b.strides().0 + plan.cols(col).start;
            return (data.as_ptr().wrapping_add(start), b.strides().0);
        }
        let panel = &mut panel[..steps.len() * width];
        self.product.pack_b_steps(plan, col, steps.start, panel);
        (panel.as_ptr(), width)
    }

    /// Where a panel of A's block lies, and its row and step strides.
    fn find_a(&self, block: usize, row: usize) -> (*const T::Acc, usize, usize) {
        let (plan, a) = (self.plan, &self.product.a);
        let (rows, first) = (plan.rows(row), plan.steps(block).start);
        if let (Operand::Direct, Some(data)) = (plan.a, T::as_acc(a.data())) {
            let (row_stride, step_stride) = a.strides();
            let start = rows.start * row_stride + first * step_stride;
            return (data.as_ptr().wrapping_add(start), row_stride, step_stride);
        }
        let start = (rows.start - plan.rows(self.packed.rows.0).start) * plan.problem.k + first * rows.len();
        (self.packed.a.ptr().wrapping_add(start), 1, rows.len())
    }

    /// What to bring near during a tile: while A's panels are first read, the next of them; then, spread over the
    /// panels of rows, the next panel of B.
    fn find_ahead(&self, block: usize, row: usize, col: usize, b: *const T::Acc) -> (*const T::Acc, usize) {
        let plan = self.plan;
        if col == self.cols.start && row + 1 < self.rows.end && plan.a == Operand::Shared {
            return (self.find_a(block, row + 1).0, plan.shape.rows);
        }
        if col + 1 < self.cols.end && plan.b == Operand::Shared {
            let (next, _) = self.find_b(block, col + 1, &mut []);
            let lines = (plan.steps(block).len() * plan.shape.cols()).div_ceil(self.rows.len());
            return (
                next.wrapping_add((row - self.rows.start) * lines),
                plan.shape.cols().div_ceil(self.rows.len()),
            );
        }
        (b, 0)
    }

    /// # Safety
    ///
    /// C's elements in this tile are valid and this job's alone; `b` is from [`Job::find_b`].
    unsafe fn run_tile(
        &self,
        block: usize,
        row: usize,
        col: usize,
        b: (*const T::Acc, usize),
        sums: &mut [T::Acc],
    ) {
        let (plan, product) = (self.plan, self.product);
        let (rows, cols) = (plan.rows(row), plan.cols(col));
        let vectors = plan.vectors(col);
        let whole = cols.len() == vectors * plan.shape.lanes;
        let in_place = whole
            && product.c_strides.1 == 1
            && product.write == Write::Store
            && product.epilogue.is_empty()
            && is_acc::<T>();
        let (a, a_row, a_step) = self.find_a(block, row);
        let (sums_ptr, sums_row) = if in_place {
            let start = product.c_start + rows.start * product.c_strides.0 + cols.start;
            // The element type is the sums' own, so the cast changes nothing.
            (product.c.ptr().wrapping_add(start).cast::<T::Acc>(), product.c_strides.0)
        } else {
            (sums.as_mut_ptr(), plan.shape.cols())
        };
        let steps = plan.steps(block).len();
        let (ahead, ahead_step) = self.find_ahead(block, row, col, b.0);
        let tile = Tile {
            steps,
            a,
            a_row,
            a_step,
            b: b.0,
            b_step: b.1,
            sums: sums_ptr,
            sums_row,
            ahead,
            ahead_step,
            next_sums: sums_ptr.wrapping_add(rows.len() * sums_row),
            resume: block > 0,
        };
        // SAFETY: A's and B's pointers lead to these rows, columns and steps within the matrices (bounds proven when
        // those were made) or their packed panels; the sums are C's own elements or a whole slot of scratch.
        unsafe { run_tile(product.runner, rows.len(), vectors, tile) }
        if !in_place && block + 1 == plan.k_blocks {
            let finish = FinishTile {
                sums,
                sums_row: plan.shape.cols(),
                bias: product.epilogue.bias.map(|bias| &bias[cols.clone()]),
                activation: product.epilogue.activation,
                write: product.write,
                rows: rows.len(),
                cols: cols.len(),
                c: product.c.ptr().wrapping_add(
                    product.c_start + rows.start * product.c_strides.0 + cols.start * product.c_strides.1,
                ),
                c_strides: product.c_strides,
            };
            // SAFETY: these are the elements of the tile, the caller's alone.
            unsafe { finish.run_on(product.runner) }
        }
    }
}
