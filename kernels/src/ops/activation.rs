//! The activation functions of neural networks, and their gradients.
//!
//! A new one is an entry of the table below, its gradient another, as in `unary.rs`; numbers beside the elements come
//! in braces.

use phalanx_tensor::{Result, Tensor};

use super::arithmetic::unary;
use crate::pointwise::{c, elementwise, map, map_over, modify, pointwise};
use crate::simd::{Float, Vector};

elementwise! {
    /// `1 / (1 + e^-x)`, elementwise.
    sigmoid(x) = x.sigmoid();
    /// `dy y (1 - y)` for `y = sigmoid(x)`.
    sigmoid_backward(y, dy) = dy * (c::<V>(1.0) - y) * y;
    /// `tanh(x)`, elementwise, any shape and floating-point dtype.
    tanh(x) = x.tanh();
    /// `dy (1 - y²)` for `y = tanh(x)`.
    tanh_backward(y, dy) = dy * (c::<V>(1.0) - y * y);
    /// `x` where `x > 0`, else `alpha (e^x - 1)`, elementwise.
    elu(x) { alpha } = V::select_or(x.gt(V::zero()), x, || x.exp_m1() * c(alpha));
    /// `dy` where `x > 0`, else `dy alpha e^x`.
    elu_backward(x, dy) { alpha } = V::select_or(x.gt(V::zero()), dy, || dy * c(alpha) * x.exp());
    /// `x` where `x > 0`, else `slope x`, elementwise.
    leaky_relu(x) { slope } = V::select(x.gt(V::zero()), x, x * c(slope));
    /// `dy` where `x > 0`, else `slope dy`.
    leaky_relu_backward(x, dy) { slope } = V::select(x.gt(V::zero()), dy, dy * c(slope));
    /// `ln(1 + e^(beta x)) / beta`, and `x` itself where `beta x > threshold`, elementwise.
    softplus(x) { beta, threshold } = {
    let z = x * c(beta);
    V::select(z.gt(c(threshold)), x, ln_1p_exp(z) / c(beta))
};
    /// `dy sigmoid(beta x)`, and `dy` itself where `beta x > threshold`.
    softplus_backward(x, dy) { beta, threshold } = {
    let z = x * c(beta);
    dy * V::select(z.gt(c(threshold)), V::splat(V::Elem::ONE), z.sigmoid())
};
    /// `x sigmoid(x)`, elementwise.
    silu(x) = x * x.sigmoid();
    /// `silu(x) y`, elementwise: the inner features of a gated perceptron (SwiGLU).
    silu_mul(x, y) = x * x.sigmoid() * y;
    /// `dy y s (1 + x (1 - s))` with `s = sigmoid(x)`: the gradient of `x` in [`silu_mul`]. That of `y` is `silu_mul(x, dy)`.
    silu_mul_backward(x, y, dy) = {
        let s = x.sigmoid();
        dy * y * s * x.mul_add(c::<V>(1.0) - s, c(1.0))
    };
}

/// `ln(1 + e^x)`, for x of any magnitude.
#[inline(always)]
pub(crate) fn ln_1p_exp<V: Vector>(x: V) -> V {
    x.nan_max(V::zero()) + (-x.abs()).exp().ln_1p()
}

/// `max(x, 0)`, NaN for NaN, elementwise; integers wrap.
///
/// # Errors
/// If the dtype is bool.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    unary("relu", Relu, (|x| x.max(0), "x[0] > 0 ? x[0] : 0"), x)
}

/// `dy` where `y > 0`, else 0, for `y = relu(x)`; `dy` where it is NaN.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn relu_backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("relu_backward", ReluGradient, [y, dy])
}

pointwise!(Relu, |x| V::select(x.le(V::zero()), V::zero(), x));
pointwise!(ReluGradient, |y, dy| V::select(y.le(V::zero()), V::zero(), dy));

/// `dy s (1 + x (1 - s))` with `s = sigmoid(x)`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn silu_backward(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("silu_backward", SiluGradient, [x, dy])
}

/// [`silu_backward`] that writes the result over `dy` where nothing else refers to it.
///
/// # Errors
/// As [`silu_backward`].
pub fn silu_backward_over(x: &Tensor, dy: Tensor) -> Result<Tensor> {
    map_over("silu_backward", SiluGradient, x, dy)
}

pointwise!(SiluGradient, |x, dy| {
    let s = x.sigmoid();
    dy * s * x.mul_add(c::<V>(1.0) - s, c(1.0))
});

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

/// [`gelu_backward`] that writes the result over `dy` where nothing else refers to it.
///
/// # Errors
/// As [`gelu_backward`].
pub fn gelu_backward_over(x: &Tensor, dy: Tensor, kind: Gelu) -> Result<Tensor> {
    match kind {
        Gelu::Exact => map_over("gelu_backward", ExactGradient, x, dy),
        Gelu::Tanh => map_over("gelu_backward", TanhGradient, x, dy),
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

    use super::*;
    use crate::ops::{mul, mul_over};
    use crate::testing::{FLOATS, assert_unary, erf, floats, make, values};

    #[test]
    fn relu_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(relu, |x| x.max(0.0), &floats(-10.0, 10.0));
    }

    #[test]
    fn silu_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(silu, |x| x / (1.0 + (-x).exp()), &floats(-10.0, 10.0));
    }

    #[test]
    fn a_gated_product_has_the_bits_of_its_parts() {
        for dtype in [DType::F32, DType::F64] {
            for shape in [&[0][..], &[1], &[7], &[33], &[129], &[70, 1001]] {
                let [x, y, dy] = [2.0, 3.0, 0.5].map(|most| make(shape, dtype, &floats(-3.0, most)));
                let wanted = mul(&silu(&x).unwrap(), &y).unwrap();
                assert_eq!(values(&silu_mul(&x, &y).unwrap()), values(&wanted));
                let wanted = silu_backward(&x, &mul(&dy, &y).unwrap()).unwrap();
                assert_eq!(values(&silu_mul_backward(&x, &y, &dy).unwrap()), values(&wanted));
                let turned = |t: &Tensor| t.transpose(0, -1).unwrap();
                let (x, row) = (turned(&x), make(&[1], dtype, &|_| 0.75));
                let wanted = mul(&silu(&x).unwrap(), &row).unwrap();
                assert_eq!(values(&silu_mul(&x, &row).unwrap()), values(&wanted));
            }
        }
        // Halves are rounded once.
        for dtype in [DType::BF16, DType::F16] {
            let [x, y] = [2.0, 3.0].map(|most| make(&[1001], dtype, &floats(-3.0, most)));
            let wide = |t: &Tensor| crate::cast(t, DType::F32).unwrap();
            let wanted = crate::cast(&silu_mul(&wide(&x), &wide(&y)).unwrap(), dtype).unwrap();
            assert_eq!(values(&silu_mul(&x, &y).unwrap()), values(&wanted));
        }
    }

    #[test]
    fn sigmoid_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(sigmoid, |x| 1.0 / (1.0 + (-x).exp()), &floats(-10.0, 10.0));
    }

    #[test]
    fn tanh_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(tanh, f64::tanh, &floats(-10.0, 10.0));
    }

    #[test]
    fn elu_equals_the_formula_on_every_shape_and_dtype() {
        let formula = |x: f64| if x > 0.0 { x } else { 0.5 * x.exp_m1() };
        assert_unary(|x| elu(x, 0.5), formula, &floats(-10.0, 10.0));
    }

    #[test]
    fn leaky_relu_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(|x| leaky_relu(x, 0.25), |x| x.max(0.25 * x), &floats(-10.0, 10.0));
    }

    #[test]
    fn softplus_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(|x| softplus(x, 1.0, 20.0), |x| x.exp().ln_1p(), &floats(-10.0, 10.0));
        let formula = |x: f64| if 2.0 * x > 1.5 { x } else { (2.0 * x).exp().ln_1p() / 2.0 };
        assert_unary(|x| softplus(x, 2.0, 1.5), formula, &floats(-3.0, 3.0));
    }

    #[test]
    fn tails_of_softplus_are_finite() {
        let x = make(&[2], phalanx_tensor::DType::F32, &|i| [-3e38, 3e38][i]);
        let y = softplus(&x, 1.0, f64::INFINITY).unwrap();
        assert_eq!(values(&y), [0.0, values(&x)[1]]);
    }

    #[test]
    fn gelu_equals_the_formula_on_every_shape_and_dtype() {
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

    type Of = fn(&Tensor, &Tensor) -> Result<Tensor>;
    type Over = fn(&Tensor, Tensor) -> Result<Tensor>;

    #[test]
    fn what_is_written_over_a_gradient_has_the_bits_of_what_is_written_beside_it() {
        let both: [(Of, Over); 4] = [
            (|x, dy| gelu_backward(x, dy, Gelu::Exact), |x, dy| gelu_backward_over(x, dy, Gelu::Exact)),
            (|x, dy| gelu_backward(x, dy, Gelu::Tanh), |x, dy| gelu_backward_over(x, dy, Gelu::Tanh)),
            (silu_backward, silu_backward_over),
            (mul, mul_over),
        ];
        for (of, over) in both {
            for dtype in FLOATS {
                for shape in [&[0][..], &[1], &[7], &[33], &[129], &[3, 1000], &[70, 1001]] {
                    let x = make(shape, dtype, &floats(-3.0, 3.0));
                    let dy = make(shape, dtype, &floats(-1.0, 0.5));
                    let wanted = values(&of(&x, &dy).unwrap());
                    let (alone, whole) = (dy.copy().unwrap(), values(&dy));
                    let place = std::ptr::from_ref(alone.storage()).addr();
                    let result = over(&x, alone).unwrap();
                    assert_eq!(std::ptr::from_ref(result.storage()).addr(), place);
                    assert_eq!(values(&result), wanted);
                    assert_eq!(values(&over(&x, dy.clone()).unwrap()), wanted);
                    assert_eq!(values(&dy), whole);
                    // Transposed, and broadcast either way.
                    let transposed = |t: &Tensor| t.transpose(0, -1).unwrap();
                    let swapped = over(&transposed(&x), transposed(&dy)).unwrap();
                    assert_eq!(values(&swapped), values(&of(&transposed(&x), &transposed(&dy)).unwrap()));
                    let strided = over(&transposed(&x), transposed(&dy).copy().unwrap()).unwrap();
                    assert_eq!(values(&strided), values(&swapped));
                    let one = make(&[1], dtype, &|_| 0.5);
                    let (spread, row) = (over(&one, dy.copy().unwrap()), over(&x, one.copy().unwrap()));
                    assert_eq!(values(&spread.unwrap()), values(&of(&one, &dy).unwrap()));
                    assert_eq!(values(&row.unwrap()), values(&of(&x, &one).unwrap()));
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_over_a_gradient_too() {
        let (x, int) = (make(&[2], DType::F32, &|_| 1.0), make(&[2], DType::I64, &|_| 1.0));
        for dy in [make(&[2], DType::F64, &|_| 1.0), make(&[3], DType::F32, &|_| 1.0)] {
            assert!(gelu_backward_over(&x, dy, Gelu::Tanh).is_err());
        }
        assert!(mul_over(&int, int.copy().unwrap()).is_err());
    }
}
