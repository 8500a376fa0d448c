//! One product carried out: packs what the plan says, then runs the jobs, each a block of C's tiles.
//!
//! Where C itself can hold the sums (same type, columns side by side, nothing to do afterwards), tiles write there. Else
//! they go to the job's scratch, and from there to C once all of k is summed.

#![allow(unsafe_code)]

use std::any::TypeId;
use std::ops::Range;

use phalanx_tensor::Pool;

use super::element::{GemmElem, Place, steps_on};
use super::epilogue::{Epilogue, Write};
use super::finish::FinishTile;
use super::kernel::{Tile, TileShape, run_tile};
use super::mat::MatRef;
use super::pack::{Panels, Shared};
use super::plan::{Plan, Problem, rows_cache_well, share};
use super::scratch::with_scratch;
use crate::simd::{Float, Runner};

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

impl<T: GemmElem> Product<'_, T> {
    /// Carries it out on the pool's threads, or on this one alone.
    ///
    /// # Safety
    ///
    /// C's elements lie within `c`, each has a place of its own, and nobody else touches them meanwhile.
    pub(super) unsafe fn run(&self, pool: Option<&Pool>) {
        let plan = Plan::new(self.problem(), TileShape::of::<T::Acc>(self.runner));
        let pool = pool.filter(|pool| pool.threads() > 1 && plan.is_parallel());
        let (row_jobs, col_jobs) = pool.map_or((1, 1), |pool| plan.jobs(pool.threads()));
        let job = |job: usize| {
            let rows = share(plan.row_panels, row_jobs, job % row_jobs);
            let cols = share(plan.col_panels, col_jobs, job / row_jobs);
            // SAFETY: the caller's; jobs have different panels, hence different elements of C.
            unsafe { Job { product: self, plan: &plan, rows, cols }.run() }
        };
        match pool {
            Some(pool) => pool.for_each(row_jobs * col_jobs, job),
            None => (0..row_jobs * col_jobs).for_each(job),
        }
    }

    /// Whether tiles write C itself: its elements are of the sums' type, so that the cast changes nothing.
    fn is_in_place(&self) -> bool {
        let neighbours = self.c_strides.1 == 1 || self.b.cols() == 1;
        is_acc::<T>() && neighbours && self.epilogue.activation.is_none()
    }

    fn problem(&self) -> Problem {
        let (m, n, k) = (self.a.rows(), self.b.cols(), self.a.cols());
        let b_contiguous = self.b.strides().1 == 1 || n == 1;
        Problem {
            m,
            n,
            k: k.div_ceil(steps_on::<T::Place>(self.runner)),
            readable: is_acc::<T>(),
            a_cacheable: rows_cache_well(m, self.a.strides(), k, size_of::<T>()),
            b_contiguous,
            b_turnable: !b_contiguous && (self.b.strides().0 == 1 || k == 1),
        }
    }
}

/// Whether the elements are of the sums' type.
fn is_acc<T: GemmElem>() -> bool {
    TypeId::of::<T>() == TypeId::of::<T::Acc>()
}

/// A block of C's tiles, done by one thread.
struct Job<'a, 'p, T: GemmElem> {
    product: &'a Product<'p, T>,
    plan: &'a Plan,
    rows: Range<usize>,
    cols: Range<usize>,
}

/// Part of a job's work: so many panels of columns, and of rows, for one block of k.
struct Block<'a, T: GemmElem> {
    block: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    /// Packed panels, empty where an operand is read in place.
    a: &'a [T::Acc],
    b: &'a [T::Acc],
}

impl<T: GemmElem> Job<'_, '_, T> {
    /// # Safety
    ///
    /// C's elements in these panels are valid and this job's alone.
    unsafe fn run(&self) {
        let (plan, steps) = (self.plan, self.plan.steps_max());
        let (row_block, col_block) =
            (plan.row_block().min(self.rows.len()), plan.col_block().min(self.cols.len()));
        let a_len = if plan.a_direct { 0 } else { row_block * plan.height * steps };
        let b_len = if plan.b_direct { 0 } else { col_block * plan.shape.cols() * steps };
        let slots = match plan.k_blocks {
            _ if self.product.is_in_place() && self.product.write == Write::Store => 0,
            1 => 1,
            _ => self.rows.len() * col_block,
        };
        let tile_len = plan.shape.rows * plan.shape.cols();
        with_scratch::<T::Acc, _>(a_len + b_len + slots * tile_len, |scratch| {
            let (a, rest) = scratch.split_at_mut(a_len);
            let (b, sums) = rest.split_at_mut(b_len);
            for cols in blocks(&self.cols, col_block) {
                for block in 0..plan.k_blocks {
                    self.pack_b(&cols, block, b);
                    for rows in blocks(&self.rows, row_block) {
                        self.pack_a(&rows, block, a);
                        let part = Block { block, rows, cols: cols.clone(), a, b };
                        // SAFETY: the caller's.
                        unsafe { self.run_block(&part, sums) }
                    }
                }
            }
        });
    }

    fn pack_a(&self, rows: &Range<usize>, block: usize, dst: &mut [T::Acc]) {
        if !self.plan.a_direct {
            let lanes = self.plan.rows(rows.start).start..self.plan.rows(rows.end - 1).end;
            // What stands beside A's last step leaves the sum as it is, -0 too, where B has a zero there.
            let beyond = T::narrow(-T::Acc::ZERO);
            self.pack(self.product.a, lanes, self.plan.height, block, beyond, dst);
        }
    }

    fn pack_b(&self, cols: &Range<usize>, block: usize, dst: &mut [T::Acc]) {
        if !self.plan.b_direct {
            let lanes = self.plan.cols(cols.start).start..self.plan.cols(cols.end - 1).end;
            let beyond = T::narrow(T::Acc::ZERO);
            self.pack(self.product.b.transposed(), lanes, self.plan.shape.cols(), block, beyond, dst);
        }
    }

    /// Packs a block's steps of some lanes, which are `matrix`'s rows.
    fn pack(
        &self,
        matrix: MatRef<'_, T>,
        lanes: Range<usize>,
        width: usize,
        block: usize,
        beyond: T,
        dst: &mut [T::Acc],
    ) {
        let (places, (lane_stride, step_stride)) = (self.plan.steps(block), matrix.strides());
        let per_place = steps_on::<T::Place>(self.product.runner);
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
            beyond,
            dst: &mut dst[..lanes.len().div_ceil(width) * width * places.len()],
        };
        T::Place::run(self.product.runner, panels);
    }

    /// Where a panel of A's steps begin, and its row and step strides.
    fn find_a(&self, part: &Block<'_, T>, row: usize) -> (*const T::Acc, usize, usize) {
        let (rows, steps) = (self.plan.rows(row), self.plan.steps(part.block));
        let a = &self.product.a;
        if let (true, Some(data)) = (self.plan.a_direct, T::as_wide(a.data())) {
            let (row_stride, step_stride) = a.strides();
            let start = rows.start * row_stride + steps.start * step_stride;
            return (data.as_ptr().wrapping_add(start), row_stride, step_stride);
        }
        let start = (row - part.rows.start) * self.plan.height * steps.len();
        (part.a[start..].as_ptr(), 1, self.plan.height)
    }

    /// Where a panel of B's steps begin, and its step and column strides.
    fn find_b(&self, part: &Block<'_, T>, col: usize) -> (*const T::Acc, usize, usize) {
        let (plan, steps) = (self.plan, self.plan.steps(part.block));
        let b = &self.product.b;
        if let (true, Some(data)) = (plan.b_direct, T::as_wide(b.data())) {
            let (step_stride, col_stride) = b.strides();
            let start = steps.start * step_stride + plan.cols(col).start * col_stride;
            let col_stride = if plan.problem.b_contiguous { 1 } else { col_stride };
            return (data.as_ptr().wrapping_add(start), step_stride, col_stride);
        }
        let start = (col - part.cols.start) * plan.shape.cols() * steps.len();
        (part.b[start..].as_ptr(), plan.shape.cols(), 1)
    }

    /// A panel of A at a time passes along B's panels.
    ///
    /// # Safety
    ///
    /// [`Job::run`]'s.
    unsafe fn run_block(&self, part: &Block<'_, T>, sums: &mut [T::Acc]) {
        let tile_len = self.plan.shape.rows * self.plan.shape.cols();
        for row in part.rows.clone() {
            for col in part.cols.clone() {
                let slot = (col - part.cols.start) * self.rows.len() + row - self.rows.start;
                let slot = if self.plan.k_blocks == 1 { 0 } else { slot };
                // SAFETY: the caller's.
                unsafe { self.run_tile(part, row, col, sums.get_mut(slot * tile_len..).unwrap_or_default()) }
            }
        }
    }

    /// # Safety
    ///
    /// [`Job::run`]'s.
    unsafe fn run_tile(&self, part: &Block<'_, T>, row: usize, col: usize, sums: &mut [T::Acc]) {
        let (plan, product) = (self.plan, self.product);
        let (rows, cols) = (plan.rows(row), plan.cols(col));
        let (c_row, c_col) = product.c_strides;
        let c = product.c.ptr().wrapping_add(product.c_start + rows.start * c_row + cols.start * c_col);
        let Epilogue { bias, activation } = product.epilogue;
        let bias = bias.map(|bias| &bias[cols.clone()]);
        let in_place = product.is_in_place();
        let (last, scratch) = (part.block + 1 == plan.k_blocks, (sums.as_mut_ptr(), plan.shape.cols()));
        let whole = (c.cast::<T::Acc>(), c_row);
        let partial = if in_place && product.write == Write::Store { whole } else { scratch };
        let out = if in_place && last { whole } else { partial };
        let ((a, a_row, a_step), (b, b_step, b_col)) = (self.find_a(part, row), self.find_b(part, col));
        let tile = Tile {
            steps: plan.steps(part.block).len(),
            a,
            a_row,
            a_step,
            b,
            b_step,
            b_col,
            cols: cols.len(),
            from: if part.block == 0 { std::ptr::null() } else { partial.0 },
            from_row: partial.1,
            bias: match bias.and_then(T::as_wide) {
                Some(bias) if in_place && last => bias.as_ptr(),
                _ => std::ptr::null(),
            },
            out: out.0,
            out_row: out.1,
            add: in_place && last && product.write == Write::Accumulate,
            next_out: if in_place && last { out.0.wrapping_add(cols.len()) } else { out.0 },
        };
        // SAFETY: A's and B's pointers lead to these rows, columns and steps within the matrices (bounds proven when
        // those were made) or their packed panels; the sums are C's own elements or a whole slot of scratch.
        unsafe { run_tile::<T::Place>(product.runner, plan.shape.lanes, rows.len(), &tile) }
        if last && !in_place {
            let finish = FinishTile {
                sums,
                sums_row: plan.shape.cols(),
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

/// `all` in blocks of so many.
fn blocks(all: &Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = all.end;
    all.clone().step_by(size.max(1)).map(move |start| start..end.min(start + size))
}
