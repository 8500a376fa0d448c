//! The pointwise functions that may follow a product before it is stored.

use crate::simd::Vector;

/// A function applied to each finished element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// `max(x, 0)`; NaN stays NaN.
    Relu,
    /// `x sigmoid(x)`.
    Silu,
    /// `x Phi(x)` with the normal distribution's `Phi`, by erf.
    GeluErf,
    /// `x Phi(x)` with `Phi(x)` approximated by tanh (Hendrycks and Gimpel, 2016).
    GeluTanh,
}

impl Activation {
    /// The function's value in every lane. The one body: fused or apart, the bits are these.
    #[inline(always)]
    pub(crate) fn apply<V: Vector>(self, x: V) -> V {
        match self {
            Activation::Relu => relu(x),
            Activation::Silu => x * x.sigmoid(),
            Activation::GeluErf => gelu_erf(x),
            Activation::GeluTanh => gelu_tanh(x),
        }
    }
}

/// A constant in every lane.
#[inline(always)]
fn c<V: Vector>(x: f64) -> V {
    use crate::simd::Float;
    V::splat(V::Elem::from_f64(x))
}

#[inline(always)]
fn relu<V: Vector>(x: V) -> V {
    V::select(x.le(V::zero()), V::zero(), x)
}

/// `x / 2 (1 + erf(x / sqrt 2))`, through erfc so that the left tail keeps its digits.
#[inline(always)]
fn gelu_erf<V: Vector>(x: V) -> V {
    c::<V>(0.5) * x * (x * c(-std::f64::consts::FRAC_1_SQRT_2)).erfc()
}

/// `x / 2 (1 + tanh(u))` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`, as `x sigmoid(2 u)`: the same function without the
/// cancellation in the left tail.
#[inline(always)]
fn gelu_tanh<V: Vector>(x: V) -> V {
    let scale = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
    let inner = (x * x).mul_add(c(0.044715 * scale), c(scale));
    x * (x * inner).sigmoid()
}
