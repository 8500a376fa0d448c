//! Products of two tensors, or of a tensor and a number.

use phalanx_tensor::{Result, Scalar, Tensor};

use crate::pointwise::{c, map_over, pointwise};

/// `a * b`, broadcast; floating-point or integer, of one dtype.
///
/// # Errors
/// If the shapes do not broadcast, dtypes or devices differ, or the dtype is bool.
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    crate::arithmetic::binary("mul", Mul, (i64::wrapping_mul, "wrapping_mul(x[0], x[1])"), a, b)
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
    crate::arithmetic::scalar(
        "mul_scalar",
        MulScalar { s: s.to_f64() },
        (i64::wrapping_mul, "wrapping_mul(x[0], k[0])"),
        a,
        s,
    )
}

pointwise!(Mul, |a, b| a * b);
pointwise!(MulScalar { s }, |a| a * c(s));
