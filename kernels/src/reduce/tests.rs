//! The order in which elements are brought together, written plainly, and the same bits whatever the strides.

use phalanx_tensor::{DType, Device, Tensor};

use crate::ops::{amax, amin, cast, logsumexp, norm, prod, sum, var};
use crate::simd::isa;
use crate::testing::{FLOATS, floats, make, values};

/// How many chains an f32 row has: eight vectors' lanes.
fn chains() -> usize {
    8 * match isa().name() {
        "amx" | "avx512" => 16,
        "avx2" => 8,
        "neon" => 4,
        _ => 1,
    }
}

/// The first with the middle one, and so on by halves.
fn halves<T: Copy>(mut parts: Vec<T>, join: impl Fn(T, T) -> T) -> T {
    while parts.len() > 1 {
        let half = parts.len().next_power_of_two() / 2;
        let rest = parts.split_off(half);
        parts.iter_mut().zip(rest).for_each(|(part, other)| *part = join(*part, other));
    }
    parts[0]
}

/// A row: chains for blocks of 1,024 elements, the blocks in f64.
fn row(x: &[f32]) -> f64 {
    let block = |x: &[f32]| {
        let mut sums = vec![0f32; chains()];
        x.iter().enumerate().for_each(|(i, x)| sums[i % chains()] += x);
        f64::from(halves(sums, |a, b| a + b))
    };
    let parts: Vec<f64> = x.chunks(1024).map(block).collect();
    fn pairwise(parts: &[f64]) -> f64 {
        match parts {
            [one] => *one,
            _ => {
                let (left, right) = parts.split_at(parts.len().next_power_of_two() / 2);
                pairwise(left) + pairwise(right)
            }
        }
    }
    pairwise(&parts)
}

/// A column of one part: four rows at a time, blocks of 64 rows in f64.
fn column(x: &[f32]) -> f64 {
    x.chunks(64).fold(0.0, |total, block| {
        let (fours, rest) = block.as_chunks::<4>();
        let sum = fours.iter().fold(0f32, |sum, [a, b, c, d]| sum + ((a + c) + (b + d)));
        total + f64::from(rest.iter().fold(sum, |sum, x| sum + x))
    })
}

fn in_f32(x: &Tensor) -> Vec<f32> {
    values(x).into_iter().map(|x| x as f32).collect()
}

/// Each of them rounded to a dtype.
fn rounded(x: Vec<f32>, dtype: DType) -> Vec<f64> {
    values(&cast(&Tensor::from_slice(&x, &[x.len()], Device::CPU).unwrap(), dtype).unwrap())
}

fn transposed(x: &Tensor) -> Tensor {
    let back: Vec<usize> = (0..x.rank()).rev().collect();
    x.permute(&back).unwrap().copy().unwrap().permute(&back).unwrap()
}

#[test]
fn sums_are_made_in_the_order_that_is_written() {
    let value = floats(-1.0, 3.0);
    for [rows, n] in [
        [1, 1],
        [40, 2],
        [33, 3],
        [19, 4],
        [17, 7],
        [129, 33],
        [65, 80],
        [70, 129],
        [18, 300],
        [18, 1000],
        [3, 1024],
        [5, 5000],
        [2, 70_000],
    ] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = make(&[rows, n], dtype, &value);
            let all = in_f32(&x);
            let want = rounded(all.chunks(n).map(|x| row(x) as f32).collect(), dtype);
            for x in [&x, &transposed(&x)] {
                assert_eq!(values(&sum(x, &[1], false).unwrap()), want, "{rows} rows of {n}, {dtype}");
            }
        }
    }
    for [n, columns] in [[1, 9], [7, 33], [64, 129], [65, 80], [131, 16], [200, 1030]] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = make(&[n, columns], dtype, &value);
            let all = in_f32(&x);
            let along = |c: usize| all.iter().skip(c).step_by(columns).copied().collect::<Vec<_>>();
            let want = rounded((0..columns).map(|c| column(&along(c)) as f32).collect(), dtype);
            for x in [&x, &transposed(&x)] {
                let got = values(&sum(x, &[0], false).unwrap());
                assert_eq!(got, want, "{n} rows, {columns} columns, {dtype}");
            }
        }
    }
}

#[test]
fn every_reduction_has_the_same_bits_whatever_the_strides() {
    type Op = fn(&Tensor, &[usize]) -> phalanx_tensor::Result<Tensor>;
    let ops: [Op; 8] = [
        |x, d| sum(x, d, false),
        |x, d| prod(x, d, false),
        |x, d| amax(x, d, false),
        |x, d| amin(x, d, false),
        |x, d| norm(x, 2.0, d, false),
        |x, d| norm(x, 3.0, d, false),
        |x, d| var(x, d, 1.0, false),
        |x, d| logsumexp(x, d, false),
    ];
    let shapes: [&[usize]; 14] = [
        &[9, 300],
        &[7, 2],
        &[129, 3],
        &[33, 129],
        &[65, 70],
        &[2, 1100],
        &[1030, 4],
        &[70, 1030],
        &[3, 70, 33],
        &[2, 40, 9],
        // Rows of which one, two, four and eight are a block.
        &[72, 1024],
        &[40, 512],
        &[72, 256],
        &[24, 128],
    ];
    let odd = |i: usize| if i % 211 == 3 { -0.0 } else { 0.5 + floats(0.0, 1.0)(i) };
    for (shape, dtype) in shapes.iter().flat_map(|&s| FLOATS.map(|d| (s, d))) {
        let x = make(shape, dtype, &odd);
        let nan = make(shape, dtype, &|i| if i % 97 == 5 { f64::NAN } else { odd(i) });
        for dims in
            (0..shape.len()).map(|d| vec![d]).chain([(0..shape.len()).collect(), vec![0, shape.len() - 1]])
        {
            for (op, f) in ops.iter().enumerate() {
                for x in [&x, &nan] {
                    let bits = |x: &Tensor| -> Vec<Option<u64>> {
                        let all = values(&f(x, &dims).unwrap());
                        all.iter().map(|x| (!x.is_nan()).then(|| x.to_bits())).collect()
                    };

                    let wide =
                        crate::ops::cat(&[x, x], -1).unwrap().narrow(-1, 0, *shape.last().unwrap()).unwrap();
                    for other in [
                        &transposed(x),
                        &wide,
                        &x.transpose(0, -1).unwrap().copy().unwrap().transpose(0, -1).unwrap(),
                    ] {
                        assert_eq!(
                            bits(other),
                            bits(x),
                            "reduction {op} of {shape:?} over {dims:?}, {dtype}"
                        );
                    }
                }
            }
        }
    }
}
