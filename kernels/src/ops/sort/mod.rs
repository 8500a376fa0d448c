//! Orders along a dimension.

mod cuda;

use std::cmp::Ordering;

use phalanx_tensor::{DType, Dim, Element, Error, Result, Tensor};

use crate::pointwise::PIECE;
use crate::real::for_element;
use crate::source::Source;

/// The elements along `dim` in ascending (or descending) order, and where each was, i64. Stable; a NaN counts as
/// larger than any number.
///
/// # Errors
/// If there is no such dimension.
pub fn sort(x: &Tensor, dim: impl Dim, descending: bool) -> Result<(Tensor, Tensor)> {
    let dim = dim.resolve(x.rank().max(1), "sort")?;
    ordered("sort", x, dim, x.shape().get(dim).copied().unwrap_or(1), descending)
}

/// The `k` largest (or smallest) elements along `dim`, best first, and where each was, i64; of equal elements the
/// first ones. A NaN counts as larger than any number.
///
/// # Errors
/// If there is no such dimension, or it has fewer than `k` elements.
pub fn topk(x: &Tensor, k: usize, dim: impl Dim, largest: bool) -> Result<(Tensor, Tensor)> {
    let dim = dim.resolve(x.rank().max(1), "topk")?;
    let size = x.shape().get(dim).copied().unwrap_or(1);
    if k > size {
        return Err(Error::range(
            "topk",
            format!("k = {k}"),
            format!("at most {size}, the size of dimension {dim}"),
        ));
    }
    ordered("topk", x, dim, k, largest)
}

/// The first `k` of each line in order.
fn ordered(op: &'static str, x: &Tensor, dim: usize, k: usize, descending: bool) -> Result<(Tensor, Tensor)> {
    if x.rank() == 0 {
        let (values, indices) = ordered(op, &x.unsqueeze(0)?, 0, k, descending)?;
        return if k == 1 { Ok((values.squeeze(0)?, indices.squeeze(0)?)) } else { Ok((values, indices)) };
    }
    let lines = x.transpose(dim, -1)?;
    let n = x.shape()[dim];
    let mut shape = lines.shape().to_vec();
    shape[x.rank() - 1] = k;
    let mut values = Tensor::empty_for(op, &shape, x.dtype(), x.device())?;
    let mut indices = Tensor::empty_for(op, &shape, DType::I64, x.device())?;
    if x.device().is_cuda() && values.numel() > 0 {
        cuda::arrange(op, &lines, [n, k], descending, [&mut values, &mut indices])?;
    } else if !x.device().is_meta() && values.numel() > 0 {
        for_element!(x.dtype(), T => arrange::<T>(op, &lines, n, k, descending, &mut values, &mut indices))?;
    }
    let back = |t: Tensor| t.transpose(dim, -1)?.contiguous();
    Ok((back(values)?, back(indices)?))
}

fn arrange<T: Element>(
    op: &'static str,
    lines: &Tensor,
    n: usize,
    k: usize,
    descending: bool,
    values: &mut Tensor,
    indices: &mut Tensor,
) -> Result<()> {
    let source = Source::<T>::open(op, lines, lines.shape())?;
    let pool = lines.device().pool()?;
    let mut pairs = vec![(T::zeroed(), 0); lines.numel()];
    let _use = lines.device().ledger()?.scratch_of(size_of_val(&pairs[..]));
    let lines_a_piece = PIECE.div_ceil(n);
    // With the index as the last word an unstable order is the stable one.
    let order = |a: &(T, usize), b: &(T, usize)| {
        let by_value = compare(a.0, b.0);
        if descending { by_value.reverse() } else { by_value }.then(a.1.cmp(&b.1))
    };
    pool.for_each_chunk(&mut pairs, lines_a_piece * n, |piece, pairs| {
        let mut line = vec![T::zeroed(); n];
        for (i, pairs) in pairs.chunks_mut(n).enumerate() {
            source.copy_to((piece * lines_a_piece + i) * n, &mut line);
            let numbered = line.iter().enumerate().map(|(i, &x)| (x, i));
            pairs.iter_mut().zip(numbered).for_each(|(to, pair)| *to = pair);
            if k < n {
                pairs.select_nth_unstable_by(k, order);
            }
            pairs[..k].sort_unstable_by(order);
        }
    });
    let (mut values, mut indices) = (values.write::<T>(op)?, indices.write::<i64>(op)?);
    let first = pairs.chunks(n).flat_map(|pairs| &pairs[..k]);
    for ((value, index), &(x, i)) in values.iter_mut().zip(indices.iter_mut()).zip(first) {
        (*value, *index) = (x, i as i64);
    }
    Ok(())
}

/// A NaN after all numbers; two are equal.
fn compare<T: Element>(a: T, b: T) -> Ordering {
    let is_nan = |x: T| x.partial_cmp(&x).is_none();
    a.partial_cmp(&b).unwrap_or_else(|| is_nan(a).cmp(&is_nan(b)))
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use super::*;
    use crate::testing::{FLOATS, make, values};

    #[test]
    fn sorting_is_stable_in_both_directions_along_any_dimension() {
        for dtype in FLOATS {
            let x = make(&[31, 40], dtype, &|i| (i * 7 % 11) as f64);
            for (dim, descending) in [(0, false), (0, true), (1, false), (-1, true)] {
                let (sorted, at) = sort(&x, dim, descending).unwrap();
                assert_eq!(values(&crate::ops::gather(&x, dim, &at).unwrap()), values(&sorted));
                let lines = |t: &Tensor| values(&t.transpose(dim, -1).unwrap());
                let n = x.size(dim).unwrap();
                for (v, i) in lines(&sorted).chunks(n).zip(lines(&at).chunks(n)) {
                    let rising = |j: usize| if descending { v[j] > v[j + 1] } else { v[j] < v[j + 1] };
                    assert!((0..n - 1).all(|j| rising(j) || (v[j] == v[j + 1] && i[j] < i[j + 1])));
                }
                let (best, best_at) = topk(&x, 5, dim, descending).unwrap();
                assert_eq!(values(&best), values(&sorted.narrow(dim, 0, 5).unwrap()));
                assert_eq!(values(&best_at), values(&at.narrow(dim, 0, 5).unwrap()));
            }
        }
        let x = Tensor::from_slice(&[2.0f32, f32::NAN, -1.0, f32::INFINITY], &[4], Device::CPU).unwrap();
        assert_eq!(sort(&x, 0, false).unwrap().1.to_vec::<i64>().unwrap(), [2, 0, 3, 1]);
        assert_eq!(sort(&x, 0, true).unwrap().1.to_vec::<i64>().unwrap(), [1, 3, 0, 2]);
        assert!(topk(&x, 5, 0, true).is_err());
    }
}
