//! Products against a *twin* (a slow reference written from the formula), bit for bit, on every instruction set this
//! CPU has.

mod panels;

use std::any::TypeId;
use std::ops::Range;

use half::{bf16, f16};
use phalanx_tensor::Pool;

use super::element::steps_on;
use super::*;
use crate::ops::Gelu;
use crate::simd::{Float, Isa, IsaName, Kernel, Vector};

/// Numbers with full mantissas, so that another order of additions shows.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize
    }

    fn values<T: GemmElem>(&mut self, len: usize) -> Vec<T> {
        let draw = |this: &mut Self| T::Acc::from_f64(this.next() as f64 / (1u64 << 30) as f64 - 1.0);
        (0..len).map(|_| T::narrow(draw(self))).collect()
    }
}

/// How a matrix lies in its slice.
#[derive(Clone, Copy, Debug)]
enum Lie {
    Rows,
    Cols,
    /// Column stride 2, rows apart by some more.
    Sparse,
}

const LIES: [Lie; 3] = [Lie::Rows, Lie::Cols, Lie::Sparse];

impl Lie {
    fn strides(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Lie::Rows => (cols.max(1), 1),
            Lie::Cols => (1, rows.max(1)),
            Lie::Sparse => (2 * cols + 3, 2),
        }
    }

    fn len(self, rows: usize, cols: usize) -> usize {
        let (row, col) = self.strides(rows, cols);
        if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row + (cols - 1) * col + 1 }
    }
}

/// A batch of products with all that may vary.
#[derive(Clone, Copy, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    lies: (Lie, Lie, Lie),
    batch: usize,
    /// One B for the whole batch.
    share_b: bool,
    write: Write,
    bias: bool,
    activation: Option<Gelu>,
}

impl Case {
    fn plain(m: usize, n: usize, k: usize) -> Case {
        let lies = (Lie::Rows, Lie::Rows, Lie::Rows);
        Case { m, n, k, lies, batch: 1, share_b: false, write: Write::Store, bias: false, activation: None }
    }

    fn batch(&self) -> Batch {
        let Case { m, n, k, lies, .. } = *self;
        let b = if self.share_b { 0 } else { lies.1.len(k, n) };
        Batch { count: self.batch, a: lies.0.len(m, k), b, c: lies.2.len(m, n) }
    }
}

/// One activation of one number, on the instruction set in question.
struct Activate<T>(T, Gelu);

impl<T: Float> Kernel for Activate<T> {
    type Output = T;

    #[inline(always)]
    fn run<S: Isa>(self) -> T {
        let mut out = [T::ZERO];
        self.1.apply(T::Vec::<S>::splat(self.0)).store_partial(&mut out);
        out[0]
    }
}

/// The product by the formula, each step on its own.
fn twin<T: GemmElem>(case: &Case, runner: Runner, a: &[T], b: &[T], bias: Option<&[T]>, c: &mut [T]) {
    let Case { m, n, k, lies, .. } = *case;
    let (a_strides, b_strides, c_strides) =
        (lies.0.strides(m, k), lies.1.strides(k, n), lies.2.strides(m, n));
    let batch = case.batch();
    let has_tiles = runner.isa() == IsaName::Amx && TypeId::of::<T>() == TypeId::of::<bf16>();
    let flushes = has_tiles || steps_on::<T::PanelElem>(runner) == 2;
    let flush = |x: T::Acc| {
        let tiny = flushes && x.to_f64().abs() < f64::from(f32::MIN_POSITIVE);
        if tiny { T::Acc::from_f64(0f64.copysign(x.to_f64())) } else { x }
    };
    for (item, i, j) in
        (0..case.batch).flat_map(|item| (0..m).flat_map(move |i| (0..n).map(move |j| (item, i, j))))
    {
        let place = &mut c[item * batch.c + i * c_strides.0 + j * c_strides.1];
        let mut sum = if case.write == Write::Continue { place.widen() } else { T::Acc::ZERO };
        let add = |sum: T::Acc, l: usize| {
            let x = flush(a[item * batch.a + i * a_strides.0 + l * a_strides.1].widen());
            let y = flush(b[item * batch.b + l * b_strides.0 + j * b_strides.1].widen());
            flush(x.mul_add(y, sum))
        };
        if has_tiles {
            // The instruction's order: even and odd steps of a block of 32 have a chain each.
            for block in (0..k).step_by(32) {
                let steps = block..(block + 32).min(k);
                let chain = |odd: usize| steps.clone().skip(odd).step_by(2).fold(T::Acc::ZERO, add);
                sum = flush(sum + flush(chain(0) + chain(1)));
            }
        } else {
            sum = (0..k).fold(sum, add);
        }
        let mut value = T::narrow(sum);
        if let Some(bias) = bias {
            value = T::narrow(value.widen() + bias[j].widen());
        }
        if let Some(activation) = case.activation {
            value = T::narrow(runner.run(Activate(value.widen(), activation)));
        }
        let nothing = k == 0 && bias.is_none() && case.activation.is_none();
        *place = match case.write {
            Write::Store | Write::Continue => value,
            Write::Accumulate if nothing => *place,
            Write::Accumulate => T::narrow(place.widen() + value.widen()),
        };
    }
}

fn check<T: GemmElem>(case: Case, pools: &[Pool]) {
    let Case { m, n, k, lies, .. } = case;
    let batch = case.batch();
    let mut draws = Draws((m * 31 + n) as u64 * 31 + k as u64);
    let a: Vec<T> = draws.values(batch.a * case.batch.max(1));
    let b: Vec<T> = draws.values(lies.1.len(k, n) * case.batch.max(1));
    let bias: Vec<T> = draws.values(n);
    let bias = case.bias.then_some(&bias[..]);
    let before: Vec<T> = draws.values(batch.c * case.batch.max(1));
    compare(case, pools, (&a, &b, bias), &before);
}

/// The products of these operands against the twin's, on every instruction set.
fn compare<T: GemmElem>(case: Case, pools: &[Pool], (a, b, bias): (&[T], &[T], Option<&[T]>), before: &[T]) {
    let Case { m, n, k, lies, .. } = case;
    let batch = case.batch();
    for runner in Runner::all() {
        let (isa, mut want) = (runner.isa(), before.to_vec());
        twin(&case, runner, a, b, bias, &mut want);
        let strides = (lies.0.strides(m, k), lies.1.strides(k, n), lies.2.strides(m, n));
        let plain = MatRef::new(b, k, n, strides.1.0, strides.1.1);
        let width = TileShape::of::<T::Acc>(runner).cols();
        let panels = panels::of(plain, width, runner);
        let is_panelled = case.batch == 1 && case.write != Write::Continue;
        // As it is, as the first of a series, and as the second; then by a B in panels.
        let mut kept = Vec::new();
        let ways = if is_panelled { 4 } else { 3 };
        for (pool, nth) in pools.iter().flat_map(|pool| (0..ways).map(move |nth| (pool, nth))) {
            if nth < 2 {
                kept.clear();
            }
            let mut got = before.to_vec();
            product::run(
                runner,
                Some(pool),
                batch,
                MatRef::new(a, m, k, strides.0.0, strides.0.1),
                if nth == 3 { MatRef::in_panels(&panels, k, n, width) } else { plain },
                MatMut::new(&mut got, m, n, strides.2.0, strides.2.1),
                (case.write, Epilogue { bias, activation: case.activation }),
                (1..3).contains(&nth).then_some(&mut kept),
            );
            for (place, (got, want)) in got.iter().zip(&want).enumerate() {
                let (got, want) = (got.widen().to_f64(), want.widen().to_f64());
                let threads = pool.threads();
                assert!(
                    got.to_bits() == want.to_bits(),
                    "{case:?} {isa} {threads} threads, way {nth}: place {place} is {got:e}, not {want:e}"
                );
            }
        }
    }
}

fn pools() -> Vec<Pool> {
    [1, 2, 8].map(Pool::new).into_iter().collect()
}

const SIZES: [usize; 6] = [0, 1, 7, 16, 33, 129];

#[test]
fn every_element_is_one_chain_of_fused_multiply_adds() {
    let pools = pools();
    for m in SIZES {
        for n in SIZES {
            for k in SIZES {
                check::<f32>(Case::plain(m, n, k), &pools);
                check::<f64>(Case::plain(m, n, k), &pools[1..2]);
                check::<bf16>(Case::plain(m, n, k), &pools[1..2]);
            }
        }
    }
}

#[test]
fn pairs_of_bf16_are_one_chain_for_numbers_of_any_size() {
    let pools = pools();
    let mut draws = Draws(3);
    for (m, n, k) in
        [(1, 1, 1), (7, 33, 5), (17, 40, 33), (3, 5, 1031), (4, 70, 67), (1, 300, 40), (32, 65, 97)]
    {
        for lie in 0..9 {
            let case = Case { lies: (LIES[lie % 3], LIES[lie / 3], Lie::Rows), ..Case::plain(m, n, k) };
            // Any bits but infinities and NaN: subnormal numbers, zeros of both signs, sums that vanish.
            let mut any = |len: usize, exponents: usize| -> Vec<bf16> {
                let mut one = || {
                    let (bits, exponent) = (draws.next() as u16 & 0x807F, draws.next() % exponents);
                    bf16::from_bits(bits | (exponent as u16) << 7)
                };
                (0..len).map(|_| one()).collect()
            };
            for exponents in [1, 70, 130] {
                let a = any(case.lies.0.len(m, k), exponents);
                let b = any(case.lies.1.len(k, n), exponents.min(128));
                compare(case, &pools[1..2], (&a, &b, None), &vec![bf16::ZERO; m * n]);
            }
        }
    }
}

#[test]
fn rows_that_go_down_in_several_runs_change_no_bit() {
    for write in [Write::Store, Write::Accumulate] {
        check::<f32>(Case { write, ..Case::plain(540, 65, 128) }, &pools());
        check::<bf16>(Case { write, ..Case::plain(540, 300, 40) }, &pools());
        // With AVX-512 panels of 12 rows, whose tiles pack them, and one of 11, which is packed before its tiles run. (Fewer steps are read in place.)
        let lies = (Lie::Cols, Lie::Rows, Lie::Rows);
        check::<f32>(Case { write, lies, ..Case::plain(59, 257, 600) }, &pools());
    }
}

#[test]
fn strides_and_transposes_change_no_bit() {
    let pools = pools();
    for (m, n, k) in
        [(33, 40, 0), (1, 33, 7), (7, 129, 33), (33, 7, 129), (60, 129, 16), (60, 65, 17), (129, 129, 33)]
    {
        for lie in 0..27 {
            let lies = (LIES[lie % 3], LIES[lie / 3 % 3], LIES[lie / 9]);
            for write in [Write::Store, Write::Accumulate] {
                let case = Case { lies, write, ..Case::plain(m, n, k) };
                check::<f32>(case, &pools[..2]);
                // The other types share the paths; some of the ways are enough.
                if lie % 4 == 1 {
                    check::<f64>(case, &pools[1..2]);
                    check::<bf16>(case, &pools[1..2]);
                    check::<f16>(case, &pools[1..2]);
                }
            }
        }
    }
}

/// Each product goes on from C, and so do the parts of one: its steps come in two products and have the bits of one.
#[test]
fn a_product_goes_on_from_c() {
    let pools = pools();
    for (m, n, k) in [
        (1, 1, 1),
        (1, 1, 700),
        (3, 5, 0),
        (2, 300, 33),
        (300, 2, 129),
        (33, 7, 129),
        (70, 129, 1100),
        (129, 70, 33),
    ] {
        for lies in [(Lie::Rows, Lie::Rows, Lie::Rows), (LIES[1], LIES[2], Lie::Rows)] {
            for batch in [1, 3] {
                let case = Case { lies, batch, write: Write::Continue, ..Case::plain(m, n, k) };
                check::<f32>(case, &pools);
                check::<f64>(case, &pools[..2]);
            }
        }
    }
    let (m, n, k) = (33, 70, 1200);
    let mut draws = Draws(5);
    let (a, b): (Vec<f32>, Vec<f32>) = (draws.values(m * k), draws.values(k * n));
    let mut whole = vec![0f32; m * n];
    let of = |steps: Range<usize>| {
        (
            MatRef::new(&a[steps.start..], m, steps.len(), k, 1),
            MatRef::row_major(&b[steps.start * n..], steps.len(), n),
        )
    };
    let run = |c: &mut [f32], steps: Range<usize>, write: Write| {
        let (a, b) = of(steps);
        gemm(&pools[1], a, b, MatMut::row_major(c, m, n), write, Epilogue::default());
    };
    run(&mut whole, 0..k, Write::Store);
    for cut in [1, 511, 512, 513, 1199] {
        let mut parts = vec![0f32; m * n];
        run(&mut parts, 0..cut, Write::Continue);
        run(&mut parts, cut..k, Write::Continue);
        assert!(std::iter::zip(&parts, &whole).all(|(x, y)| x.to_bits() == y.to_bits()), "cut at {cut}");
    }
}

#[test]
fn few_rows_or_columns_change_no_bit() {
    let pools = pools();
    for (m, n) in
        (1..=4).flat_map(|m| (1..=4).map(move |n| (m, n))).chain([(1, 70), (3, 129), (14, 33), (29, 1)])
    {
        for (which, k) in [1, 15, 16, 33, 517].into_iter().enumerate() {
            // Of the larger ones a third is enough.
            for lie in (0..27).filter(|lie| m * n <= 16 || (lie + lie / 3 + lie / 9 + which) % 3 == 0) {
                let lies = (LIES[lie % 3], LIES[lie / 3 % 3], LIES[lie / 9]);
                let write = if (lie + which) % 2 == 0 { Write::Store } else { Write::Accumulate };
                let case = Case { lies, write, bias: (lie + m + n) % 3 == 0, ..Case::plain(m, n, k) };
                check::<f32>(case, &pools[..1]);
                match (lie + which + m) % 5 {
                    0 => check::<f64>(Case { batch: 2, ..case }, &pools[..1]),
                    1 => check::<bf16>(case, &pools[..1]),
                    2 => check::<f16>(Case { batch: 3, share_b: true, ..case }, &pools[..1]),
                    3 => check::<f32>(Case { activation: Some(Gelu::Exact), ..case }, &pools[..1]),
                    _ => check::<f32>(Case { batch: 9, ..case }, &pools[1..2]),
                }
            }
        }
    }
    // Enough work for several threads.
    let large = [(1, 1100, 517), (1100, 1, 517), (2, 517, 1100), (517, 3, 700), (400, 7, 200)];
    for (m, n, k) in large.into_iter().chain([(4, 299, 129), (16, 700, 70), (31, 300, 33)]) {
        for lie in 0..9 {
            let lies = (LIES[lie % 3], LIES[lie / 3], Lie::Rows);
            let case = Case { lies, ..Case::plain(m, n, k) };
            check::<f32>(case, &pools);
            check::<bf16>(case, &pools[1..2]);
            let case = Case { bias: true, write: Write::Accumulate, activation: Some(Gelu::Tanh), ..case };
            check::<f32>(case, &pools[..1]);
            check::<f64>(Case { batch: 2, share_b: true, ..case }, &pools[..1]);
            check::<f16>(case, &pools[..1]);
        }
    }
}

#[test]
fn blocks_of_k_change_no_bit() {
    let pools = pools();
    // Among them: panels of A, of B and of both packed by tiles, whole ones and the last; rows a multiple of 4 KiB apart.
    for (m, n, k) in [(5, 40, 1025), (30, 20, 2500), (129, 65, 1100), (64, 33, 2049), (100, 70, 1024)] {
        for (a, b) in [(Lie::Rows, Lie::Rows), (Lie::Cols, Lie::Cols), (Lie::Cols, Lie::Rows)] {
            for (write, bias) in [(Write::Store, false), (Write::Accumulate, true)] {
                let case = Case { lies: (a, b, Lie::Rows), write, bias, ..Case::plain(m, n, k) };
                check::<f32>(case, &pools);
                check::<f64>(case, &pools[2..]);
                check::<f16>(case, &pools[2..]);
            }
        }
    }
}

#[test]
fn panels_of_b_that_are_packed_one_by_one_change_no_bit() {
    let pools = pools();
    let case = |m, n| Case { lies: (Lie::Rows, Lie::Cols, Lie::Rows), ..Case::plain(m, n, 1100) };
    // In two blocks of k; the last panels of rows and of columns are smaller.
    for (write, bias) in [(Write::Store, true), (Write::Accumulate, false)] {
        check::<f32>(Case { write, bias, ..case(83, 265) }, &pools);
        check::<f64>(Case { write, bias, ..case(83, 265) }, &pools[..1]);
        check::<bf16>(Case { write, bias, ..case(83, 265) }, &pools[..2]);
        check::<f16>(Case { write, bias, activation: Some(Gelu::Tanh), ..case(83, 265) }, &pools[..1]);
    }
    // Panels of 12, 13 and 14 rows, last ones of fewer, and last columns of a tile, of one vector, or of parts of vectors.
    for (m, n) in [(72, 288), (81, 256), (82, 272), (84, 240), (85, 283), (86, 245), (87, 257), (88, 285)] {
        check::<f32>(case(m, n), &pools[..1]);
        check::<f64>(case(m, n), &pools[..1]);
    }
}

#[test]
fn parts_that_threads_take_in_turns_change_no_bit() {
    let pools = [2, 5].map(Pool::new);
    let case = |(m, n, k), b| Case { lies: (Lie::Cols, b, Lie::Rows), ..Case::plain(m, n, k) };
    // B packed together, or by tiles of each thread, and held.
    for b in [Lie::Cols, Lie::Rows] {
        check::<f32>(case((500, 40, 600), b), &pools);
        check::<bf16>(Case { write: Write::Accumulate, ..case((500, 40, 600), b) }, &pools);
    }
    // Held in two blocks of columns, and too long to be held.
    check::<f32>(case((521, 520, 2040), Lie::Rows), &pools[..1]);
    check::<f32>(case((40, 33, 34_000), Lie::Cols), &pools[..1]);
}

#[test]
fn an_epilogue_has_the_bits_of_separate_steps() {
    let pools = pools();
    let activations = [None, Some(Gelu::Exact), Some(Gelu::Tanh)];
    for activation in activations {
        for (m, n, k) in [(3, 5, 0), (1, 33, 7), (33, 129, 16), (60, 65, 400)] {
            for write in [Write::Store, Write::Accumulate] {
                for bias in [false, true] {
                    let case = Case { write, bias, activation, ..Case::plain(m, n, k) };
                    check::<f32>(case, &pools[1..2]);
                    check::<f64>(case, &pools[1..2]);
                    check::<bf16>(case, &pools[1..2]);
                    check::<f16>(case, &pools[1..2]);
                }
            }
        }
    }
}

#[test]
fn a_batch_has_the_bits_of_its_products() {
    let pools = pools();
    // Enough tiny ones for several threads.
    for lie in LIES {
        check::<f32>(Case { batch: 6000, lies: (Lie::Rows, lie, Lie::Rows), ..Case::plain(5, 3, 7) }, &pools);
    }
    for (m, n, k) in [(0, 3, 4), (1, 7, 33), (33, 17, 20), (64, 64, 64), (130, 65, 70)] {
        for batch in [0, 1, 2, 9] {
            for share_b in [false, true] {
                for lie in LIES {
                    let lies = (Lie::Rows, lie, Lie::Rows);
                    let case = Case { batch, share_b, lies, bias: share_b, ..Case::plain(m, n, k) };
                    check::<f32>(case, &pools);
                    check::<bf16>(Case { write: Write::Accumulate, ..case }, &pools[1..2]);
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_the_number_of_rows() {
    let (n, k) = (70, 900);
    let mut draws = Draws(5);
    let (a, b): (Vec<f32>, Vec<f32>) = (draws.values(200 * k), draws.values(k * n));
    let rows_of = |m: usize, pool: &Pool| {
        let mut c = vec![0.0; m * n];
        let (a, b) = (MatRef::row_major(&a[..m * k], m, k), MatRef::row_major(&b, k, n));
        gemm(pool, a, b, MatMut::row_major(&mut c, m, n), Write::Store, Epilogue::default());
        c
    };
    let all = rows_of(200, &Pool::new(2));
    for m in [1, 2, 13, 14, 15, 29, 57, 100] {
        assert!(
            rows_of(m, &Pool::new(1)).iter().zip(&all).all(|(x, y)| x.to_bits() == y.to_bits()),
            "{m} rows"
        );
    }
}

#[test]
fn broadcast_operands_are_read_and_shared_outputs_refused() {
    let mut c = vec![0.0f32; 6];
    let (a, b) = ([1.0, 2.0], [3.0]);
    let a = MatRef::new(&a, 3, 2, 0, 1);
    let b = MatRef::new(&b, 2, 2, 0, 0);
    gemm(&Pool::new(1), a, b, MatMut::row_major(&mut c, 3, 2), Write::Store, Epilogue::default());
    assert_eq!(c, [9.0; 6]);
    for (rows, cols, row_stride, col_stride) in
        [(2, 3, 0, 1), (2, 3, 1, 1), (3, 2, 2, 3), (2, 4, 4, 1), (2, 2, usize::MAX, 1)]
    {
        let refused = std::panic::catch_unwind(|| {
            let mut data = [0.0f32; 6];
            MatMut::new(&mut data, rows, cols, row_stride, col_stride).rows()
        });
        assert!(refused.is_err(), "{rows} x {cols} with strides {row_stride}, {col_stride}");
    }
}
