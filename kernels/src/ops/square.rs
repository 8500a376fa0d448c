//! The square.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{map, pointwise};

/// `x²`, elementwise; integers wrap.
///
/// # Errors
/// If the dtype is bool.
pub fn square(x: &Tensor) -> Result<Tensor> {
    crate::arithmetic::unary("square", Forward, (|x| x.wrapping_mul(x), "wrapping_mul(x[0], x[0])"), x)
}

/// `2 x dy`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn square_backward(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("square_backward", Gradient, [x, dy])
}

pointwise!(Forward, |x| x * x);
pointwise!(Gradient, |x, dy| (x + x) * dy);

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::square, |x| x * x, &floats(-10.0, 10.0));
    }
}
