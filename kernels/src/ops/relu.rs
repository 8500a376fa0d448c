//! The rectified linear unit.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{map, pointwise};

/// `max(x, 0)`, NaN for NaN, elementwise; integers wrap.
///
/// # Errors
/// If the dtype is bool.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    crate::arithmetic::unary("relu", Forward, (|x| x.max(0), "x[0] > 0 ? x[0] : 0"), x)
}

/// `dy` where `y > 0`, else 0, for `y = relu(x)`; `dy` where it is NaN.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn relu_backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("relu_backward", Gradient, [y, dy])
}

pointwise!(Forward, |x| V::select(x.le(V::zero()), V::zero(), x));
pointwise!(Gradient, |y, dy| V::select(y.le(V::zero()), V::zero(), dy));

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::relu, |x| x.max(0.0), &floats(-10.0, 10.0));
    }
}
