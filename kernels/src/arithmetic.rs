//! What the arithmetic operations share: floating-point operands go through vectors, integers through `i64`.
//!
//! What integers do is stated twice, side by side: as a function, and as CUDA text of `x[0]` and of `x[1]` or the number
//! `k[0]`, all `i64`.

use phalanx_tensor::{DType, Error, Result, Scalar, Tensor};

use crate::check;
use crate::pointwise::cuda::Expression;
use crate::pointwise::{Pointwise, in_order, map, map_scalar};

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
    let cuda = &Expression::of_integers(text, &[]);
    in_order(op, a.dtype(), [a, b], |inputs, out| match out.dtype() {
        DType::I64 => map_scalar(op, |[x, y]: [i64; 2]| int(x, y), cuda, inputs, out),
        DType::I32 => map_scalar(op, |[x, y]: [i32; 2]| int(x.into(), y.into()) as i32, cuda, inputs, out),
        DType::U8 => map_scalar(op, |[x, y]: [u8; 2]| int(x.into(), y.into()) as u8, cuda, inputs, out),
        other => Err(Error::dtype(op, other, "a number dtype")),
    })
}

/// `float` of a floating-point operand, or `int` of an integer one and the number, which its dtype must hold.
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
    if a.dtype() == DType::Bool {
        return Err(Error::dtype(op, DType::Bool, "a number dtype"));
    }
    if let Scalar::Float(_) = s {
        let why = format!("got the number {s} for a tensor of {}, wanted an integer", a.dtype());
        return Err(Error::invalid(op, why));
    }
    let s = s.fitting(op, a.dtype())?.to_i64();
    let numbers = [s];
    let cuda = &Expression::of_integers(text, &numbers);
    in_order(op, a.dtype(), [a], |inputs, out| match out.dtype() {
        DType::I64 => map_scalar(op, |[x]: [i64; 1]| int(x, s), cuda, inputs, out),
        DType::I32 => map_scalar(op, |[x]: [i32; 1]| int(x.into(), s) as i32, cuda, inputs, out),
        DType::U8 => map_scalar(op, |[x]: [u8; 1]| int(x.into(), s) as u8, cuda, inputs, out),
        other => Err(Error::dtype(op, other, "a number dtype")),
    })
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Scalar, Tensor};

    use crate::ops::{add_scalar, mul_scalar, rpow_scalar, rsub_scalar, sub_scalar};

    #[test]
    fn a_number_that_the_tensors_dtype_cannot_hold_is_refused_and_not_wrapped() {
        let x = Tensor::from_slice(&[1i32, 2], &[2], Device::CPU).unwrap();
        let runs = [
            ("add_scalar", add_scalar(&x, Scalar::Int(1 << 40))),
            ("sub_scalar", sub_scalar(&x, Scalar::Int(1 << 40))),
            ("rsub_scalar", rsub_scalar(&x, Scalar::Int(1 << 40))),
            ("mul_scalar", mul_scalar(&x, Scalar::Int(1 << 40))),
            ("rpow_scalar", rpow_scalar(&x, Scalar::Int(1 << 40))),
        ];
        for (name, run) in runs {
            let error = run.unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{name}: got the number 1099511627776 for a tensor of i32")),
                "{error}"
            );
        }
        assert_eq!(mul_scalar(&x, Scalar::Int(-3)).unwrap().to_vec::<i32>().unwrap(), [-3, -6]);
    }
}
