//! Quotients of two tensors, or of a tensor and a number.

use phalanx_tensor::{DType, Result, Scalar, Tensor};

use crate::ops::cast;
use crate::pointwise::{c, map, pointwise};

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
