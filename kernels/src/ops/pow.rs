//! Powers of two tensors, or of a tensor and a number, and their gradients.

use phalanx_tensor::{DType, Error, Result, Scalar, Tensor};

use crate::check;
use crate::ops::cast::Number;
use crate::pointwise::cuda::Expression;
use crate::pointwise::{c, in_order, map, map_scalar, pointwise};
use crate::real::for_number;

/// `base^exponent`, broadcast, with IEEE 754's special cases; floating-point or integer, of one dtype.
///
/// # Errors
/// If the shapes do not broadcast, dtypes or devices differ, or the dtype is bool.
pub fn pow(base: &Tensor, exponent: &Tensor) -> Result<Tensor> {
    const OP: &str = "pow";
    if base.dtype().is_float() {
        return map(OP, Power, [base, exponent]);
    }
    check::same(OP, &[base, exponent])?;
    let cuda = &Expression::of_integers("power(x[0], x[1])", &[]);
    integers(OP, |[b, e]| (b, e), cuda, [base, exponent])
}

/// `base^e` in `base`'s dtype.
///
/// # Errors
/// If the dtype is bool, or an integer one and `e` is not an integer from 0 up.
pub fn pow_scalar(base: &Tensor, e: Scalar) -> Result<Tensor> {
    const OP: &str = "pow_scalar";
    if base.dtype().is_float() {
        return float_power(OP, base, e.to_f64());
    }
    if base.dtype() == DType::Bool {
        return Err(Error::dtype(OP, DType::Bool, "a number dtype"));
    }
    let Some(e) = as_integer(e).filter(|&e| e >= 0) else {
        let dtype = base.dtype();
        let why =
            format!("got the exponent {} for a tensor of {dtype}, wanted an integer from 0 up", e.to_f64());
        return Err(Error::invalid(OP, why));
    };
    let numbers = [e];
    let cuda = &Expression::of_integers("power(x[0], k[0])", &numbers);
    integers(OP, |[b]| (b, e), cuda, [base])
}

/// `b^exponent` in `exponent`'s dtype.
///
/// # Errors
/// If the dtype is bool, or an integer one and `b` is no integer.
pub fn rpow_scalar(exponent: &Tensor, b: Scalar) -> Result<Tensor> {
    const OP: &str = "rpow_scalar";
    if exponent.dtype().is_float() {
        return map(OP, PowerOf { b: b.to_f64() }, [exponent]);
    }
    if exponent.dtype() == DType::Bool {
        return Err(Error::dtype(OP, DType::Bool, "a number dtype"));
    }
    let b = b.fitting(OP, exponent.dtype())?.to_i64();
    let numbers = [b];
    let cuda = &Expression::of_integers("power(k[0], x[0])", &numbers);
    integers(OP, |[e]| (b, e), cuda, [exponent])
}

/// The gradient of the base: `dy e base^(e - 1)`, 0 where the exponent is 0.
///
/// # Errors
/// If the shapes do not broadcast, or dtypes or devices differ.
pub fn pow_backward_base(base: &Tensor, exponent: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("pow_backward", BaseGradient, [base, exponent, dy])
}

/// The gradient of the exponent: `dy y ln(base)` for `y = base^exponent`, 0 where the base is 0 and the exponent
/// is not below.
///
/// # Errors
/// If the shapes do not broadcast, or dtypes or devices differ.
pub fn pow_backward_exponent(base: &Tensor, exponent: &Tensor, dy: &Tensor) -> Result<Tensor> {
    map("pow_backward", ExponentGradient, [base, exponent, dy])
}

/// The gradient of `x` in `x^e`: `dy e x^(e - 1)`, 0 for `e = 0`.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn pow_scalar_backward(x: &Tensor, dy: &Tensor, e: f64) -> Result<Tensor> {
    const OP: &str = "pow_backward";
    match e {
        0.0 => map(OP, Nothing, [x, dy]),
        1.0 => map(OP, Gradient1, [x, dy]),
        2.0 => map(OP, Gradient2, [x, dy]),
        3.0 => map(OP, Gradient3, [x, dy]),
        0.5 => map(OP, RootGradient, [x, dy]),
        -1.0 => map(OP, InverseGradient, [x, dy]),
        e => map(OP, GradientTo { e }, [x, dy]),
    }
}

/// The gradient of the exponent in `y = b^exponent`: `dy y ln b`, 0 for `b = 0` where `y` is no infinity.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn rpow_scalar_backward(y: &Tensor, dy: &Tensor, b: f64) -> Result<Tensor> {
    map("pow_backward", GradientOf { ln: b.ln() }, [y, dy])
}

/// The common exponents by products and roots, which are faster and rounded less.
fn float_power(op: &'static str, x: &Tensor, e: f64) -> Result<Tensor> {
    match e {
        0.0 => map(op, One, [x]),
        1.0 => map(op, Itself, [x]),
        2.0 => map(op, Square, [x]),
        3.0 => map(op, Cube, [x]),
        0.5 => map(op, Root, [x]),
        -0.5 => map(op, InverseRoot, [x]),
        -1.0 => map(op, Inverse, [x]),
        -2.0 => map(op, InverseSquare, [x]),
        e => map(op, PowerTo { e }, [x]),
    }
}

fn as_integer(x: Scalar) -> Option<i64> {
    match x {
        Scalar::Int(x) => Some(x),
        Scalar::Float(_) => Some(x.fitting("pow", DType::I64).ok()?.to_i64()),
    }
}

/// Powers of the pairs that `pair` makes of the elements.
fn integers<const N: usize>(
    op: &'static str,
    pair: impl Fn([i64; N]) -> (i64, i64) + Sync,
    cuda: &Expression<'_>,
    inputs: [&Tensor; N],
) -> Result<Tensor> {
    let power = |x: [i64; N]| integer_power(pair(x));
    in_order(op, inputs[0].dtype(), inputs, |inputs, out| {
        for_number!(op, out.dtype(), integer T => {
            map_scalar(op, |x: [T; N]| T::from_i64(power(x.map(T::to_i64))), cuda, inputs, out)
        })
    })
}

/// By repeated squaring, wrapping; a negative exponent gives the truncated inverse (0 for 0).
fn integer_power((mut base, exponent): (i64, i64)) -> i64 {
    let mut left = match exponent {
        0.. => exponent as u64,
        _ if base == 1 || base == -1 => exponent.unsigned_abs(),
        _ => return 0,
    };
    let mut power = 1i64;
    while left > 0 {
        if left & 1 == 1 {
            power = power.wrapping_mul(base);
        }
        base = base.wrapping_mul(base);
        left >>= 1;
    }
    power
}

pointwise!(Power, |x, e| x.pow(e));
pointwise!(PowerTo { e }, |x| x.pow(c(e)));
pointwise!(PowerOf { b }, |e| c::<V>(b).pow(e));
pointwise!(One, |_x| c::<V>(1.0));
pointwise!(Itself, |x| x);
pointwise!(Square, |x| x * x);
pointwise!(Cube, |x| x * x * x);
pointwise!(Root, |x| x.sqrt());
pointwise!(InverseRoot, |x| c::<V>(1.0) / x.sqrt());
pointwise!(Inverse, |x| c::<V>(1.0) / x);
pointwise!(InverseSquare, |x| c::<V>(1.0) / (x * x));
pointwise!(Nothing, |_x, dy| V::select(dy.eq(dy), V::zero(), V::zero()));
pointwise!(Gradient1, |_x, dy| dy);
pointwise!(Gradient2, |x, dy| dy * (x + x));
pointwise!(Gradient3, |x, dy| dy * c(3.0) * (x * x));
// `-0 + 0` is 0: the gradient there is infinite with the sign of `dy`, as the power's is.
pointwise!(RootGradient, |x, dy| dy * c(0.5) / (x + V::zero()).sqrt());
pointwise!(InverseGradient, |x, dy| -dy / (x * x));
pointwise!(GradientTo { e }, |x, dy| dy * c(e) * x.pow(c(e - 1.0)));
pointwise!(GradientOf { ln }, |y, dy| dy * V::select(y.eq(V::zero()), V::zero(), y * c(ln)));
pointwise!(BaseGradient, |x, e, dy| V::select(e.eq(V::zero()), V::zero(), dy * e * x.pow(e - c(1.0))));
pointwise!(ExponentGradient, |x, e, dy| {
    let flat = x.eq(V::zero()) & e.ge(V::zero());
    V::select(flat, V::zero(), dy * x.pow(e) * x.ln())
});

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;
    use crate::testing::{assert_unary, floats};

    #[test]
    fn every_exponent_equals_the_formula() {
        for e in [0.0, 1.0, 2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 1.7, 5.0] {
            for x in crate::testing::tensors(&floats(0.1, 3.0)) {
                let y = crate::testing::values(&pow_scalar(&x, Scalar::Float(e)).unwrap());
                for (y, x) in y.into_iter().zip(crate::testing::values(&x)) {
                    crate::testing::assert_close(y, x.powf(e), crate::testing::tolerance(DType::BF16));
                }
            }
        }
        assert_unary(|e| rpow_scalar(e, Scalar::Int(2)), f64::exp2, &floats(-5.0, 5.0));
    }

    #[test]
    fn gradients_of_common_exponents_are_those_of_any() {
        for e in [0.5, -1.0, 2.0, 3.0] {
            for x in crate::testing::tensors(&floats(0.1, 3.0)) {
                let got = crate::testing::values(&pow_scalar_backward(&x, &x, e).unwrap());
                let wanted = crate::testing::values(&map("pow", GradientTo { e }, [&x, &x]).unwrap());
                let tolerance = crate::testing::tolerance(x.dtype());
                for (got, wanted) in got.into_iter().zip(wanted) {
                    crate::testing::assert_close(got, wanted, 4.0 * tolerance);
                }
            }
        }
    }

    #[test]
    fn gradients_of_common_exponents_at_zeros_are_those_of_any() {
        let x = Tensor::from_slice(&[0.0_f32, -0.0, f32::INFINITY], &[3], Device::CPU).unwrap();
        let dy = Tensor::from_slice(&[1.0_f32, 2.0, -3.0], &[3], Device::CPU).unwrap();
        for e in [0.5, -1.0] {
            let wanted = crate::testing::values(&map("pow", GradientTo { e }, [&x, &dy]).unwrap());
            assert_eq!(crate::testing::values(&pow_scalar_backward(&x, &dy, e).unwrap()), wanted, "{e}");
        }
    }

    #[test]
    fn integers_wrap_and_truncate() {
        let base = Tensor::from_slice(&[2i64, -1, 3, 0, 7], &[5], Device::CPU).unwrap();
        let exponent = Tensor::from_slice(&[62i64, -3, -1, 0, 2], &[5], Device::CPU).unwrap();
        let power = pow(&base, &exponent).unwrap().to_vec::<i64>().unwrap();
        assert_eq!(power, [1 << 62, -1, 0, 1, 49]);
        assert!(pow_scalar(&base, Scalar::Int(-1)).is_err());
    }
}
