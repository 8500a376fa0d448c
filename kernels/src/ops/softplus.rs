//! A smooth rectifier.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, map, pointwise};
use crate::simd::{Float, Vector};

/// `ln(1 + e^(beta x)) / beta`, and `x` itself where `beta x > threshold`, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn softplus(x: &Tensor, beta: f64, threshold: f64) -> Result<Tensor> {
    map("softplus", Forward { beta, threshold }, [x])
}

/// `dy sigmoid(beta x)`, and `dy` itself where `beta x > threshold`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn softplus_backward(x: &Tensor, dy: &Tensor, beta: f64, threshold: f64) -> Result<Tensor> {
    map("softplus_backward", Gradient { beta, threshold }, [x, dy])
}

/// `ln(1 + e^x)`, for x of any magnitude.
#[inline(always)]
pub(crate) fn ln_1p_exp<V: Vector>(x: V) -> V {
    x.nan_max(V::zero()) + (-x.abs()).exp().ln_1p()
}

pointwise!(Forward { beta, threshold }, |x| {
    let z = x * c(beta);
    V::select(z.gt(c(threshold)), x, ln_1p_exp(z) / c(beta))
});
pointwise!(Gradient { beta, threshold }, |x, dy| {
    let z = x * c(beta);
    dy * V::select(z.gt(c(threshold)), V::splat(V::Elem::ONE), z.sigmoid())
});

#[cfg(test)]
mod tests {
    use crate::testing::{assert_unary, floats, make, values};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(|x| super::softplus(x, 1.0, 20.0), |x| x.exp().ln_1p(), &floats(-10.0, 10.0));
        let formula = |x: f64| if 2.0 * x > 1.5 { x } else { (2.0 * x).exp().ln_1p() / 2.0 };
        assert_unary(|x| super::softplus(x, 2.0, 1.5), formula, &floats(-3.0, 3.0));
    }

    #[test]
    fn tails_are_finite() {
        let x = make(&[2], phalanx_tensor::DType::F32, &|i| [-3e38, 3e38][i]);
        let y = super::softplus(&x, 1.0, f64::INFINITY).unwrap();
        assert_eq!(values(&y), [0.0, values(&x)[1]]);
    }
}
