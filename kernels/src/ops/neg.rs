//! The negative.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{SIGN, Signs, map_signs, pointwise};

/// `-x`, elementwise; integers wrap.
///
/// # Errors
/// If the dtype is bool.
pub fn neg(x: &Tensor) -> Result<Tensor> {
    if let Some(y) = map_signs("neg", Signs { cleared: 0, flipped: SIGN }, x) {
        return y;
    }
    crate::arithmetic::unary("neg", Forward, (i64::wrapping_neg, "wrapping_sub(0, x[0])"), x)
}

pointwise!(Forward, |x| -x);

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::neg, |x| -x, &floats(-10.0, 10.0));
    }
}
