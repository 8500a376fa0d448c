//! The cosine.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{map, pointwise};

/// `cos x`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn cos(x: &Tensor) -> Result<Tensor> {
    map("cos", Forward, [x])
}

/// `-dy sin x`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn cos_backward(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("cos_backward", Gradient, [x, dy])
}

pointwise!(Forward, |x| x.cos());
pointwise!(Gradient, |x, dy| -dy * x.sin());

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::cos, f64::cos, &floats(-10.0, 10.0));
    }
}
