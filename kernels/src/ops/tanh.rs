//! The hyperbolic tangent.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, map, pointwise};

/// `tanh(x)`, elementwise, any shape and floating-point dtype.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn tanh(x: &Tensor) -> Result<Tensor> {
    map("tanh", Forward, [x])
}

/// `dy (1 - y²)` for `y = tanh(x)`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn tanh_backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("tanh_backward", Gradient, [y, dy])
}

pointwise!(Forward, |x| x.tanh());
pointwise!(Gradient, |y, dy| dy * (c::<V>(1.0) - y * y));

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::tanh, f64::tanh, &floats(-10.0, 10.0));
    }
}
