//! The Gaussian error linear unit.

use phalanx_tensor::{Result, Tensor};

use crate::pointwise::{c, map, modify, pointwise};
use crate::simd::Vector;

/// Which function is meant by "gelu".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gelu {
    /// `x P(X <= x)` for a standard normal X.
    #[default]
    Exact,
    /// `x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))`, GPT-2's.
    Tanh,
}

impl Gelu {
    /// The function in every lane, for kernels that apply it on the way.
    #[inline(always)]
    pub(crate) fn apply<V: Vector>(self, x: V) -> V {
        match self {
            Gelu::Exact => gelu_exact(x),
            Gelu::Tanh => gelu_tanh(x),
        }
    }
}

/// Either gelu, elementwise.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn gelu(x: &Tensor, kind: Gelu) -> Result<Tensor> {
    match kind {
        Gelu::Exact => map("gelu", Exact, [x]),
        Gelu::Tanh => map("gelu", Tanh, [x]),
    }
}

/// [`gelu`] in place, on the way of another operation.
pub(super) fn gelu_(op: &'static str, x: &mut Tensor, kind: Gelu) -> Result<()> {
    match kind {
        Gelu::Exact => modify(op, ExactOfFirst, x, None),
        Gelu::Tanh => modify(op, TanhOfFirst, x, None),
    }
}

/// `dy` times the derivative at `x`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn gelu_backward(x: &Tensor, dy: &Tensor, kind: Gelu) -> Result<Tensor> {
    match kind {
        Gelu::Exact => map("gelu_backward", ExactGradient, [x, dy]),
        Gelu::Tanh => map("gelu_backward", TanhGradient, [x, dy]),
    }
}

/// sqrt(2 / pi)
const FRAC_SQRT_2_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
/// The coefficient of the cube.
const CUBE: f64 = 0.044715;

/// The exact gelu: `x / 2 erfc(-x / sqrt(2))`, which keeps its digits in the left tail.
#[inline(always)]
pub(crate) fn gelu_exact<V: Vector>(x: V) -> V {
    x * normal_cdf(x)
}

/// The approximate gelu: `(1 + tanh u) / 2 = sigmoid(2 u)`, which keeps its digits in the left tail.
#[inline(always)]
pub(crate) fn gelu_tanh<V: Vector>(x: V) -> V {
    x * tanh_gate(x)
}

/// The exact gelu's derivative: `cdf(x) + x pdf(x)`.
#[inline(always)]
pub(crate) fn gelu_exact_slope<V: Vector>(x: V) -> V {
    let pdf = (x * x * c(-0.5)).exp() * c(0.5 * FRAC_SQRT_2_PI);
    x.mul_add(pdf, normal_cdf(x))
}

/// The approximate gelu's derivative: `s + x s (1 - s) 2 u'` for `s = sigmoid(2 u)`.
#[inline(always)]
pub(crate) fn gelu_tanh_slope<V: Vector>(x: V) -> V {
    let s = tanh_gate(x);
    // Beyond 100 the gate is 0 or 1; a bound keeps `(1 - s) u'` from becoming 0 times infinity.
    let z = V::select(x.abs().gt(c(100.0)), c(100.0), x);
    let inner = (z * z).mul_add(c(6.0 * CUBE * FRAC_SQRT_2_PI), c(2.0 * FRAC_SQRT_2_PI));
    (z * s * (c::<V>(1.0) - s)).mul_add(inner, s)
}

#[inline(always)]
fn normal_cdf<V: Vector>(x: V) -> V {
    (x * c(-std::f64::consts::FRAC_1_SQRT_2)).erfc() * c(0.5)
}

#[inline(always)]
fn tanh_gate<V: Vector>(x: V) -> V {
    let inner = (x * x).mul_add(c(2.0 * CUBE * FRAC_SQRT_2_PI), c(2.0 * FRAC_SQRT_2_PI));
    (x * inner).sigmoid()
}

pointwise!(Exact, |x| gelu_exact(x));
pointwise!(Tanh, |x| gelu_tanh(x));
pointwise!(ExactOfFirst, |x, _again| gelu_exact(x));
pointwise!(TanhOfFirst, |x, _again| gelu_tanh(x));
pointwise!(ExactGradient, |x, dy| dy * gelu_exact_slope(x));
pointwise!(TanhGradient, |x, dy| dy * gelu_tanh_slope(x));

#[cfg(test)]
mod tests {
    use phalanx_tensor::DType;

    use super::{Gelu, gelu, gelu_backward};
    use crate::testing::{assert_unary, erf, floats, make, values};

    #[test]
    fn equals_the_formula_on_every_shape_and_dtype() {
        let exact = |x: f64| 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2));
        assert_unary(|x| gelu(x, Gelu::Exact), exact, &floats(-6.0, 6.0));
        let tanh = |x: f64| {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        };
        assert_unary(|x| gelu(x, Gelu::Tanh), tanh, &floats(-6.0, 6.0));
    }

    #[test]
    fn tails_are_zero_or_the_identity() {
        for magnitude in [60.0, 1e3, 1e15, 3e38] {
            let x = make(&[2], DType::F32, &|i| [-magnitude, magnitude][i]);
            let ones = make(&[2], DType::F32, &|_| 1.0);
            for kind in [Gelu::Exact, Gelu::Tanh] {
                assert_eq!(values(&gelu(&x, kind).unwrap()), [0.0, values(&x)[1]]);
                assert_eq!(values(&gelu_backward(&x, &ones, kind).unwrap()), [0.0, 1.0]);
            }
        }
    }
}
