//! Where extrema lie.

use phalanx_tensor::{DType, Dim, Element, Result, Tensor};

use super::amax::refuse_empty;
use crate::real::for_element;
use crate::reduce::{Frame, Kind, each, fold_each};

/// Along `dim`, or over all elements in row-major order without one: the index of the largest element, the first of
/// equal ones, or of the first NaN. i64; any dtype.
///
/// # Errors
/// If there is no such dimension, or there are no elements to choose from.
pub fn argmax<D: Dim>(x: &Tensor, dim: Option<D>, keepdim: bool) -> Result<Tensor> {
    Ok(over("argmax", x, dim, keepdim, true)?.1)
}

/// [`argmax`] for the smallest element.
///
/// # Errors
/// As [`argmax`].
pub fn argmin<D: Dim>(x: &Tensor, dim: Option<D>, keepdim: bool) -> Result<Tensor> {
    Ok(over("argmin", x, dim, keepdim, false)?.1)
}

/// The largest elements along `dim`, and where they are: see [`argmax`].
///
/// # Errors
/// As [`argmax`].
pub fn max<D: Dim>(x: &Tensor, dim: D, keepdim: bool) -> Result<(Tensor, Tensor)> {
    over("max", x, Some(dim), keepdim, true)
}

/// The smallest elements along `dim`, and where they are: see [`argmax`].
///
/// # Errors
/// As [`argmax`].
pub fn min<D: Dim>(x: &Tensor, dim: D, keepdim: bool) -> Result<(Tensor, Tensor)> {
    over("min", x, Some(dim), keepdim, false)
}

fn over<D: Dim>(
    op: &'static str,
    x: &Tensor,
    dim: Option<D>,
    keepdim: bool,
    largest: bool,
) -> Result<(Tensor, Tensor)> {
    let frame = match dim {
        Some(dim) => Frame::new(op, x, &[dim], keepdim)?,
        None => Frame::new(op, x, &(0..x.rank()).collect::<Vec<_>>(), keepdim)?,
    };
    search_all(op, &frame, largest)
}

fn search_all(op: &'static str, frame: &Frame, largest: bool) -> Result<(Tensor, Tensor)> {
    refuse_empty(op, &frame.view, frame.n)?;
    let (mut values, computes) = frame.output(op, frame.view.dtype())?;
    let (mut indices, _) = frame.output(op, DType::I64)?;
    if computes && values.device().is_cuda() {
        let kind = if largest { Kind::Largest } else { Kind::Smallest };
        each(op, frame, kind, &mut values, Some(&mut indices))?;
    } else if computes {
        for_element!(values.dtype(), T => search::<T>(op, frame, largest, &mut values, &mut indices))?;
    }
    Ok((values, indices))
}

fn search<T: Element>(
    op: &'static str,
    frame: &Frame,
    largest: bool,
    values: &mut Tensor,
    indices: &mut Tensor,
) -> Result<()> {
    let is_nan = |x: T| x.partial_cmp(&x).is_none();
    let mut best = vec![(T::zeroed(), None); values.numel()];
    fold_each::<T, (T, Option<usize>)>(op, frame, (T::zeroed(), None), &mut best, |best, i, x| {
        let better = if largest { x > best.0 } else { x < best.0 };
        if best.1.is_none() || better || (is_nan(x) && !is_nan(best.0)) {
            *best = (x, Some(i));
        }
    })?;
    let (mut values, mut indices) = (values.write::<T>(op)?, indices.write::<i64>(op)?);
    for ((value, index), (x, i)) in values.iter_mut().zip(indices.iter_mut()).zip(best) {
        (*value, *index) = (x, i.unwrap_or(0) as i64);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::*;
    use crate::ops::{amax, amin};
    use crate::testing::{FLOATS, make, values};

    #[test]
    fn the_first_of_equals_and_the_first_nan_are_found_in_rows_and_columns() {
        for dtype in FLOATS {
            for shape in [[5, 1200], [1200, 5], [40, 30], [1, 7]] {
                let x = make(&shape, dtype, &|i| (i * 7 % 13) as f64);
                let all = values(&x);
                for dim in [0, 1] {
                    let (top, at) = max(&x, dim, false).unwrap();
                    let (low, low_at) = min(&x, dim, true).unwrap();
                    assert_eq!(values(&amax(&x, &[dim], false).unwrap()), values(&top));
                    assert_eq!(values(&amin(&x, &[dim], true).unwrap()), values(&low));
                    for o in 0..shape[1 - dim] {
                        let line: Vec<f64> = (0..shape[dim])
                            .map(|i| all[if dim == 0 { i * shape[1] + o } else { o * shape[1] + i }])
                            .collect();
                        let first = |best: f64| line.iter().position(|&x| x == best).unwrap() as i64;
                        let (most, least) = (
                            line.iter().fold(0f64, |a, &b| a.max(b)),
                            line.iter().fold(99f64, |a, &b| a.min(b)),
                        );
                        assert_eq!((values(&top)[o], at.to_vec::<i64>().unwrap()[o]), (most, first(most)));
                        assert_eq!(
                            (values(&low)[o], low_at.to_vec::<i64>().unwrap()[o]),
                            (least, first(least))
                        );
                    }
                }
            }
        }
        let x = Tensor::from_slice(&[1.0f32, f32::NAN, 5.0, f32::NAN], &[4], Device::CPU).unwrap();
        assert_eq!(argmax::<usize>(&x, None, false).unwrap().item::<i64>().unwrap(), 1);
        assert_eq!(argmin(&x, Some(-1), true).unwrap().to_vec::<i64>().unwrap(), [1]);
        assert!(amax(&x, &[0], false).unwrap().item::<f32>().unwrap().is_nan());
        let none = Tensor::zeros(&[0, 2], DType::F32, Device::CPU).unwrap();
        assert!(amax(&none, &[0], false).is_err() && argmax::<usize>(&none, None, false).is_err());
        assert_eq!(amax(&none, &[1], false).unwrap().shape(), [0]);
    }
}
