//! Sums of two tensors, or of a tensor and a number.

use phalanx_tensor::{Result, Scalar, Tensor};

use crate::pointwise::{c, pointwise};

/// `a + b`, broadcast; floating-point or integer, of one dtype.
///
/// # Errors
/// If the shapes do not broadcast, dtypes or devices differ, or the dtype is bool.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    crate::arithmetic::binary("add", Add, (i64::wrapping_add, "wrapping_add(x[0], x[1])"), a, b)
}

/// `a + s` in `a`'s dtype.
///
/// # Errors
/// If the dtype is bool, or an integer one and `s` is no integer.
pub fn add_scalar(a: &Tensor, s: Scalar) -> Result<Tensor> {
    crate::arithmetic::scalar(
        "add_scalar",
        AddScalar { s: s.to_f64() },
        (i64::wrapping_add, "wrapping_add(x[0], k[0])"),
        a,
        s,
    )
}

pointwise!(Add, |a, b| a + b);
pointwise!(AddScalar { s }, |a| a + c(s));
