//! The sigmoid-weighted linear unit, also called swish.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, map, map_over, pointwise};

/// `x sigmoid(x)`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    map("silu", Forward, [x])
}

/// `dy s (1 + x (1 - s))` with `s = sigmoid(x)`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn silu_backward(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("silu_backward", Gradient, [x, dy])
}

/// [`silu_backward`] that writes the result over `dy` where nothing else refers to it.
///
/// # Errors
/// As [`silu_backward`].
pub fn silu_backward_over(x: &Tensor, dy: Tensor) -> Result<Tensor> {
    map_over("silu_backward", Gradient, x, dy)
}

pointwise!(Forward, |x| x * x.sigmoid());
pointwise!(Gradient, |x, dy| {
    let s = x.sigmoid();
    dy * s * x.mul_add(c::<V>(1.0) - s, c(1.0))
});

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::silu, |x| x / (1.0 + (-x).exp()), &floats(-10.0, 10.0));
    }
}
