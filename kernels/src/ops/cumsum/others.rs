//! Running products, extrema and logarithms of sums: [`super::cumsum`] with another way to put two numbers together.

use phalanx_tensor::{DType, Dim, Error, Result, Tensor};

use super::{Merge, Scan};
use crate::ops::cast::Number;
use crate::ops::functions::add_logarithms;
use crate::real::for_element;

/// `y[i] = x[0] x[1] .. x[i]` along `dim`. Floats are multiplied in f64, each result rounded once; integers and bools in
/// i64, wrapping.
///
/// # Errors
/// If there is no such dimension.
pub fn cumprod(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    let merge = Merge { text: "a * b", first: "1" };
    let dim = dim.resolve(x.rank().max(1), "cumprod")?;
    running("cumprod", x, dim, merge, (|a, b| a * b, 1.0), (i64::wrapping_mul, 1))
}

/// The largest of `x[0]` .. `x[i]` along `dim`, or NaN from the first on; integers and bools as i64.
///
/// # Errors
/// If there is no such dimension.
pub fn cummax(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    let merge = Merge { text: "(a > b || a != a ? a : b)", first: "least<Value>()" };
    let larger = |a: f64, b: f64| if a > b || a.is_nan() { a } else { b };
    let dim = dim.resolve(x.rank().max(1), "cummax")?;
    running("cummax", x, dim, merge, (larger, f64::NEG_INFINITY), (i64::max, i64::MIN))
}

/// The smallest of `x[0]` .. `x[i]` along `dim`, or NaN from the first on; integers and bools as i64.
///
/// # Errors
/// If there is no such dimension.
pub fn cummin(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    let merge = Merge { text: "(a < b || a != a ? a : b)", first: "most<Value>()" };
    let smaller = |a: f64, b: f64| if a < b || a.is_nan() { a } else { b };
    let dim = dim.resolve(x.rank().max(1), "cummin")?;
    running("cummin", x, dim, merge, (smaller, f64::INFINITY), (i64::min, i64::MAX))
}

/// `y[i] = ln(e^x[0] + .. + e^x[i])` along `dim`, without overflow on the way.
///
/// # Errors
/// If the dtype is no floating-point one, or there is no such dimension.
pub fn logcumsumexp(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    if !x.dtype().is_float() {
        return Err(Error::dtype("logcumsumexp", x.dtype(), "a floating-point dtype"));
    }
    let merge = Merge { text: "log_add(a, b)", first: "least<Value>()" };
    let dim = dim.resolve(x.rank().max(1), "logcumsumexp")?;
    running("logcumsumexp", x, dim, merge, (add_logarithms, f64::NEG_INFINITY), (i64::wrapping_add, 0))
}

/// How numbers are put together on a CPU, and what leaves the others as they are.
type With<T> = (fn(T, T) -> T, T);

fn running(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    merge: Merge,
    (float, nothing): With<f64>,
    (integer, none): With<i64>,
) -> Result<Tensor> {
    super::scanned(op, x, dim, false, merge, |scan: &Scan, x, out| {
        for_element!(x.dtype(), T => match out.dtype() {
            DType::I64 => scan.run::<T, i64, i64>(x, out, none, |sum, x| integer(sum, x.to_i64()), |sum| sum),
            _ => scan.run::<T, T, f64>(x, out, nothing, |sum, x| float(sum, x.to_f64()), <T as Number>::from_f64),
        })
    })
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use super::*;
    use crate::testing::{assert_along, floats, values};

    #[test]
    fn running_values_equal_the_formulas_on_every_shape_and_dtype() {
        fn each(x: &[f64], first: f64, f: fn(f64, f64) -> f64) -> Vec<f64> {
            let next = |y: &mut f64, x: &f64| {
                *y = f(*y, *x);
                Some(*y)
            };
            x.iter().scan(first, next).collect()
        }
        assert_along(cumprod, &floats(-1.2, 1.2), |x| each(x, 1.0, |y, x| y * x));
        assert_along(cummax, &floats(-3.0, 3.0), |x| each(x, f64::NEG_INFINITY, f64::max));
        assert_along(cummin, &floats(-3.0, 3.0), |x| each(x, f64::INFINITY, f64::min));
        assert_along(logcumsumexp, &floats(-3.0, 3.0), |x| {
            each(x, f64::NEG_INFINITY, |y, x| (y.exp() + x.exp()).ln())
        });
    }

    #[test]
    fn nan_stays_and_integers_are_exact() {
        let x = Tensor::from_slice(&[1.0, f64::NAN, 3.0], &[3], Device::CPU).unwrap();
        let y = values(&cummax(&x, 0).unwrap());
        assert!(y[0] == 1.0 && y[1].is_nan() && y[2].is_nan());
        let big = Tensor::from_slice(&[i64::MAX, i64::MAX - 1, 3], &[3], Device::CPU).unwrap();
        assert_eq!(cummin(&big, 0).unwrap().to_vec::<i64>().unwrap(), [i64::MAX, i64::MAX - 1, 3]);
        assert_eq!(cumprod(&big, 0).unwrap().to_vec::<i64>().unwrap()[0], i64::MAX);
        assert!(logcumsumexp(&big, 0).is_err());
    }
}
