//! The error function.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, map, pointwise};

/// `erf x`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn erf(x: &Tensor) -> Result<Tensor> {
    map("erf", Forward, [x])
}

/// `dy 2 / sqrt(pi) e^(-x²)`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn erf_backward(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("erf_backward", Gradient, [x, dy])
}

pointwise!(Forward, |x| x.erf());
pointwise!(Gradient, |x, dy| dy * c(std::f64::consts::FRAC_2_SQRT_PI) * (-(x * x)).exp());

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::erf, crate::testing::erf, &floats(-4.0, 4.0));
    }
}
