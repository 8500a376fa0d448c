//! One product carried out: as one tile, or as the plan's jobs.
//!
//! Where C itself can hold the sums (same type, columns side by side, nothing to do afterwards), tiles write there. Else
//! they go to the job's scratch, and from there to C once all of k is summed.

#![allow(unsafe_code)]

use std::any::TypeId;

use phalanx_tensor::Pool;

use super::batch::Batch;
use super::element::{GemmElem, steps_on};
use super::epilogue::{Epilogue, Write};
use super::job::Job;
use super::kernel::run_tile;
use super::mat::MatRef;
use super::pack::Shared;
use super::parts::Parts;
use super::plan::{Plan, Problem, is_parallel, rows_cache_well, share};
use super::scratch::with_scratch;
use super::thin::THIN_ROWS;
use super::tile::{Tile, TileShape};
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
    /// Carries it out on the pool's threads, or on this one alone. `kept` is the panels of a B that further products of this shape
    /// have too: packed by the first of them, if at all.
    ///
    /// # Safety
    ///
    /// C's elements lie within `c`, each has a place of its own, and nobody else touches them meanwhile.
    pub(super) unsafe fn run(&self, pool: Option<&Pool>, kept: Option<&mut Vec<T::Acc>>) {
        let shape = TileShape::of::<T::Acc>(self.runner);
        if let Some(mut tile) = self.only_tile(shape) {
            // SAFETY: all of A and B, where they lie, whose bounds were proven when those were made; C is the caller's.
            return unsafe { run_tile::<T::Place>(self.runner, shape.lanes, self.a.rows(), &mut tile) };
        }
        let pool = pool
            .filter(|pool| pool.threads() > 1 && is_parallel(self.a.rows(), self.b.cols(), self.a.cols()));
        if self.is_thin() {
            // SAFETY: the caller's.
            return unsafe { self.run_thin(pool) };
        }
        let plan = Plan::new(self.problem(), shape);
        let (row_jobs, col_jobs) = pool.map_or((1, 1), |pool| plan.jobs(pool.threads()));
        let job = |job: usize| Job {
            product: self,
            plan: &plan,
            parts: Parts::new(&plan, share(plan.col_panels, col_jobs, job), row_jobs, kept.is_some()),
            packed_b: &[],
        };
        if pool.is_none() && kept.is_none() {
            // SAFETY: the caller's.
            return unsafe { job(0).run() };
        }
        let jobs: Vec<_> = (0..col_jobs).map(job).collect();
        let len = jobs.iter().map(Job::packed_b_len).sum();
        let run = |mut panels: &mut [T::Acc], packs: bool| {
            let jobs = jobs.into_iter().map(|job| {
                let panels = panels.split_off_mut(..job.packed_b_len()).unwrap_or_default();
                if packs {
                    job.pack_together(pool, panels);
                }
                Job { packed_b: panels, ..job }
            });
            let jobs: Vec<_> = jobs.collect();
            // SAFETY: the caller's; jobs have different columns, hence different elements of C.
            let piece = |piece: usize| unsafe { jobs[piece % col_jobs].run() };
            match pool {
                Some(pool) => pool.for_each(row_jobs * col_jobs, piece),
                None => piece(0),
            }
        };
        match kept {
            Some(kept) if kept.is_empty() => {
                kept.resize(len, T::Acc::ZERO);
                run(kept, true);
            }
            Some(kept) => {
                assert_eq!(kept.len(), len, "a product of another shape");
                run(kept, false);
            }
            None => with_scratch(len, |panels| run(panels, true)),
        }
    }

    /// Carries out a batch of products like this one, the first, if each is a single tile: whether they are.
    ///
    /// # Safety
    ///
    /// As [`Product::run`], for every item.
    pub(super) unsafe fn run_tiles(&self, batch: Batch, pool: Option<&Pool>) -> bool {
        let shape = TileShape::of::<T::Acc>(self.runner);
        if self.only_tile(shape).is_none() {
            return false;
        }
        // The last item's bounds; the others lie before.
        let last = batch.count - 1;
        let _ = (self.a.shifted(last * batch.a), self.b.shifted(last * batch.b));
        let pieces = pool.map_or(1, |pool| 4 * pool.threads());
        let piece = |piece: usize| {
            let (Some(tile), items) = (self.only_tile(shape), share(batch.count, pieces, piece)) else {
                return;
            };
            let mut tile = Tile {
                count: items.len(),
                a: tile.a.wrapping_add(items.start * batch.a),
                a_next: batch.a,
                b: tile.b.wrapping_add(items.start * batch.b),
                b_next: batch.b,
                out: tile.out.wrapping_add(items.start * batch.c),
                out_next: batch.c,
                ..tile
            };
            // SAFETY: as in `run`, for each item, whose C is apart from the others'.
            unsafe { run_tile::<T::Place>(self.runner, shape.lanes, self.a.rows(), &mut tile) }
        };
        match pool {
            Some(pool) => pool.for_each(pieces, piece),
            None => piece(0),
        }
        true
    }

    /// The whole product, if it is a single tile that can read A and B and write C where they lie.
    fn only_tile(&self, shape: TileShape) -> Option<Tile<T::Acc>> {
        let (m, n, k) = (self.a.rows(), self.b.cols(), self.a.cols());
        let (b_step, b_col) = self.b.strides();
        let b_contiguous = b_col == 1 || n == 1;
        let fits = match b_contiguous {
            true => n <= shape.widened(m).cols(),
            false => n <= shape.lanes && (b_step == 1 || k == 1),
        };
        if !(fits && m <= shape.rows && self.is_in_place()) {
            return None;
        }
        let (a_row, a_step) = self.a.strides();
        let c = self.c.ptr().wrapping_add(self.c_start).cast();
        Some(Tile {
            steps: k,
            a: wide_start(&self.a),
            a_row,
            a_step,
            b: wide_start(&self.b),
            b_step,
            b_col: if b_contiguous { 1 } else { b_col },
            cols: n,
            bias: self.epilogue.bias.and_then(T::as_wide).map_or(std::ptr::null(), <[T::Acc]>::as_ptr),
            out: c,
            out_row: self.c_strides.0,
            add: self.write == Write::Accumulate,
            ..Tile::default()
        })
    }

    /// Whether it has few rows of halves and a B that can be read where it lies.
    fn is_thin(&self) -> bool {
        let (step, col) = self.b.strides();
        let in_place = col == 1 || self.b.cols() == 1 || step == 1 || self.a.cols() == 1;
        !is_acc::<T>() && self.a.rows() <= THIN_ROWS && in_place
    }

    /// Whether tiles write C itself: its elements are of the sums' type, so that the cast changes nothing.
    pub(super) fn is_in_place(&self) -> bool {
        let neighbours = self.c_strides.1 == 1 || self.b.cols() == 1;
        is_acc::<T>() && neighbours && self.epilogue.activation.is_none()
    }

    fn problem(&self) -> Problem {
        let (m, n, k) = (self.a.rows(), self.b.cols(), self.a.cols());
        let b_contiguous = self.b.strides().1 == 1 || n == 1;
        let (a_row, a_step) = self.a.strides();
        Problem {
            m,
            n,
            k: k.div_ceil(steps_on::<T::Place>(self.runner)),
            readable: is_acc::<T>(),
            a_cacheable: rows_cache_well(m, self.a.strides(), k, size_of::<T>()),
            a_rows_contiguous: a_row == 1,
            a_steps_contiguous: a_step == 1 && a_row != 1,
            b_contiguous,
            b_turnable: !b_contiguous && (self.b.strides().0 == 1 || k == 1),
        }
    }
}

/// Whether the elements are of the sums' type.
fn is_acc<T: GemmElem>() -> bool {
    TypeId::of::<T>() == TypeId::of::<T::Acc>()
}

/// Where a matrix begins, if its elements are of the sums' type; else nowhere.
pub(super) fn wide_start<T: GemmElem>(matrix: &MatRef<'_, T>) -> *const T::Acc {
    T::as_wide(matrix.data()).map_or(std::ptr::null(), <[T::Acc]>::as_ptr)
}
