//! Elements kept between bounds.

use phalanx_tensor::{DType, Element, Error, Result, Scalar, Tensor};

use crate::ops::cast::Number;
use crate::pointwise::cuda::Expression;
use crate::pointwise::{c, map, map_scalar, pointwise};

/// `min(max(x, min), max)`, elementwise; an absent bound does not bind, NaN stays. Floating-point or integer.
///
/// # Errors
/// If the dtype is bool, or an integer one and a bound is no integer.
pub fn clamp(x: &Tensor, min: Option<Scalar>, max: Option<Scalar>) -> Result<Tensor> {
    const OP: &str = "clamp";
    if x.dtype().is_float() {
        let (min, max) = bounds(min, max);
        return map(OP, Clamp { min, max }, [x]);
    }
    let integer = |bound: Option<Scalar>, otherwise: i64| match bound {
        None => Ok(otherwise),
        Some(Scalar::Int(bound)) => Ok(bound),
        Some(Scalar::Float(bound)) => {
            let why = format!("got the bound {bound} for a tensor of {}, wanted an integer", x.dtype());
            Err(Error::invalid(OP, why))
        }
    };
    let (min, max) = (integer(min, i64::MIN)?, integer(max, i64::MAX)?);
    let mut out = x.empty_like()?;
    match x.dtype() {
        DType::I64 => clamp_integers::<i64>(OP, x, min, max, &mut out),
        DType::I32 => clamp_integers::<i32>(OP, x, min, max, &mut out),
        DType::U8 => clamp_integers::<u8>(OP, x, min, max, &mut out),
        other => Err(Error::dtype(OP, other, "a number dtype")),
    }?;
    Ok(out)
}

/// `dy` where `x` lies between the bounds and on neither, else 0.
///
/// # Errors
/// If shapes, dtypes or devices differ.
pub fn clamp_backward(x: &Tensor, dy: &Tensor, min: Option<Scalar>, max: Option<Scalar>) -> Result<Tensor> {
    let (min, max) = bounds(min, max);
    // Infinity as a bound that is absent would bind at infinity; NaN compares false.
    let (below, above) = (min, max);
    map("clamp_backward", Gradient { below, above }, [x, dy])
}

fn bounds(min: Option<Scalar>, max: Option<Scalar>) -> (f64, f64) {
    (min.map_or(f64::NAN, Scalar::to_f64), max.map_or(f64::NAN, Scalar::to_f64))
}

fn clamp_integers<T: Number + Element>(
    op: &'static str,
    x: &Tensor,
    min: i64,
    max: i64,
    out: &mut Tensor,
) -> Result<()> {
    let numbers = [min, max];
    let cuda = Expression::of_integers(
        "x[0] < k[0] ? k[0] < k[1] ? k[0] : k[1] : x[0] > k[1] ? k[1] : x[0]",
        &numbers,
    );
    map_scalar(op, |[x]: [T; 1]| T::from_i64(x.to_i64().max(min).min(max)), &cuda, [x], out)
}

// An absent bound is NaN, with which every comparison is false.
pointwise!(Clamp { min, max }, |x| {
    let raised = V::select(x.lt(c(min)), c(min), x);
    V::select(raised.gt(c(max)), c(max), raised)
});
pointwise!(Gradient { below, above }, |x, dy| V::select(x.le(c(below)) | x.ge(c(above)), V::zero(), dy));
