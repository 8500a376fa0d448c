//! Columns of length 1 at right angles to each other, by Gram and Schmidt's method in f64.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Stream4, Tensor};

use crate::Result;

/// What of a column must be new for it to count as a direction of its own.
const NEW: f64 = 1e-10;

/// An orthonormal basis of what the columns of `matrix` [n, r] span, r <= n; `epsilon` is added to lengths that are
/// divided by. A column that depends on those before it, or is no number, becomes 0; with `random` numbers it becomes
/// a random direction. The bits depend on the values alone.
pub(super) fn columns(matrix: &Tensor, epsilon: f64, random: Option<Stream4>) -> Result<Tensor> {
    if matrix.device().is_meta() {
        return Ok(matrix.clone());
    }
    let (rows, rank) = (matrix.shape()[0], matrix.shape()[1]);
    let values = kernels::cast(matrix, DType::F64)?.to_vec::<f64>()?;
    let mut basis: Vec<Vec<f64>> = Vec::with_capacity(rank);
    for number in 0..rank {
        let mut column: Vec<f64> = (0..rows).map(|row| values[row * rank + number]).collect();
        let mut done = straighten(&mut column, &basis, epsilon);
        if let Some(stream) = random.filter(|_| !done || column.iter().any(|x| !x.is_finite())) {
            column = (0..rows).map(|row| draw(&stream, row * rank + number)).collect();
            done = straighten(&mut column, &basis, epsilon);
        }
        if !done {
            column.fill(0.0);
        }
        basis.push(column);
    }
    let flat: Vec<f64> = (0..rows * rank).map(|i| basis[i % rank][i / rank]).collect();
    Ok(kernels::cast(&Tensor::from_slice(&flat, &[rows, rank], matrix.device())?, matrix.dtype())?)
}

/// Takes off what lies along `basis`, and makes the rest of length 1; false if there is none.
fn straighten(column: &mut [f64], basis: &[Vec<f64>], epsilon: f64) -> bool {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let before = dot(column, column).sqrt();
    // Twice: what rounding has left of the first time is gone after the second.
    for direction in basis.iter().chain(basis) {
        let along = dot(column, direction);
        column.iter_mut().zip(direction).for_each(|(x, d)| *x -= along * d);
    }
    let length = dot(column, column).sqrt();
    if length <= NEW * before {
        return false;
    }
    column.iter_mut().for_each(|x| *x /= length + epsilon);
    true
}

/// Even in (-1, 1).
fn draw(stream: &Stream4, place: usize) -> f64 {
    let word = stream.block(place as u64 / 4, 0)[place % 4];
    (f64::from(word) + 0.5) / f64::from(1u32 << 31) - 1.0
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, RngKey};

    use super::*;

    fn basis(values: &[f64], shape: [usize; 2], random: bool) -> Vec<f64> {
        let matrix = Tensor::from_slice(values, &shape, Device::CPU).unwrap();
        let stream = RngKey { seed: 1, step: 1 }.site(1);
        columns(&matrix, 0.0, random.then_some(stream)).unwrap().to_vec().unwrap()
    }

    /// `b^T b`.
    fn products(b: &[f64], rank: usize) -> Vec<f64> {
        let column = |i: usize| b.iter().skip(i).step_by(rank);
        let pair = |i: usize| column(i / rank).zip(column(i % rank)).map(|(x, y)| x * y).sum();
        (0..rank * rank).map(pair).collect()
    }

    #[test]
    fn columns_are_orthonormal_and_span_the_same() {
        let b = basis(&[3.0, 1.0, 4.0, 1.0 + 1e-7, 0.0, 2.0], [3, 2], false);
        assert!((b[0] - 0.6).abs() < 1e-15 && (b[2] - 0.8).abs() < 1e-15 && b[4] == 0.0);
        let p = products(&b, 2);
        assert!((p[0] - 1.0).abs() < 1e-15 && p[1].abs() < 1e-15 && (p[3] - 1.0).abs() < 1e-15, "{p:?}");
    }

    #[test]
    fn what_depends_on_others_is_zero_or_random() {
        let dependent = [1.0, 2.0, f64::NAN, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0];
        let b = basis(&dependent, [3, 3], true);
        let p = products(&b, 3);
        let identity = |i: usize| f64::from(u8::from(i.is_multiple_of(4)));
        assert!(p.iter().enumerate().all(|(i, x)| (x - identity(i)).abs() < 1e-12), "{p:?}");
        assert_eq!(basis(&[1.0, 2.0, 1.0, 2.0], [2, 2], false)[1], 0.0);
        assert!(basis(&dependent, [3, 3], false)[2].is_nan(), "a gradient that is no number is not hidden");
        let zeros = basis(&[0.0; 6], [3, 2], true);
        assert!((products(&zeros, 2)[0] - 1.0).abs() < 1e-12);
    }
}
