//! The logistic function.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, map, pointwise};

/// `1 / (1 + e^-x)`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    map("sigmoid", Forward, [x])
}

/// `dy y (1 - y)` for `y = sigmoid(x)`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn sigmoid_backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("sigmoid_backward", Gradient, [y, dy])
}

pointwise!(Forward, |x| x.sigmoid());
pointwise!(Gradient, |y, dy| dy * (c::<V>(1.0) - y) * y);

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::sigmoid, |x| 1.0 / (1.0 + (-x).exp()), &floats(-10.0, 10.0));
    }
}
