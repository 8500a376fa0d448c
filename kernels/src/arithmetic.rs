//! What the arithmetic operations share: floating-point operands go through vectors, integers through `i64`.
//!
//! What integers do is stated twice, side by side: as a function, and as CUDA text of `x[0]` and of `x[1]` or the number
//! `k[0]`, all `i64`.

use phalanx_tensor::{DType, Error, Result, Scalar, Tensor};

use crate::check;
use crate::pointwise::cuda::Expression;
use crate::pointwise::{Pointwise, common_shape, map, map_scalar};

/// `float` of a floating-point operand, or `int` of an integer one (the result wraps to the dtype).
pub(crate) fn unary(
    op: &'static str,
    float: impl Pointwise<1>,
    (int, text): (impl Fn(i64) -> i64 + Sync, &'static str),
    a: &Tensor,
) -> Result<Tensor> {
    scalar(op, float, (|x, _| int(x), text), a, Scalar::Int(0))
}

/// `float` of two floating-point operands, or `int` of two integer ones (the result wraps to the dtype).
pub(crate) fn binary(
    op: &'static str,
    float: impl Pointwise<2>,
    (int, text): (impl Fn(i64, i64) -> i64 + Sync, &'static str),
    a: &Tensor,
    b: &Tensor,
) -> Result<Tensor> {
    if a.dtype().is_float() {
        return map(op, float, [a, b]);
    }
    check::same(op, &[a, b])?;
    let mut out = Tensor::empty(&common_shape(op, &[a, b])?, a.dtype(), a.device())?;
    let cuda = &Expression::of_integers(text, &[]);
    match a.dtype() {
        DType::I64 => map_scalar(op, |[x, y]: [i64; 2]| int(x, y), cuda, [a, b], &mut out)?,
        DType::I32 => {
            map_scalar(op, |[x, y]: [i32; 2]| int(x.into(), y.into()) as i32, cuda, [a, b], &mut out)?
        }
        DType::U8 => map_scalar(op, |[x, y]: [u8; 2]| int(x.into(), y.into()) as u8, cuda, [a, b], &mut out)?,
        other => return Err(Error::dtype(op, other, "a number dtype")),
    }
    Ok(out)
}

/// `float` of a floating-point operand, or `int` of an integer one and the number.
pub(crate) fn scalar(
    op: &'static str,
    float: impl Pointwise<1>,
    (int, text): (impl Fn(i64, i64) -> i64 + Sync, &'static str),
    a: &Tensor,
    s: Scalar,
) -> Result<Tensor> {
    if a.dtype().is_float() {
        return map(op, float, [a]);
    }
    let Scalar::Int(s) = s else {
        let why = format!("got the number {} for a tensor of {}, wanted an integer", s.to_f64(), a.dtype());
        return Err(Error::invalid(op, why));
    };
    let mut out = a.empty_like()?;
    let numbers = [s];
    let cuda = &Expression::of_integers(text, &numbers);
    match a.dtype() {
        DType::I64 => map_scalar(op, |[x]: [i64; 1]| int(x, s), cuda, [a], &mut out)?,
        DType::I32 => map_scalar(op, |[x]: [i32; 1]| int(x.into(), s) as i32, cuda, [a], &mut out)?,
        DType::U8 => map_scalar(op, |[x]: [u8; 1]| int(x.into(), s) as u8, cuda, [a], &mut out)?,
        other => return Err(Error::dtype(op, other, "a number dtype")),
    }
    Ok(out)
}
