//! The square root.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{map, pointwise};

/// `sqrt(x)`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn sqrt(x: &Tensor) -> Result<Tensor> {
    map("sqrt", Forward, [x])
}

/// `dy / (2 y)` for `y = sqrt(x)`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn sqrt_backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("sqrt_backward", Gradient, [y, dy])
}

pointwise!(Forward, |x| x.sqrt());
pointwise!(Gradient, |y, dy| dy / (y + y));

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::sqrt, f64::sqrt, &floats(0.0, 50.0));
    }
}
