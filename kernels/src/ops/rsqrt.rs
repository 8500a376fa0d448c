//! The inverse of the square root.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, map, pointwise};

/// `1 / sqrt(x)`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn rsqrt(x: &Tensor) -> Result<Tensor> {
    map("rsqrt", Forward, [x])
}

/// `-dy y³ / 2` for `y = 1 / sqrt(x)`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn rsqrt_backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("rsqrt_backward", Gradient, [y, dy])
}

pointwise!(Forward, |x| c::<V>(1.0) / x.sqrt());
pointwise!(Gradient, |y, dy| dy * c(-0.5) * y * (y * y));

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::rsqrt, |x| 1.0 / x.sqrt(), &floats(0.1, 50.0));
    }
}
