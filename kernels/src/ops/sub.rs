//! Differences of two tensors, or of a tensor and a number.

use phalanx_tensor::{Result, Scalar, Tensor};

use crate::arithmetic::{binary, scalar};
use crate::pointwise::{c, pointwise};

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
