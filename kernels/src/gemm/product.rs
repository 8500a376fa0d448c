//! One product carried out, or a batch of them: [`run`] folds and transposes where that helps, then chooses among a single tile, a thin product
//! (`thin.rs`) and macro-kernels (`macro_kernel.rs`), and splits the work over threads.
//!
//! If C itself can hold the sums (same type, columns side by side, no activation), tiles write there. Else
//! sums go to scratch memory, and the epilogue takes them to C once all of k is summed.

#![allow(unsafe_code)]

use std::any::TypeId;
#[cfg(target_arch = "x86_64")]
use std::ops::Range;

use phalanx_tensor::{Pool, bf16, even_piece};

#[cfg(target_arch = "x86_64")]
use super::amx::TileProduct;
use super::chunks::{ChunkQueue, in_turns};
use super::element::{GemmElem, steps_on};
#[cfg(target_arch = "x86_64")]
use super::epilogue::FinishTile;
use super::epilogue::{Epilogue, Write};
use super::macro_kernel::MacroKernel;
use super::mat::{MatMut, MatRef, SharedMut};
use super::micro_kernel::run_tile;
use super::plan::{BlockingPlan, FAR_B_MIN, Problem, is_parallel, rows_cache_well};
use super::thin::THIN_ROWS;
use super::tile::{FEW_ROWS, Tile, TileShape};
use crate::scratch::with_scratch;
use crate::simd::{Float, LANES_MAX, Runner};

/// Ranges of columns for each thread that multiplies all rows. It keeps no panel of B, and A is packed before, so that more ranges cost nothing: threads
/// that have more time take more.
const RANGES: usize = 4;

/// A product to carry out. C begins at `c_start` of `c`.
pub(super) struct Product<'a, T: GemmElem> {
    pub(super) runner: Runner,
    pub(super) a: MatRef<'a, T>,
    pub(super) b: MatRef<'a, T>,
    pub(super) c: SharedMut<'a, T>,
    pub(super) c_start: usize,
    pub(super) c_strides: (usize, usize),
    pub(super) write: Write,
    pub(super) epilogue: Epilogue<'a, T>,
}

impl<T: GemmElem> Product<'_, T> {
    /// Carries the product out on the pool's threads, or on this one alone. `kept` is for a B that further products of this shape share: the
    /// first of them packs B's panels into it, if B is packed at all.
    ///
    /// # Safety
    ///
    /// C's elements lie within `c`, each has a place of its own, and no other thread touches them meanwhile.
    pub(super) unsafe fn run(&self, pool: Option<&Pool>, kept: Option<&mut Vec<T::Acc>>) {
        let shape = TileShape::of::<T::Acc>(self.runner);
        if let Some(mut tile) = self.only_tile(shape) {
            // SAFETY: all of A and B, in place, whose bounds were proven when those were made; C is the caller's.
            return unsafe { run_tile::<T::PanelElem>(self.runner, shape.lanes, self.a.rows(), &mut tile) };
        }
        let pool = pool
            .filter(|pool| pool.threads() > 1 && is_parallel(self.a.rows(), self.b.cols(), self.a.cols()));
        #[cfg(target_arch = "x86_64")]
        if let (Some(packer), Some(product)) = (self.runner.for_tiles(), self.of_bf16()) {
            let Product { a, b, .. } = *product;
            // SAFETY: the caller's; `finish` is called for elements that no other thread has.
            let finish = |sums: &mut [f32], row, rows, cols| unsafe { product.finish(sums, row, rows, cols) };
            return TileProduct { packer, a, b, begin: None, finish: &finish }.run(pool);
        }
        if self.is_thin() {
            // SAFETY: the caller's.
            return unsafe { self.run_thin(pool) };
        }
        let plan = BlockingPlan::new(self.problem(), shape);
        let (row_threads, col_ranges) = pool.map_or((1, 1), |pool| plan.thread_grid(pool.threads()));
        let plan = if row_threads == 1 && kept.is_none() { plan.for_all_rows() } else { plan };
        if plan.by_panel {
            // SAFETY: the caller's.
            return unsafe { run_by_panel(&[self], &plan, pool) };
        }
        let macro_kernel = |range: usize| MacroKernel {
            product: self,
            plan: &plan,
            chunks: ChunkQueue::new(
                &plan,
                even_piece(plan.col_panels, col_ranges, range),
                row_threads,
                kept.is_some(),
            ),
            packed_a: &[],
            packed_b: &[],
        };
        if pool.is_none() && kept.is_none() && !plan.shares_packed_a(macro_kernel(0).chunks.col_blocks()) {
            // SAFETY: the caller's.
            return unsafe { macro_kernel(0).run() };
        }
        let macro_kernels: Vec<_> = (0..col_ranges).map(macro_kernel).collect();
        let col_blocks = macro_kernels.iter().map(|one| one.chunks.col_blocks()).sum();
        let a_len =
            if plan.shares_packed_a(col_blocks) { plan.a_places(plan.problem.m, plan.problem.k) } else { 0 };
        let b_len = macro_kernels.iter().map(MacroKernel::packed_b_len).sum();
        let run = |mut panels: &mut [T::Acc], packs_b: bool| {
            with_scratch(a_len, |packed_a| {
                macro_kernels[0].pack_a_together(pool, packed_a);
                let packed_a: &[T::Acc] = packed_a;
                let packed = macro_kernels.into_iter().map(|one| {
                    let panels = panels.split_off_mut(..one.packed_b_len()).unwrap_or_default();
                    if packs_b {
                        one.pack_b_together(pool, panels);
                    }
                    MacroKernel { packed_a, packed_b: panels, ..one }
                });
                let macro_kernels: Vec<_> = packed.collect();
                // SAFETY: the caller's; macro-kernels have different columns, hence different elements of C.
                let piece = |piece: usize| unsafe { macro_kernels[piece % col_ranges].run() };
                match pool {
                    Some(pool) => pool.for_each(row_threads * col_ranges, piece),
                    None => piece(0),
                }
            });
        };
        match kept {
            Some(kept) if kept.is_empty() => {
                kept.resize(b_len, T::Acc::ZERO);
                run(kept, true);
            }
            Some(kept) => {
                assert_eq!(kept.len(), b_len, "a product of another shape");
                run(kept, false);
            }
            None => with_scratch(b_len, |panels| run(panels, true)),
        }
    }

    /// Whether it is made by tiles of matrices, see `amx.rs`.
    pub(super) fn has_tiles(&self) -> bool {
        self.runner.for_tiles().is_some() && TypeId::of::<T>() == TypeId::of::<bf16>()
    }

    /// The same product, if its elements are bf16.
    #[cfg(target_arch = "x86_64")]
    fn of_bf16(&self) -> Option<&Product<'_, bf16>> {
        // SAFETY: the same type.
        (TypeId::of::<T>() == TypeId::of::<bf16>()).then(|| unsafe { &*std::ptr::from_ref(self).cast() })
    }

    /// Takes finished sums, rows of `sums_row` elements, to these rows and columns of C.
    ///
    /// # Safety
    ///
    /// [`Product::run`]'s, of these rows and columns.
    #[cfg(target_arch = "x86_64")]
    unsafe fn finish(&self, sums: &mut [T::Acc], sums_row: usize, rows: Range<usize>, cols: Range<usize>) {
        let (c_row, c_col) = self.c_strides;
        let tile = FinishTile {
            sums,
            sums_row,
            bias: self.epilogue.bias.map(|bias| &bias[cols.clone()]),
            activation: self.epilogue.activation,
            write: self.write,
            rows: rows.len(),
            cols: cols.len(),
            c: self.c.ptr().wrapping_add(self.c_start + rows.start * c_row + cols.start * c_col),
            c_strides: self.c_strides,
        };
        // SAFETY: the caller's.
        unsafe { tile.run_on(self.runner) }
    }

    /// Carries out a batch of products whose first is this one, if each is a single tile. Returns whether they are.
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
            let (Some(tile), items) = (self.only_tile(shape), even_piece(batch.count, pieces, piece)) else {
                return;
            };
            let mut tile = Tile {
                count: items.len(),
                a: tile.a.wrapping_add(items.start * batch.a),
                a_next: batch.a,
                b: tile.b.wrapping_add(items.start * batch.b),
                b_next: batch.b,
                from: match self.write {
                    Write::Continue => tile.from.wrapping_add(items.start * batch.c),
                    Write::Store | Write::Accumulate => std::ptr::null(),
                },
                from_next: batch.c,
                out: tile.out.wrapping_add(items.start * batch.c),
                out_next: batch.c,
                ..tile
            };
            // SAFETY: as in `run`, for each item, whose C is apart from the others'.
            unsafe { run_tile::<T::PanelElem>(self.runner, shape.lanes, self.a.rows(), &mut tile) }
        };
        match pool {
            Some(pool) => pool.for_each(pieces, piece),
            None => piece(0),
        }
        true
    }

    /// The whole product, if it is a single tile that can read A and B and write C in place.
    fn only_tile(&self, shape: TileShape) -> Option<Tile<T::Acc>> {
        let (m, n, k) = (self.a.rows(), self.b.cols(), self.a.cols());
        let (b_step, b_col) = self.b.strides();
        let b_contiguous = b_col == 1 || n == 1;
        let fits = match b_contiguous {
            _ if self.b.is_in_panels() => false,
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
            from: if self.write == Write::Continue { c } else { std::ptr::null() },
            from_row: self.c_strides.0,
            out: c,
            out_row: self.c_strides.0,
            add: self.write == Write::Accumulate,
            ..Tile::default()
        })
    }

    /// Whether [`Product::run_thin`] is for this product: few rows, and a B that can be read in place. Tiles read a small B of f32 as fast, unless it
    /// is in panels.
    pub(super) fn is_thin(&self) -> bool {
        if self.a.rows() > THIN_ROWS {
            return false;
        }
        let Problem { n, b_contiguous, b_transposable, b_in_panels, .. } = self.problem();
        if b_in_panels {
            return true;
        }
        let is_far = n.saturating_mul(self.a.cols()) >= FAR_B_MIN && self.write != Write::Continue;
        if is_acc::<T>() { b_transposable && is_far } else { b_contiguous || b_transposable }
    }

    /// Whether tiles write C itself, whose elements have the type of the sums.
    pub(super) fn is_in_place(&self) -> bool {
        let neighbours = self.c_strides.1 == 1 || self.b.cols() == 1;
        is_acc::<T>() && neighbours && self.epilogue.activation.is_none()
    }

    pub(super) fn problem(&self) -> Problem {
        let (m, n, k) = (self.a.rows(), self.b.cols(), self.a.cols());
        let b_contiguous = self.b.strides().1 == 1 || n == 1;
        let (a_row, a_step) = self.a.strides();
        Problem {
            m,
            n,
            k: k.div_ceil(steps_on::<T::PanelElem>(self.runner)),
            readable: is_acc::<T>(),
            a_cacheable: rows_cache_well(m, self.a.strides(), k, size_of::<T>()),
            a_rows_contiguous: a_row == 1,
            a_steps_contiguous: a_step == 1 && a_row != 1,
            b_contiguous,
            b_transposable: !b_contiguous && (self.b.strides().0 == 1 || k == 1),
            b_in_panels: self.b.is_in_panels(),
        }
    }
}

/// Whether the elements are of the sums' type.
pub(super) fn is_acc<T: GemmElem>() -> bool {
    TypeId::of::<T>() == TypeId::of::<T::Acc>()
}

/// Where a matrix begins, if its elements are of the sums' type; else null.
pub(super) fn wide_start<T: GemmElem>(matrix: &MatRef<'_, T>) -> *const T::Acc {
    T::as_wide(matrix.data()).map_or(std::ptr::null(), <[T::Acc]>::as_ptr)
}

/// Carries out products of one A whose columns together have this plan, which is [by panel](BlockingPlan::by_panel): A is packed once.
///
/// # Safety
///
/// [`Product::run`]'s, for each.
pub(super) unsafe fn run_by_panel<T: GemmElem>(
    products: &[&Product<'_, T>],
    plan: &BlockingPlan,
    pool: Option<&Pool>,
) {
    let Problem { m, n, k, .. } = plan.problem;
    let pool = pool.filter(|_| is_parallel(m, n, k));
    let threads = pool.map_or(1, Pool::threads);
    // One thread, too, takes more than one block of columns.
    let shares = plan.shares_packed_a(2);
    let ranges = if shares && threads > 1 { RANGES * threads } else { threads };
    let plans: Vec<_> = products.iter().map(|product| plan.of_columns(product.b.cols())).collect();
    with_scratch(if shares { plan.a_places(m, k) } else { 0 }, |packed_a| {
        let macro_kernel = |nth: usize, cols, packed_a| MacroKernel {
            product: products[nth],
            plan: &plans[nth],
            chunks: ChunkQueue::new(&plans[nth], cols, 1, false),
            packed_a,
            packed_b: &[],
        };
        macro_kernel(0, 0..1, &[]).pack_a_together(pool, packed_a);
        let mut macro_kernels = Vec::new();
        for (nth, of_one) in plans.iter().enumerate() {
            let ranges = (of_one.col_panels * ranges / plan.col_panels).clamp(1, of_one.col_panels);
            for range in 0..ranges {
                macro_kernels.push(macro_kernel(nth, even_piece(of_one.col_panels, ranges, range), packed_a));
            }
        }
        // SAFETY: the caller's; macro-kernels have different columns, hence different elements of C.
        in_turns(pool, macro_kernels.len(), |piece| unsafe { macro_kernels[piece].run() });
    });
}

/// Multiplications from which a single product keeps all threads busy by itself.
const LARGE_WORK_MIN: usize = 1 << 25;

/// Steps from which a narrow product is better transposed.
const MANY_STEPS_MIN: usize = 128;

/// How the products of a batch lie: item i is the first one shifted by i strides. A stride of 0 uses A or B again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    /// How many products.
    pub(crate) count: usize,
    /// Elements from one A to the next.
    pub(crate) a: usize,
    /// Elements from one B to the next.
    pub(crate) b: usize,
    /// Elements from one C to the next.
    pub(crate) c: usize,
}

impl Batch {
    /// # Panics
    ///
    /// If the shapes do not fit together, or two items share a place in C.
    pub(super) fn check<T: GemmElem>(
        self,
        a: &MatRef<'_, T>,
        b: &MatRef<'_, T>,
        c: &MatMut<'_, T>,
        epilogue: &Epilogue<'_, T>,
    ) {
        let (m, n, k) = (a.rows(), b.cols(), a.cols());
        assert!(
            b.rows() == k && c.rows() == m && c.cols() == n,
            "{m} x {k} times {} x {n} does not give {} x {}",
            b.rows(),
            c.rows(),
            c.cols()
        );
        assert!(
            epilogue.bias.is_none_or(|bias| bias.len() == n),
            "the bias needs a value for each of {n} columns"
        );
        assert!(self.count == 1 || c.repeats(self.count, self.c), "a batch of {self:?} does not fit C");
    }
}

/// [`super::gemm_batched`] on a given instruction set; with `kept`, [`super::gemm_again`].
#[allow(clippy::too_many_arguments)] // of one entry point
pub(super) fn run<T: GemmElem>(
    runner: Runner,
    pool: Option<&Pool>,
    batch: Batch,
    a: MatRef<'_, T>,
    b: MatRef<'_, T>,
    mut c: MatMut<'_, T>,
    (write, epilogue): (Write, Epilogue<'_, T>),
    kept: Option<&mut Vec<T::Acc>>,
) {
    let (m, n, k) = (a.rows(), b.cols(), a.cols());
    batch.check(&a, &b, &c, &epilogue);
    if m == 0 || n == 0 || batch.count == 0 {
        return;
    }
    if k == 0 && write != Write::Store && epilogue.is_empty() {
        return; // Adding a zero would turn -0 into 0.
    }
    if batch.count > 1
        && let Some((batch, a)) = fold(batch, a, &c)
    {
        let c_strides = c.strides();
        let rows = a.rows();
        let c = MatMut::new(c.data(), rows, n, c_strides.0, c_strides.1);
        return run(runner, pool, batch, a, b, c, (write, epilogue), kept);
    }
    assert!(
        !b.is_in_panels() || batch.count == 1 && write != Write::Continue,
        "one product of its own by B's panels"
    );
    if write == Write::Continue {
        let fits = is_acc::<T>() && (c.strides().1 == 1 || n == 1) && epilogue.is_empty();
        assert!(fits, "a product that goes on from C writes sums to its rows");
    } else if is_better_transposed(&c, k) && epilogue.bias.is_none() && !b.is_in_panels() {
        // The transpose of A B is B^T A^T: the factors of each multiplication are exchanged, which changes no bit.
        let batch = Batch { a: batch.b, b: batch.a, ..batch };
        let (a, b, c) = (b.transposed(), a.transposed(), c.transposed());
        return run(runner, pool, batch, a, b, c, (write, epilogue), None);
    }

    let c_strides = c.strides();
    let c = SharedMut::new(c.data());
    let product = |i: usize| Product {
        runner,
        a: a.shifted(i * batch.a),
        b: b.shifted(i * batch.b),
        c,
        c_start: i * batch.c,
        c_strides,
        write,
        epilogue,
    };
    let work = m.saturating_mul(n).saturating_mul(k);
    if batch.count > 1 {
        let pool = pool.filter(|_| is_parallel(work, batch.count, 1));
        // SAFETY: as for each item below.
        if unsafe { product(0).run_tiles(batch, pool) } {
            return;
        }
    }
    // SAFETY: `repeats` above, or the bounds that C was made with: every item's C lies within the slice and apart from the others',
    // and the slice is borrowed for us alone.
    let item = |i: usize, pool: Option<&Pool>, kept: Option<&mut Vec<T::Acc>>| unsafe {
        product(i).run(pool, kept);
    };
    let side_by_side = |pool: &Pool| {
        batch.count > 1
            && is_parallel(work, batch.count, 1)
            && (batch.count >= 4 * pool.threads() || work < LARGE_WORK_MIN)
    };
    match pool {
        Some(pool) if side_by_side(pool) => pool.for_each(batch.count, |i| item(i, None, None)),
        _ if batch.count == 1 => item(0, pool, kept),
        _ => (0..batch.count).for_each(|i| item(i, pool, None)),
    }
}

/// Whether C has so few columns that C^T fills vectors better, or C is stored by columns. Never true of both C and C^T.
fn is_better_transposed<T>(c: &MatMut<'_, T>, k: usize) -> bool {
    let (m, n, (row, col)) = (c.rows(), c.cols(), c.strides());
    // C^T is then written with a stride, which takes little time beside so many steps.
    let few = if k >= MANY_STEPS_MIN { LANES_MAX / 2 } else { FEW_ROWS };
    if m.min(n) <= few && m.max(n) >= LANES_MAX {
        return n < m;
    }
    row == 1 && col != 1
}

/// A batch that shares B, and in which each item's A and C begin where the item before ends, is one product with more rows.
fn fold<'a, T: Copy>(batch: Batch, a: MatRef<'a, T>, c: &MatMut<'_, T>) -> Option<(Batch, MatRef<'a, T>)> {
    let goes_on = |stride: usize, row_stride: usize| stride == a.rows() * row_stride;
    (batch.b == 0 && goes_on(batch.a, a.strides().0) && goes_on(batch.c, c.strides().0))
        .then(|| (Batch { count: 1, a: 0, b: 0, c: 0 }, a.with_rows(batch.count * a.rows())))
}
