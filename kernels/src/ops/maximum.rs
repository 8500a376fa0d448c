//! The larger and the smaller of two elements.

use phalanx_tensor::{Result, Tensor};

use crate::arithmetic::binary;
use crate::pointwise::{c, map, pointwise};

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
    map("maximum_backward", Gradient, [high, low, dy])
}

pointwise!(Maximum, |a, b| a.nan_max(b));
pointwise!(Minimum, |a, b| a.nan_min(b));
pointwise!(Gradient, |high, low, dy| {
    let tied = V::select(high.eq(low), dy * c(0.5), dy);
    V::select(high.lt(low), V::zero(), tied)
});
