//! A choice between two elements.

use phalanx_tensor::{DType, Dims, Element, Result, Scalar, Tensor};

use crate::check;
use crate::ops::cast::Number;
use crate::pointwise::cuda::{self, Expression};
use crate::pointwise::{common_shape, update};
use crate::real::for_element;
use crate::source::{BLOCK, Source};

/// `a` where `condition` (a bool), else `b`; all three broadcast. Any dtype, the same for both.
///
/// # Errors
/// If the shapes do not broadcast, dtypes or devices differ, or the condition is no bool.
pub fn where_(condition: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "where";
    check::dtype(OP, condition, DType::Bool)?;
    check::same(OP, &[a, b])?;
    check::same_device(OP, &[condition, a])?;
    let mut out = Tensor::empty_for(OP, &common_shape(OP, &[condition, a, b])?, a.dtype(), a.device())?;
    if out.device().is_cuda() {
        let choice = Expression::of_bits("x[0] ? x[1] : x[2]", a.dtype(), &[]);
        cuda::evaluate(OP, &choice, [condition, a, b], &mut out)?;
    } else if !out.device().is_meta() {
        for_element!(a.dtype(), T => choose::<T>(OP, condition, a, b, &mut out))?;
    }
    Ok(out)
}

/// `value` where `mask` (a bool), else `x`; the mask broadcasts to `x`.
///
/// # Errors
/// If the mask does not broadcast to `x`, is no bool, or is on another device, or an integer `x` cannot hold the value.
pub fn masked_fill(x: &Tensor, mask: &Tensor, value: Scalar) -> Result<Tensor> {
    const OP: &str = "masked_fill";
    check::dtype(OP, mask, DType::Bool)?;
    check::same_device(OP, &[x, mask])?;
    let value = value.fitting(OP, x.dtype())?;
    let mask = mask.broadcast_for(OP, x.shape())?;
    let mut out = x.empty_like_for(OP)?;
    if out.device().is_cuda() {
        let bits = [for_element!(x.dtype(), T => cuda::bits(T::from_scalar(value)))];
        let choice = Expression::of_bits("x[0] ? (X)k[0] : x[1]", x.dtype(), &bits);
        cuda::evaluate(OP, &choice, [&mask, x], &mut out)?;
    } else if !out.device().is_meta() {
        for_element!(x.dtype(), T => fill::<T>(OP, x, &mask, T::from_scalar(value), &mut out))?;
    }
    Ok(out)
}

fn choose<T: Element>(op: &'static str, c: &Tensor, a: &Tensor, b: &Tensor, out: &mut Tensor) -> Result<()> {
    let shape = Dims::from_slice(out.shape());
    let condition = Source::<u8>::open(op, c, &shape)?;
    let [a, b]: [Source<'_, T>; 2] = Source::open_all(op, [a, b], &shape)?;
    update(op, out, |start, target: &mut [T]| {
        let (mut bytes, mut left, mut right) = ([0; BLOCK], [T::zeroed(); BLOCK], [T::zeroed(); BLOCK]);
        for (i, target) in target.chunks_mut(BLOCK).enumerate() {
            let (start, len) = (start + i * BLOCK, target.len());
            let c = condition.block(start, len, &mut bytes);
            let a = a.block(start, len, &mut left);
            let b = b.block(start, len, &mut right);
            for (((to, &c), &a), &b) in target.iter_mut().zip(c).zip(a).zip(b) {
                *to = if c != 0 { a } else { b };
            }
        }
    })
}

fn fill<T: Element>(op: &'static str, x: &Tensor, mask: &Tensor, value: T, out: &mut Tensor) -> Result<()> {
    let mask = Source::<u8>::open(op, mask, x.shape())?;
    let x = Source::<T>::open(op, x, x.shape())?;
    update(op, out, |start, target: &mut [T]| {
        let (mut bytes, mut elements) = ([0; BLOCK], [T::zeroed(); BLOCK]);
        for (i, target) in target.chunks_mut(BLOCK).enumerate() {
            let (start, len) = (start + i * BLOCK, target.len());
            let mask = mask.block(start, len, &mut bytes);
            let x = x.block(start, len, &mut elements);
            for ((to, &m), &x) in target.iter_mut().zip(mask).zip(x) {
                *to = if m != 0 { value } else { x };
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cast;
    use crate::testing::{make, values};

    #[test]
    fn every_dtype_and_broadcast_chooses() {
        let condition = cast(&make(&[3, 1], DType::F32, &|i| (i % 2) as f64), DType::Bool).unwrap();
        for dtype in DType::ALL {
            let a = cast(&make(&[1, 4], DType::F64, &|_| 1.0), dtype).unwrap();
            let b = cast(&make(&[], DType::F64, &|_| 0.0), dtype).unwrap();
            let chosen = where_(&condition, &a, &b).unwrap();
            assert_eq!((chosen.dtype(), chosen.shape()), (dtype, &[3, 4][..]));
            assert_eq!(values(&chosen), [0., 0., 0., 0., 1., 1., 1., 1., 0., 0., 0., 0.]);
            let filled = masked_fill(&chosen, &condition, Scalar::Int(0)).unwrap();
            assert_eq!(values(&filled), [0.0; 12]);
        }
        let bools = cast(&make(&[1], DType::F32, &|_| 0.0), DType::Bool).unwrap();
        let mask = cast(&make(&[1], DType::F32, &|_| 1.0), DType::Bool).unwrap();
        let filled = masked_fill(&bools, &mask, Scalar::Int(256)).unwrap();
        assert_eq!(filled.read_bytes("test").unwrap()[0], 1, "a bool is stored as 0 or 1");
        let unfit = make(&[5, 4], DType::F32, &|_| 0.0);
        assert!(masked_fill(&unfit, &condition, Scalar::Int(0)).is_err());
    }
}
