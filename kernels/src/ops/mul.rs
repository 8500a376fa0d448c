//! Products of two tensors, or of a tensor and a number.

use phalanx_tensor::{Result, Scalar, Tensor};

use crate::pointwise::Pointwise;
use crate::simd::{Float, Vector};

/// `a * b`, broadcast; floating-point or integer, of one dtype.
///
/// # Errors
/// If the shapes do not broadcast, dtypes or devices differ, or the dtype is bool.
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    crate::arithmetic::binary("mul", Mul, i64::wrapping_mul, a, b)
}

/// `a * s` in `a`'s dtype.
///
/// # Errors
/// If the dtype is bool, or an integer one and `s` is no integer.
pub fn mul_scalar(a: &Tensor, s: Scalar) -> Result<Tensor> {
    crate::arithmetic::scalar("mul", MulScalar(s.to_f64()), i64::wrapping_mul, a, s)
}

#[derive(Clone, Copy)]
struct Mul;

impl Pointwise<2> for Mul {
    #[inline(always)]
    fn eval<V: Vector>(self, [a, b]: [V; 2]) -> V {
        a * b
    }
}

#[derive(Clone, Copy)]
struct MulScalar(f64);

impl Pointwise<1> for MulScalar {
    #[inline(always)]
    fn eval<V: Vector>(self, [a]: [V; 1]) -> V {
        a * V::splat(V::Elem::from_f64(self.0))
    }
}
