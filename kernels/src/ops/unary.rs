//! Functions of one element, and their gradients.
//!
//! To add one: a line in the table below, a line for its gradient, and a test with `assert_unary` against its formula;
//! autograd needs an entry in its own table. `erf(x) = x.erf();` declares `pub fn erf(x: &Tensor) -> Result<Tensor>`,
//! which computes the body on vectors `x` of type `V` and on a GPU as the CUDA text that [`crate::pointwise`] makes of
//! it. Functions that vectors do not have are in `functions.rs`, functions of neural networks in `activation.rs`.

use bytemuck::{cast_slice, cast_slice_mut};
use phalanx_tensor::{DType, Device, Element, Result, Tensor, bf16, f16};

use super::arithmetic::unary;
use crate::pointwise::{c, elementwise, in_order, map, map_stored, pointwise};
use crate::simd::{Isa, Kernel, dispatch};

elementwise! {
    /// `cos x`, elementwise.
    cos(x) = x.cos();
    /// `-dy sin x`.
    cos_backward(x, dy) = -dy * x.sin();
    /// `erf x`, elementwise.
    erf(x) = x.erf();
    /// `dy 2 / sqrt(pi) e^(-x²)`.
    erf_backward(x, dy) = dy * c(std::f64::consts::FRAC_2_SQRT_PI) * (-(x * x)).exp();
    /// `e^x`, elementwise.
    exp(x) = x.exp();
    /// `e^x - 1`, accurate near zero, elementwise.
    exp_m1(x) = x.exp_m1();
    /// `ln x`, elementwise.
    log(x) = x.ln();
    /// `ln(1 + x)`, accurate near zero, elementwise.
    ln_1p(x) = x.ln_1p();
    /// `1 / x`, elementwise.
    reciprocal(x) = c::<V>(1.0) / x;
    /// `-dy y²` for `y = 1 / x`.
    reciprocal_backward(y, dy) = -dy * y * y;
    /// `1 / sqrt(x)`, elementwise.
    rsqrt(x) = c::<V>(1.0) / x.sqrt();
    /// `-dy y³ / 2` for `y = 1 / sqrt(x)`.
    rsqrt_backward(y, dy) = dy * c(-0.5) * y * (y * y);
    /// `sin x`, elementwise.
    sin(x) = x.sin();
    /// `dy cos x`.
    sin_backward(x, dy) = dy * x.cos();
    /// `sqrt(x)`, elementwise.
    sqrt(x) = x.sqrt();
    /// `dy / (2 y)` for `y = sqrt(x)`.
    sqrt_backward(y, dy) = dy / (y + y);
}

/// `|x|`, elementwise; integers wrap.
///
/// # Errors
/// If the dtype is bool.
pub fn abs(x: &Tensor) -> Result<Tensor> {
    if let Some(y) = map_signs("abs", Signs { cleared: SIGN, flipped: 0 }, x) {
        return y;
    }
    unary("abs", Abs, (i64::wrapping_abs, "x[0] < 0 ? wrapping_sub(0, x[0]) : x[0]"), x)
}

/// `dy sign(x)`, 0 at 0.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn abs_backward(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("abs_backward", AbsGradient, [x, dy])
}

pointwise!(Abs, |x| x.abs());
pointwise!(AbsGradient, |x, dy| V::select(x.eq(V::zero()), V::zero(), V::select(x.lt(V::zero()), -dy, dy)));

/// `-x`, elementwise; integers wrap.
///
/// # Errors
/// If the dtype is bool.
pub fn neg(x: &Tensor) -> Result<Tensor> {
    if let Some(y) = map_signs("neg", Signs { cleared: 0, flipped: SIGN }, x) {
        return y;
    }
    unary("neg", Neg, (i64::wrapping_neg, "wrapping_sub(0, x[0])"), x)
}

pointwise!(Neg, |x| -x);

/// `x²`, elementwise; integers wrap.
///
/// # Errors
/// If the dtype is bool.
pub fn square(x: &Tensor) -> Result<Tensor> {
    unary("square", Square, (|x| x.wrapping_mul(x), "wrapping_mul(x[0], x[0])"), x)
}

/// `2 x dy`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn square_backward(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("square_backward", SquareGradient, [x, dy])
}

pointwise!(Square, |x| x * x);
pointwise!(SquareGradient, |x, dy| (x + x) * dy);

/// The sign's bit of a half.
const SIGN: u16 = 0x8000;

/// What is done to the bits of a half.
#[derive(Clone, Copy)]
struct Signs {
    /// Bits that are set to 0.
    cleared: u16,
    /// Bits that are then exchanged.
    flipped: u16,
}

/// The function of halves on a CPU, with the bits that widening and rounding give: a NaN is made quiet. `None` of other tensors.
fn map_signs(op: &'static str, signs: Signs, x: &Tensor) -> Option<Result<Tensor>> {
    match (x.device(), x.dtype()) {
        (Device::Cpu(_), DType::BF16) => Some(map_halves::<bf16>(op, signs, [0x7f80, 0x40], x)),
        (Device::Cpu(_), DType::F16) => Some(map_halves::<f16>(op, signs, [0x7c00, 0x200], x)),
        _ => None,
    }
}

fn map_halves<T: Element>(op: &'static str, signs: Signs, nan: [u16; 2], x: &Tensor) -> Result<Tensor> {
    in_order(op, x.dtype(), [x], |inputs, out| {
        let block = |[from]: [&[T]; 1], to: &mut [T]| {
            dispatch(SignBlock { from: cast_slice(from), to: cast_slice_mut(to), signs, nan });
        };
        map_stored(op, &block, inputs, out)
    })
}

struct SignBlock<'a> {
    from: &'a [u16],
    to: &'a mut [u16],
    signs: Signs,
    /// Infinity, beyond which are NaNs, and the bit that makes one quiet.
    nan: [u16; 2],
}

impl Kernel for SignBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let [infinity, quiet] = self.nan;
        let (kept, flipped) = (!self.signs.cleared, self.signs.flipped);
        for (to, &from) in self.to.iter_mut().zip(self.from) {
            let quiet = if from & !SIGN > infinity { quiet } else { 0 };
            *to = ((from | quiet) & kept) ^ flipped;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cast;
    use crate::testing::{assert_unary, floats};

    #[test]
    fn cos_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(cos, f64::cos, &floats(-10.0, 10.0));
    }

    #[test]
    fn erf_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(erf, crate::testing::erf, &floats(-4.0, 4.0));
    }

    #[test]
    fn exp_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(exp, f64::exp, &floats(-10.0, 10.0));
    }

    #[test]
    fn exp_m1_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(exp_m1, f64::exp_m1, &floats(-10.0, 10.0));
    }

    #[test]
    fn log_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(log, f64::ln, &floats(0.1, 20.0));
    }

    #[test]
    fn ln_1p_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(ln_1p, f64::ln_1p, &floats(-0.9, 20.0));
    }

    #[test]
    fn reciprocal_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(reciprocal, f64::recip, &floats(0.1, 9.0));
    }

    #[test]
    fn rsqrt_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(rsqrt, |x| 1.0 / x.sqrt(), &floats(0.1, 50.0));
    }

    #[test]
    fn sin_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(sin, f64::sin, &floats(-10.0, 10.0));
    }

    #[test]
    fn sqrt_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(sqrt, f64::sqrt, &floats(0.0, 50.0));
    }

    #[test]
    fn abs_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(abs, f64::abs, &floats(-10.0, 10.0));
    }

    #[test]
    fn neg_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(neg, |x| -x, &floats(-10.0, 10.0));
    }

    #[test]
    fn square_equals_the_formula_on_every_shape_and_dtype() {
        assert_unary(square, |x| x * x, &floats(-10.0, 10.0));
    }

    #[test]
    fn halves_have_the_bits_that_widening_and_rounding_give() {
        type Function = fn(&Tensor) -> phalanx_tensor::Result<Tensor>;
        let bf16s: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let f16s: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let all = [
            Tensor::from_slice(&bf16s, &[256, 256], Device::CPU).unwrap(),
            Tensor::from_slice(&f16s, &[256, 256], Device::CPU).unwrap(),
        ];
        for x in all.iter().flat_map(|x| [x.clone(), x.transpose(0, 1).unwrap(), x.narrow(1, 3, 33).unwrap()])
        {
            for f in [abs as Function, neg] {
                let wide = cast(&x, phalanx_tensor::DType::F32).unwrap();
                let wanted = cast(&f(&wide).unwrap(), x.dtype()).unwrap().contiguous().unwrap();
                let got = f(&x).unwrap().contiguous().unwrap();
                assert!(*got.read_bytes("test").unwrap() == *wanted.read_bytes("test").unwrap());
            }
        }
    }
}
