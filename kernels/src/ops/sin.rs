//! The sine.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{map, pointwise};

/// `sin x`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn sin(x: &Tensor) -> Result<Tensor> {
    map("sin", Forward, [x])
}

/// `dy cos x`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn sin_backward(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("sin_backward", Gradient, [x, dy])
}

pointwise!(Forward, |x| x.sin());
pointwise!(Gradient, |x, dy| dy * x.cos());

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::sin, f64::sin, &floats(-10.0, 10.0));
    }
}
