//! Rarely used elementwise functions without SIMD code: floats are computed in f64 and rounded once, integers in i64.
//!
//! One table each for floats and for integers. A line states what the function is twice, as a Rust function and as CUDA
//! text of `x[0]`, `x[1]`, ..; the loop around it is compiled once a dtype and calls the function by its address. So a
//! further function costs nothing to compile. What is worth vectors has a file of its own ([`crate::pointwise`]).

use phalanx_tensor::{DType, Element, Error, Result, Tensor};

use crate::check;
use crate::ops::cast::Number;
use crate::pointwise::cuda::{Expression, Numbers};
use crate::pointwise::{in_order, map, map_blocks, pointwise};
use crate::real::for_real;

/// `f` of floating-point tensors of one dtype, broadcast.
fn floats<const N: usize>(
    op: &'static str,
    f: fn([f64; N]) -> f64,
    text: &'static str,
    inputs: [&Tensor; N],
) -> Result<Tensor> {
    check::float(op, inputs[0])?;
    check::same(op, &inputs)?;
    let cuda = &Expression { text, value: "f64", numbers: Numbers::Integers(&[]) };
    in_order(op, inputs[0].dtype(), inputs, |inputs, out| {
        for_real!(op, out.dtype(), T => {
            map_each(op, &|x: [T; N]| <T as Number>::from_f64(f(x.map(T::to_f64))), cuda, inputs, out)
        })
    })
}

/// `f` of each element by itself.
fn map_each<T: Element, const N: usize>(
    op: &'static str,
    f: &(dyn Fn([T; N]) -> T + Sync),
    cuda: &Expression<'_>,
    inputs: [&Tensor; N],
    out: &mut Tensor,
) -> Result<()> {
    let all = |x: [&[T]; N], out: &mut [T]| {
        out.iter_mut().enumerate().for_each(|(j, to)| *to = f(x.map(|x| x[j])));
    };
    map_blocks(op, &all, cuda, inputs, out)
}

/// `f` of integer tensors of one dtype, broadcast; the result wraps to the dtype. Bools are integers if `bools`.
fn integers<const N: usize>(
    op: &'static str,
    f: fn([i64; N]) -> i64,
    text: &'static str,
    inputs: [&Tensor; N],
    bools: bool,
) -> Result<Tensor> {
    check::same(op, &inputs)?;
    let dtype = inputs[0].dtype();
    let cuda = &Expression::of_integers(text, &[]);
    in_order(op, dtype, inputs, |inputs, out| match dtype {
        DType::I64 => map_each(op, &f, cuda, inputs, out),
        DType::I32 => map_each(op, &|x: [i32; N]| f(x.map(i64::from)) as i32, cuda, inputs, out),
        DType::Bool if !bools => Err(Error::dtype(op, dtype, "a number dtype")),
        DType::U8 | DType::Bool => map_each(op, &|x: [u8; N]| f(x.map(i64::from)) as u8, cuda, inputs, out),
        other => Err(Error::dtype(op, other, "an integer dtype or bool")),
    })
}

macro_rules! of_floats {
    ($($(#[$doc:meta])* $name:ident($($x:ident),+) = $f:expr, $text:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// If the dtype is no floating-point one, dtypes or devices differ, or the shapes do not broadcast.
        pub fn $name($($x: &Tensor),+) -> Result<Tensor> {
            floats(stringify!($name), |[$($x),+]| $f, concat!("convert<OUT>(", $text, ")"), [$($x),+])
        }
    )*};
}

of_floats! {
    /// `2^x`.
    exp2(x) = x.exp2(), "exp2(x[0])";
    /// The logarithm to base 2.
    log2(x) = x.log2(), "log2(x[0])";
    /// The logarithm to base 10.
    log10(x) = x.log10(), "log10(x[0])";
    /// The tangent.
    tan(x) = x.tan(), "tan(x[0])";
    /// The angle in [-pi/2, pi/2] whose sine is `x`.
    asin(x) = x.asin(), "asin(x[0])";
    /// The angle in [0, pi] whose cosine is `x`.
    acos(x) = x.acos(), "acos(x[0])";
    /// The angle in [-pi/2, pi/2] whose tangent is `x`.
    atan(x) = x.atan(), "atan(x[0])";
    /// The hyperbolic sine.
    sinh(x) = x.sinh(), "sinh(x[0])";
    /// The hyperbolic cosine.
    cosh(x) = x.cosh(), "cosh(x[0])";
    /// The inverse of the hyperbolic sine.
    asinh(x) = x.asinh(), "asinh(x[0])";
    /// The inverse of the hyperbolic cosine, from 0 up.
    acosh(x) = x.acosh(), "acosh(x[0])";
    /// The inverse of the hyperbolic tangent.
    atanh(x) = x.atanh(), "atanh(x[0])";
    /// `x - tanh(x)`, accurate near zero as far as f64 goes.
    tanhshrink(x) = x - x.tanh(), "x[0] - tanh(x[0])";
    /// The fraction, which has the sign of `x`.
    frac(x) = x - x.trunc(), "x[0] - trunc(x[0])";
    /// The angle of the point `(x, y)`, in [-pi, pi].
    atan2(y, x) = y.atan2(x), "atan2(x[0], x[1])";
    /// `sqrt(a² + b²)`, without overflow on the way.
    hypot(a, b) = a.hypot(b), "hypot(x[0], x[1])";
    /// `ln(e^a + e^b)`, without overflow on the way.
    logaddexp(a, b) = add_logarithms(a, b), "log_add(x[0], x[1])";
    /// `a ln(b)`, 0 where `a` is 0 and `b` is no NaN.
    xlogy(a, b) = if a == 0.0 && !b.is_nan() { 0.0 } else { a * b.ln() },
        "x[0] == 0 && x[1] == x[1] ? 0.0 : x[0] * log(x[1])";
    /// `a / b` without its fraction.
    trunc_divide(a, b) = (a / b).trunc(), "trunc(x[0] / x[1])";
    /// `start + weight (end - start)`, exact at either end.
    lerp(start, end, weight) = interpolated(start, end, weight), "interpolated(x[0], x[1], x[2])";
}

macro_rules! of_numbers {
    ($($(#[$doc:meta])* $name:ident($($x:ident),+)
        float $float:expr, $float_text:literal; integer $integer:expr, $integer_text:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// If the dtype is bool, dtypes or devices differ, or the shapes do not broadcast.
        pub fn $name($($x: &Tensor),+) -> Result<Tensor> {
            let (op, inputs) = (stringify!($name), [$($x),+]);
            match inputs[0].dtype().is_float() {
                true => floats(op, |[$($x),+]| $float, concat!("convert<OUT>(", $float_text, ")"), inputs),
                false => integers(op, |[$($x),+]| $integer, $integer_text, inputs, false),
            }
        }
    )*};
}

of_numbers! {
    /// The largest whole number not above `x`; integers as they are.
    floor(x) float x.floor(), "floor(x[0])"; integer x, "x[0]";
    /// The smallest whole number not below `x`; integers as they are.
    ceil(x) float x.ceil(), "ceil(x[0])"; integer x, "x[0]";
    /// The nearest whole number, the even one of two; integers as they are.
    round(x) float x.round_ties_even(), "rint(x[0])"; integer x, "x[0]";
    /// `x` without its fraction; integers as they are.
    trunc(x) float x.trunc(), "trunc(x[0])"; integer x, "x[0]";
    /// -1, 0 or 1; 0 of a NaN.
    sign(x) float f64::from(i8::from(x > 0.0) - i8::from(x < 0.0)), "(f64)((x[0] > 0) - (x[0] < 0))";
        integer x.signum(), "(x[0] > 0) - (x[0] < 0)";
    /// The remainder of `a / b` with the sign of `a`. Of integers by 0: 0.
    fmod(a, b) float a % b, "fmod(x[0], x[1])";
        integer a.checked_rem(b).unwrap_or(0), "x[1] == 0 || x[1] == -1 ? 0 : x[0] % x[1]";
    /// The remainder of `a / b` with the sign of `b`. Of integers by 0: 0.
    remainder(a, b) float floor_remainder(a, b), "floor_remainder(x[0], x[1])";
        integer integer_remainder(a, b), "floor_remainder(x[0], x[1])";
    /// The largest whole number not above `a / b`. Of integers by 0: 0.
    floor_divide(a, b) float floor_quotient(a, b), "floor_quotient(x[0], x[1])";
        integer integer_quotient(a, b), "floor_quotient(x[0], x[1])";
}

macro_rules! of_bits {
    ($($(#[$doc:meta])* $name:ident $op:tt;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// If the dtype is a floating-point one, dtypes or devices differ, or the shapes do not broadcast.
        pub fn $name(a: &Tensor, b: &Tensor) -> Result<Tensor> {
            integers(stringify!($name), |[a, b]| a $op b, concat!("x[0] ", stringify!($op), " x[1]"), [a, b], true)
        }
    )*};
}

of_bits! {
    /// Bits that are set in both, of integers or bools.
    bitwise_and &;
    /// Bits that are set in either, of integers or bools.
    bitwise_or |;
    /// Bits that are set in one of both, of integers or bools.
    bitwise_xor ^;
}

/// `1 - erf(x)`, accurate where that is small.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn erfc(x: &Tensor) -> Result<Tensor> {
    map("erfc", Erfc, [x])
}

pointwise!(Erfc, |x| x.erfc());

pub(super) fn add_logarithms(a: f64, b: f64) -> f64 {
    let (high, low) = if a > b { (a, b) } else { (b, a) };
    if high == low {
        // Of two infinities the difference would be no number.
        return high + std::f64::consts::LN_2;
    }
    if high.is_infinite() && !low.is_nan() {
        return high;
    }
    high + (low - high).exp().ln_1p()
}

fn interpolated(start: f64, end: f64, weight: f64) -> f64 {
    let way = end - start;
    if weight.abs() < 0.5 { start + weight * way } else { end - way * (1.0 - weight) }
}

fn floor_remainder(a: f64, b: f64) -> f64 {
    let rest = a % b;
    if rest != 0.0 && (b < 0.0) != (rest < 0.0) { rest + b } else { rest }
}

/// By way of the remainder, which is exact, so that the quotient is not rounded up to the next whole number.
fn floor_quotient(a: f64, b: f64) -> f64 {
    if b == 0.0 {
        return a / b;
    }
    let rest = a % b;
    let below = if rest != 0.0 && (b < 0.0) != (rest < 0.0) { 1.0 } else { 0.0 };
    let quotient = (a - rest) / b - below;
    let floor = quotient.floor();
    if quotient - floor > 0.5 { floor + 1.0 } else { floor }
}

fn integer_remainder(a: i64, b: i64) -> i64 {
    let rest = a.checked_rem(b).unwrap_or(0);
    if rest != 0 && (b < 0) != (rest < 0) { rest + b } else { rest }
}

fn integer_quotient(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    let (quotient, rest) = (a.wrapping_div(b), a.wrapping_rem(b));
    if rest != 0 && (b < 0) != (rest < 0) { quotient - 1 } else { quotient }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use super::*;
    use crate::testing::{assert_unary, floats, values};

    #[test]
    fn functions_equal_their_formulas_on_every_shape_and_dtype() {
        assert_unary(asinh, f64::asinh, &floats(-9.0, 9.0));
        assert_unary(round, f64::round_ties_even, &|i| i as f64 * 0.5 - 7.0);
        assert_unary(sign, |x| if x == 0.0 { 0.0 } else { x.signum() }, &floats(-1.0, 1.0));
        assert_unary(erfc, |x| 1.0 - crate::testing::erf(x), &floats(-3.0, 3.0));
    }

    #[test]
    fn quotients_go_down_and_remainders_have_the_sign_that_they_should() {
        let of = |f: fn(&Tensor, &Tensor) -> Result<Tensor>, a: &[f64], b: &[f64]| {
            let tensor = |x: &[f64]| Tensor::from_slice(x, &[x.len()], Device::CPU).unwrap();
            let whole = |x: &[f64]| cast_to_integers(&tensor(x));
            let floats = values(&f(&tensor(a), &tensor(b)).unwrap());
            assert_eq!(floats, values(&f(&whole(a), &whole(b)).unwrap()));
            floats
        };
        let (a, b) = (&[7.0, -7.0, 7.0, -7.0, 6.0, -6.0], &[3.0, 3.0, -3.0, -3.0, 3.0, 3.0]);
        assert_eq!(of(floor_divide, a, b), [2.0, -3.0, -3.0, 2.0, 2.0, -2.0]);
        assert_eq!(of(remainder, a, b), [1.0, 2.0, -2.0, -1.0, 0.0, 0.0]);
        assert_eq!(of(fmod, a, b), [1.0, -1.0, 1.0, -1.0, 0.0, 0.0]);
        // 1 / 0.1 is rounded to 10, but ten times 0.1 is more than 1.
        let one = |x: f64| Tensor::from_slice(&[x], &[1], Device::CPU).unwrap();
        assert_eq!(values(&floor_divide(&one(1.0), &one(0.1)).unwrap()), [9.0]);
        let least = Tensor::from_slice(&[i64::MIN], &[1], Device::CPU).unwrap();
        let minus = Tensor::from_slice(&[-1i64], &[1], Device::CPU).unwrap();
        assert_eq!(floor_divide(&least, &minus).unwrap().to_vec::<i64>().unwrap(), [i64::MIN]);
        assert_eq!(remainder(&least, &minus).unwrap().to_vec::<i64>().unwrap(), [0]);
    }

    fn cast_to_integers(x: &Tensor) -> Tensor {
        crate::ops::cast(x, DType::I64).unwrap()
    }

    #[test]
    fn logarithms_of_sums_stay_finite_and_keep_infinities() {
        let inf = f64::INFINITY;
        assert_eq!(add_logarithms(1000.0, 1000.0), 1000.0 + std::f64::consts::LN_2);
        assert_eq!(add_logarithms(-inf, 3.0), 3.0);
        assert_eq!(add_logarithms(-inf, -inf), -inf);
        assert_eq!(add_logarithms(inf, inf), inf);
        assert_eq!(add_logarithms(inf, -inf), inf);
        assert!(add_logarithms(inf, f64::NAN).is_nan() && add_logarithms(f64::NAN, 0.0).is_nan());
    }
}
