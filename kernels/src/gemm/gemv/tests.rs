//! Products of one column against a twin (a slow reference) that adds in the order stated, bit for bit, on every
//! instruction set this CPU has.

use half::{bf16, f16};
use phalanx_tensor::Pool;

use super::*;
use crate::simd::available_isas;

/// The sum of a row, step by step.
fn twin<T: GemmElem>(a: &[T], b: &[T]) -> T::Acc {
    let parts = a.chunks(PART).zip(b.chunks(PART)).map(|(a, b)| {
        let mut sums = vec![T::Acc::ZERO; chains::<T::Acc>()];
        // The steps that the last round lacks count as zeros.
        let steps = a.len().next_multiple_of(sums.len());
        for s in 0..steps {
            let chain = s % sums.len();
            let [x, y] = [a, b].map(|x| x.get(s).map_or(T::Acc::ZERO, |x| x.widen()));
            sums[chain] = x.mul_add(y, sums[chain]);
        }
        while sums.len() > 1 {
            let others = sums.split_off(sums.len() / 2);
            sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += other);
        }
        sums[0]
    });
    let mut sums = parts.collect::<Vec<_>>().into_iter();
    let first = sums.next().unwrap_or(T::Acc::ZERO);
    sums.fold(first, |sum, part| sum + part)
}

fn values<T: GemmElem>(len: usize, seed: usize) -> Vec<T> {
    let value = |i: usize| ((i * 7919 + seed) as f64 * 0.37).sin();
    (0..len).map(|i| T::narrow(T::Acc::from_f64(value(i)))).collect()
}

/// A batch of `m` x `k` by `k` x 1; strides of rows and steps of A, and of B's steps, and whether items share B.
fn check<T: GemmElem>(
    [items, m, k]: [usize; 3],
    (across, apart, b_apart, shared): (bool, usize, usize, bool),
    write: Write,
) {
    let (a_row, a_step) = if across { (apart, m * apart) } else { (k * apart, apart) };
    let batch = Batch { count: items, a: m * k * apart, b: if shared { 0 } else { k * b_apart }, c: m + 1 };
    let (a, b) = (values::<T>(items * m * k * apart, 1), values::<T>(items * k * b_apart, 2));
    let (bias, before) = (values::<T>(1, 3), values::<T>(items * (m + 1), 4));
    let epilogue = Epilogue { bias: Some(&bias[..]), activation: None };
    let mut want = before.clone();
    for (item, i) in (0..items).flat_map(|item| (0..m).map(move |i| (item, i))) {
        let row: Vec<T> = (0..k).map(|s| a[item * batch.a + i * a_row + s * a_step]).collect();
        let column: Vec<T> = (0..k).map(|s| b[item * batch.b + s * b_apart]).collect();
        let sum = T::narrow(T::narrow(twin(&row, &column)).widen() + bias[0].widen());
        let place = &mut want[item * batch.c + i];
        *place = match write {
            Write::Store | Write::Continue => sum,
            Write::Accumulate => T::narrow(place.widen() + sum.widen()),
        };
    }
    for isa in available_isas() {
        for pool in [None, Some(Pool::new(3))] {
            let mut got = before.clone();
            run(
                Runner::on(isa).expect("available"),
                pool.as_ref(),
                batch,
                MatRef::new(&a, m, k, a_row, a_step),
                MatRef::new(&b, k, 1, b_apart, 1),
                MatMut::new(&mut got, m, 1, 1, 1),
                (write, epilogue),
            );
            let bits = |x: &[T]| x.iter().map(|x| x.widen().to_f64().to_bits()).collect::<Vec<_>>();
            assert!(
                bits(&got) == bits(&want),
                "{items} x {m} x {k}, across {across}, apart {apart} and {b_apart}, shared {shared}, {isa}"
            );
        }
    }
}

#[test]
fn the_number_of_steps_alone_decides_the_order() {
    for (items, m) in [(1, 1), (1, 7), (33, 1), (3, 129), (2, 16)] {
        for k in [64, 65, 129, 1031, PART, 2 * PART + 33] {
            if m * items * k > 600_000 {
                continue;
            }
            for (i, lie) in
                [(false, 1, 1), (true, 1, 1), (false, 1, 2), (false, 2, 1), (true, 2, 1), (true, 1, 3)]
                    .into_iter()
                    .enumerate()
            {
                let lie = (lie.0, lie.1, lie.2, (i + k) % 2 == 0);
                let write = if (i + m) % 3 == 0 { Write::Accumulate } else { Write::Store };
                check::<f32>([items, m, k], lie, write);
                match (i + m + k) % 3 {
                    0 => check::<f64>([items, m, k], lie, write),
                    1 => check::<bf16>([items, m, k], lie, write),
                    _ => check::<f16>([items, m, k], lie, write),
                }
            }
        }
    }
}

#[test]
fn rows_of_far_memory_are_summed_several_at_a_time_and_change_no_bit() {
    let ([m, k], lie) = ([130, PART + 33], (false, 1, 1, false));
    assert!(m * k * size_of::<f16>() >= FAR_BYTES);
    check::<f32>([1, m, k], lie, Write::Store);
    check::<f64>([1, m, k], lie, Write::Accumulate);
    check::<bf16>([1, m, k], lie, Write::Store);
    check::<f16>([1, m, k], lie, Write::Accumulate);
}

#[test]
fn sums_of_products_that_vanish_have_one_sign_of_zero() {
    // Each product is a negative number too small for f32: their sum is -0, except where zeros of a last round are added.
    let (a, b) = (vec![-1e-30f32; 100], vec![1e-30f32; 100]);
    let sum = |row_stride: usize, step_stride: usize, rows: usize| {
        let mut c = vec![1.0; rows];
        let a = MatRef::new(&a, rows, 100, row_stride, step_stride);
        let (b, to) = (MatRef::new(&b, 100, 1, 1, 1), MatMut::new(&mut c, rows, 1, 1, 1));
        let batch = Batch { count: 1, a: 0, b: 0, c: 0 };
        gemv(None, batch, a, b, to, Write::Store, Epilogue::default());
        c[0].to_bits()
    };
    // Along, and across: a row that lies with stride 0 is every row.
    assert_eq!(sum(0, 1, 2), sum(1, 0, 2));
}

#[test]
fn nothing_is_done_without_rows_and_what_does_not_fit_is_refused() {
    let a = [1.0f32; 128];
    let product = |m: usize, batch: Batch, c: &mut [f32]| {
        let (a, b) = (MatRef::new(&a, m, 64, 64, 1), MatRef::new(&a, 64, 1, 1, 1));
        gemv(None, batch, a, b, MatMut::new(c, m, 1, 1, 1), Write::Store, Epilogue::default());
    };
    product(0, Batch { count: 1, a: 0, b: 0, c: 0 }, &mut []);
    product(2, Batch { count: 0, a: 0, b: 0, c: 0 }, &mut [0.0; 2]);
    let shared = std::panic::catch_unwind(|| product(2, Batch { count: 2, a: 0, b: 0, c: 1 }, &mut [0.0; 4]));
    assert!(shared.is_err());
}
