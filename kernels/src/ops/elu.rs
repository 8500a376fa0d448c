//! The exponential linear unit.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, map, pointwise};

/// `x` where `x > 0`, else `alpha (e^x - 1)`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn elu(x: &Tensor, alpha: f64) -> Result<Tensor> {
    map("elu", Forward { alpha }, [x])
}

/// `dy` where `x > 0`, else `dy alpha e^x`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn elu_backward(x: &Tensor, dy: &Tensor, alpha: f64) -> Result<Tensor> {
    map("elu_backward", Gradient { alpha }, [x, dy])
}

pointwise!(Forward { alpha }, |x| V::select_or(x.gt(V::zero()), x, || x.exp_m1() * c(alpha)));
pointwise!(Gradient { alpha }, |x, dy| V::select_or(x.gt(V::zero()), dy, || dy * c(alpha) * x.exp()));

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        let formula = |x: f64| if x > 0.0 { x } else { 0.5 * x.exp_m1() };
        assert_unary(|x| super::elu(x, 0.5), formula, &floats(-10.0, 10.0));
    }
}
