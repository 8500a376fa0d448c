//! Arithmetic of two tensors, or of a tensor and a number. Floating-point operands go through vectors, integers through `i64`.
//!
//! What integers do is stated twice, side by side: as a function, and as CUDA text of `x[0]` and of `x[1]` or the number
//! `k[0]`, all `i64`.

use phalanx_tensor::{DType, Error, Result, Scalar, Tensor};

use super::cast;
use crate::check;
use crate::ops::cast::Number;
use crate::pointwise::cuda::Expression;
use crate::pointwise::{Pointwise, c, in_order, map, map_over, map_scalar, pointwise};
use crate::real::for_number;

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
    in_order(op, a.dtype(), [a, b], |inputs, out| {
        for_number!(op, out.dtype(), integer T => {
            map_scalar(op, |[x, y]: [T; 2]| T::from_i64(int(x.to_i64(), y.to_i64())), cuda, inputs, out)
        })
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
    in_order(op, a.dtype(), [a], |inputs, out| {
        for_number!(op, out.dtype(), integer T => {
            map_scalar(op, |[x]: [T; 1]| T::from_i64(int(x.to_i64(), s)), cuda, inputs, out)
        })
    })
}

/// `a + b`, broadcast; floating-point or integer, of one dtype.
///
/// # Errors
/// If the shapes do not broadcast, dtypes or devices differ, or the dtype is bool.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary("add", Add, (i64::wrapping_add, "wrapping_add(x[0], x[1])"), a, b)
}

/// `a + s` in `a`'s dtype.
///
/// # Errors
/// If the dtype is bool, or an integer one and `s` is no integer.
pub fn add_scalar(a: &Tensor, s: Scalar) -> Result<Tensor> {
    scalar("add_scalar", AddScalar { s: s.to_f64() }, (i64::wrapping_add, "wrapping_add(x[0], k[0])"), a, s)
}

pointwise!(Add, |a, b| a + b);
pointwise!(AddScalar { s }, |a| a + c(s));

/// `a - b`, broadcast; floating-point or integer, of one dtype.
///
/// # Errors
/// If the shapes do not broadcast, dtypes or devices differ, or the dtype is bool.
pub fn sub(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary("sub", Sub, (i64::wrapping_sub, "wrapping_sub(x[0], x[1])"), a, b)
}

/// `a - s` in `a`'s dtype.
///
/// # Errors
/// If the dtype is bool, or an integer one and `s` is no integer.
pub fn sub_scalar(a: &Tensor, s: Scalar) -> Result<Tensor> {
    scalar("sub_scalar", SubScalar { s: s.to_f64() }, (i64::wrapping_sub, "wrapping_sub(x[0], k[0])"), a, s)
}

/// `s - a` in `a`'s dtype.
///
/// # Errors
/// If the dtype is bool, or an integer one and `s` is no integer.
pub fn rsub_scalar(a: &Tensor, s: Scalar) -> Result<Tensor> {
    scalar(
        "rsub_scalar",
        ScalarSub { s: s.to_f64() },
        (|a, s| s.wrapping_sub(a), "wrapping_sub(k[0], x[0])"),
        a,
        s,
    )
}

pointwise!(Sub, |a, b| a - b);
pointwise!(SubScalar { s }, |a| a - c(s));
pointwise!(ScalarSub { s }, |a| c::<V>(s) - a);

/// `a * b`, broadcast; floating-point or integer, of one dtype.
///
/// # Errors
/// If the shapes do not broadcast, dtypes or devices differ, or the dtype is bool.
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary("mul", Mul, (i64::wrapping_mul, "wrapping_mul(x[0], x[1])"), a, b)
}

/// [`mul`] of floating-point tensors that writes the product over `b` where nothing else refers to it and it is of `a`'s shape.
///
/// # Errors
/// As [`mul`].
pub fn mul_over(a: &Tensor, b: Tensor) -> Result<Tensor> {
    map_over("mul", Mul, a, b)
}

/// `a * s` in `a`'s dtype.
///
/// # Errors
/// If the dtype is bool, or an integer one and `s` is no integer.
pub fn mul_scalar(a: &Tensor, s: Scalar) -> Result<Tensor> {
    scalar("mul_scalar", MulScalar { s: s.to_f64() }, (i64::wrapping_mul, "wrapping_mul(x[0], k[0])"), a, s)
}

pointwise!(Mul, |a, b| a * b);
pointwise!(MulScalar { s }, |a| a * c(s));

/// `a / b`, broadcast, of one dtype; f32 if that is an integer one.
///
/// # Errors
/// If the shapes do not broadcast, or dtypes or devices differ.
pub fn div(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    crate::check::same("div", &[a, b])?;
    map("div", Div, [&divisible(a)?, &divisible(b)?])
}

/// `a / s` in `a`'s dtype, f32 if that is an integer one.
///
/// # Errors
/// If the result cannot be allocated.
pub fn div_scalar(a: &Tensor, s: Scalar) -> Result<Tensor> {
    map("div_scalar", DivScalar { s: s.to_f64() }, [&divisible(a)?])
}

/// `s / a` in `a`'s dtype, f32 if that is an integer one.
///
/// # Errors
/// If the result cannot be allocated.
pub fn rdiv_scalar(a: &Tensor, s: Scalar) -> Result<Tensor> {
    map("rdiv_scalar", ScalarDiv { s: s.to_f64() }, [&divisible(a)?])
}

/// `-dy a / b²`, the gradient of `b` in `a / b`, of the broadcast shape.
///
/// # Errors
/// If the shapes do not broadcast, or dtypes or devices differ.
pub fn div_backward_divisor(a: &Tensor, b: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("div_backward", DivisorGradient, [a, b, dy])
}

/// `-dy s / a²`, the gradient of `a` in `s / a`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn rdiv_backward(a: &Tensor, dy: &Tensor, s: Scalar) -> Result<Tensor> {
    map("div_backward", ScalarDivGradient { s: s.to_f64() }, [a, dy])
}

/// Quotients of integers are floating-point.
fn divisible(x: &Tensor) -> Result<Tensor> {
    if x.dtype().is_float() { Ok(x.clone()) } else { cast(x, DType::F32) }
}

pointwise!(Div, |a, b| a / b);
pointwise!(DivScalar { s }, |a| a / c(s));
pointwise!(ScalarDiv { s }, |a| c::<V>(s) / a);
pointwise!(DivisorGradient, |a, b, dy| -dy * (a / b / b));
pointwise!(ScalarDivGradient { s }, |a, dy| -dy * (c::<V>(s) / a / a));

/// The larger element, broadcast; NaN where either is. Floating-point or integer, of one dtype.
///
/// # Errors
/// If the shapes do not broadcast, dtypes or devices differ, or the dtype is bool.
pub fn maximum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary("maximum", Maximum, (i64::max, "x[0] > x[1] ? x[0] : x[1]"), a, b)
}

/// The smaller element, broadcast; NaN where either is. Floating-point or integer, of one dtype.
///
/// # Errors
/// If the shapes do not broadcast, dtypes or devices differ, or the dtype is bool.
pub fn minimum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary("minimum", Minimum, (i64::min, "x[0] < x[1] ? x[0] : x[1]"), a, b)
}

/// The gradient of `high` in `maximum(high, low)`, and of `low` in `minimum(low, high)` with the two exchanged:
/// `dy` where `high` is larger, half of it at a tie, else 0.
///
/// # Errors
/// If the shapes do not broadcast, or dtypes or devices differ.
pub fn maximum_backward(high: &Tensor, low: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("maximum_backward", MaximumGradient, [high, low, dy])
}

pointwise!(Maximum, |a, b| a.nan_max(b));
pointwise!(Minimum, |a, b| a.nan_min(b));
pointwise!(MaximumGradient, |high, low, dy| {
    let tied = V::select(high.eq(low), dy * c(0.5), dy);
    V::select(high.lt(low), V::zero(), tied)
});

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Scalar, Tensor};

    use super::super::{add_scalar, mul_scalar, rpow_scalar, rsub_scalar, sub_scalar};

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
