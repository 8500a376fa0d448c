//! The natural logarithm.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{map, pointwise};

/// `ln x`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn log(x: &Tensor) -> Result<Tensor> {
    map("log", Forward, [x])
}

pointwise!(Forward, |x| x.ln());

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::log, f64::ln, &floats(0.1, 20.0));
    }
}
