//! The exponential.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{map, pointwise};

/// `e^x`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn exp(x: &Tensor) -> Result<Tensor> {
    map("exp", Forward, [x])
}

pointwise!(Forward, |x| x.exp());

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::exp, f64::exp, &floats(-10.0, 10.0));
    }
}
