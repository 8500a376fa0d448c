//! The hyperbolic tangent.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{Pointwise, map};
use crate::simd::Vector;

/// `tanh(x)`, elementwise, any shape and floating-point dtype.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn tanh(x: &Tensor) -> Result<Tensor> {
    map("tanh", Forward, [x])
}

/// `dy (1 - y²)` for `y = tanh(x)`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn tanh_backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("tanh_backward", BackwardOf, [y, dy])
}

#[derive(Clone, Copy)]
struct Forward;

impl Pointwise<1> for Forward {
    #[inline(always)]
    fn eval<V: Vector>(self, [x]: [V; 1]) -> V {
        x.tanh()
    }
}

#[derive(Clone, Copy)]
struct BackwardOf;

impl Pointwise<2> for BackwardOf {
    #[inline(always)]
    fn eval<V: Vector>(self, [y, dy]: [V; 2]) -> V {
        dy * (V::splat(<V::Elem as crate::simd::Float>::ONE) - y * y)
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(super::tanh, f64::tanh, &floats(-10.0, 10.0));
    }
}
