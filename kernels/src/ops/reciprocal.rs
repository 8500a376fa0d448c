//! The inverse.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, map, pointwise};

/// `1 / x`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn reciprocal(x: &Tensor) -> Result<Tensor> {
    map("reciprocal", Forward, [x])
}

/// `-dy y²` for `y = 1 / x`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn reciprocal_backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("reciprocal_backward", Gradient, [y, dy])
}

pointwise!(Forward, |x| c::<V>(1.0) / x);
pointwise!(Gradient, |y, dy| -dy * y * y);

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::reciprocal, f64::recip, &floats(0.1, 9.0));
    }
}
