//! The magnitude.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{SIGN, Signs, map, map_signs, pointwise};

/// `|x|`, elementwise; integers wrap.
///
/// # Errors
/// If the dtype is bool.
pub fn abs(x: &Tensor) -> Result<Tensor> {
    if let Some(y) = map_signs("abs", Signs { cleared: SIGN, flipped: 0 }, x) {
        return y;
    }
    crate::arithmetic::unary(
        "abs",
        Forward,
        (i64::wrapping_abs, "x[0] < 0 ? wrapping_sub(0, x[0]) : x[0]"),
        x,
    )
}

/// `dy sign(x)`, 0 at 0.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn abs_backward(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("abs_backward", Gradient, [x, dy])
}

pointwise!(Forward, |x| x.abs());
pointwise!(Gradient, |x, dy| V::select(x.eq(V::zero()), V::zero(), V::select(x.lt(V::zero()), -dy, dy)));

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::abs, f64::abs, &floats(-10.0, 10.0));
    }
}
