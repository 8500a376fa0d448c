//! [`clamp`]: elements limited to an interval.

use phalanx_tensor::{Element, Error, Result, Scalar, Tensor};

use crate::ops::cast::Number;
use crate::pointwise::cuda::Expression;
use crate::pointwise::{c, in_order, map, map_scalar, pointwise};
use crate::real::for_number;

/// `min(max(x, min), max)`, elementwise; an absent bound does not bind, NaN stays. Floating-point or integer.
///
/// # Errors
/// If the dtype is bool, a bound is NaN, or the dtype is an integer one and a bound is no integer or leaves none of the
/// dtype's numbers.
pub fn clamp(x: &Tensor, min: Option<Scalar>, max: Option<Scalar>) -> Result<Tensor> {
    const OP: &str = "clamp";
    if let Some(bound) = [min, max].into_iter().flatten().find(|bound| bound.to_f64().is_nan()) {
        return Err(Error::invalid(OP, format!("got the bound {bound}, wanted a number or no bound")));
    }
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
    let Some(held) = x.dtype().integers() else { return Err(Error::dtype(OP, x.dtype(), "a number dtype")) };
    let (min, max) = (integer(min, i64::MIN)?, integer(max, i64::MAX)?);
    if min > *held.end() || max < *held.start() {
        let (dtype, low, high) = (x.dtype(), held.start(), held.end());
        let why =
            format!("got the bounds {min} to {max} for a tensor of {dtype}, which holds {low} to {high}");
        return Err(Error::invalid(OP, why));
    }
    in_order(
        OP,
        x.dtype(),
        [x],
        |[x], out| for_number!(OP, x.dtype(), integer T => clamp_integers::<T>(OP, x, min, max, out)),
    )
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

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;

    #[test]
    fn bounds_outside_an_integer_dtype_bind_nothing_or_are_refused() {
        let x = Tensor::from_slice(&[3u8, 200], &[2], Device::CPU).unwrap();
        let run = |min: Option<i64>, max: Option<i64>| clamp(&x, min.map(Scalar::Int), max.map(Scalar::Int));
        assert_eq!(run(Some(-5), Some(300)).unwrap().to_vec::<u8>().unwrap(), [3, 200]);
        for (min, max) in [(Some(300), None), (None, Some(-1)), (Some(300), Some(400))] {
            let error = run(min, max).unwrap_err().to_string();
            assert!(error.starts_with("clamp: got the bounds") && error.contains("0 to 255"), "{error}");
        }
    }

    #[test]
    fn a_bound_that_is_no_number_is_refused() {
        let x = Tensor::from_slice(&[3.0f32], &[1], Device::CPU).unwrap();
        assert!(clamp(&x, Some(Scalar::Float(f64::NAN)), None).is_err());
    }
}
