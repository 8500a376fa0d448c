//! Many products of one shape: checks once, then runs them one after the other on all threads, or side by side.

#![allow(unsafe_code)]

use phalanx_tensor::Pool;

use super::element::GemmElem;
use super::epilogue::{Epilogue, Write};
use super::mat::{MatMut, MatRef};
use super::pack::Shared;
use super::plan::is_parallel;
use super::product::Product;
use super::tile::FEW_ROWS;
use crate::simd::{LANES_MAX, Runner};

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

/// [`super::gemm_batched`] on a given instruction set, or, if `kept` is there, [`super::gemm_again`].
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
    if k == 0 && write == Write::Accumulate && epilogue.is_empty() {
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
    if is_better_transposed(&c, k) && epilogue.bias.is_none() {
        // Its transpose is B^T A^T. Factors trade places in each step; nothing else does.
        let batch = Batch { a: batch.b, b: batch.a, ..batch };
        let (a, b, c) = (b.transposed(), a.transposed(), c.transposed());
        return run(runner, pool, batch, a, b, c, (write, epilogue), None);
    }

    let c_strides = c.strides();
    let c = Shared::new(c.data());
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

/// Whether C has so few columns that its rows fill vectors better, or lies in columns. Never true of the transpose, too.
fn is_better_transposed<T>(c: &MatMut<'_, T>, k: usize) -> bool {
    let (m, n, (row, col)) = (c.rows(), c.cols(), c.strides());
    // C is then written across its rows, which is little work beside so many steps.
    let few = if k >= MANY_STEPS_MIN { LANES_MAX / 2 } else { FEW_ROWS };
    if m.min(n) <= few && m.max(n) >= LANES_MAX {
        return n < m;
    }
    row == 1 && col != 1
}

/// A batch that shares B and whose A and C go on where the item before ended is one product with more rows.
fn fold<'a, T: Copy>(batch: Batch, a: MatRef<'a, T>, c: &MatMut<'_, T>) -> Option<(Batch, MatRef<'a, T>)> {
    let goes_on = |stride: usize, row_stride: usize| stride == a.rows() * row_stride;
    (batch.b == 0 && goes_on(batch.a, a.strides().0) && goes_on(batch.c, c.strides().0))
        .then(|| (Batch { count: 1, a: 0, b: 0, c: 0 }, a.with_rows(batch.count * a.rows())))
}
