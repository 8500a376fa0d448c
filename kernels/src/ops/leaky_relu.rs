//! The leaky rectified linear unit.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, map, pointwise};

/// `x` where `x > 0`, else `slope x`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn leaky_relu(x: &Tensor, slope: f64) -> Result<Tensor> {
    map("leaky_relu", Forward { slope }, [x])
}

/// `dy` where `x > 0`, else `slope dy`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn leaky_relu_backward(x: &Tensor, dy: &Tensor, slope: f64) -> Result<Tensor> {
    map("leaky_relu_backward", Gradient { slope }, [x, dy])
}

pointwise!(Forward { slope }, |x| V::select(x.gt(V::zero()), x, x * c(slope)));
pointwise!(Gradient { slope }, |x, dy| V::select(x.gt(V::zero()), dy, dy * c(slope)));

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(|x| super::leaky_relu(x, 0.25), |x| x.max(0.25 * x), &floats(-10.0, 10.0));
    }
}
