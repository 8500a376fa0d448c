//! The exponential less one.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{map, pointwise};

/// `e^x - 1`, accurate near zero, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn exp_m1(x: &Tensor) -> Result<Tensor> {
    map("exp_m1", Forward, [x])
}

pointwise!(Forward, |x| x.exp_m1());

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::exp_m1, f64::exp_m1, &floats(-10.0, 10.0));
    }
}
