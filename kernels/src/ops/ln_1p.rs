//! The natural logarithm of one more.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{map, pointwise};

/// `ln(1 + x)`, accurate near zero, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn ln_1p(x: &Tensor) -> Result<Tensor> {
    map("ln_1p", Forward, [x])
}

pointwise!(Forward, |x| x.ln_1p());

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::ln_1p, f64::ln_1p, &floats(-0.9, 20.0));
    }
}
