//! Evenly spaced numbers.

use phalanx_tensor::{DType, Device, Element, Error, Result, Scalar, Tensor};

use crate::dispatch::by_device;
use crate::ops::cast::cast;
use crate::pointwise::cuda::{self, Expression, Numbers};
use crate::pointwise::update;
use crate::simd::{Isa, Kernel, dispatch};

/// `start, start + step, ..` up to but not including `end`, on `device`. Computed in i64 or f64, each element apart,
/// and converted to `dtype`.
///
/// # Errors
/// If `step` is 0 or leads away from `end`, a bound is not finite, an integer dtype cannot hold a number, or there is no
/// memory for so many.
pub fn arange(
    start: impl Into<Scalar>,
    end: impl Into<Scalar>,
    step: impl Into<Scalar>,
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    spaced([start.into(), end.into(), step.into()], dtype, device)
}

fn spaced([start, end, step]: [Scalar; 3], dtype: DType, device: Device) -> Result<Tensor> {
    let count = count(start, end, step).ok_or_else(|| {
        let why = format!("got {start} to {end} by {step}, wanted a finite step that leads to the end");
        Error::invalid("arange", why)
    })?;
    let (start, step) = hold(start, step, count, dtype)?;
    let exact = match (start, step) {
        (Scalar::Int(start), Scalar::Int(step)) => {
            let numbers = [start, step];
            let cuda = Expression::of_integers("wrapping_add(k[0], wrapping_mul(k[1], (i64)i))", &numbers);
            filled(count, device, |i| start.wrapping_add(step.wrapping_mul(i as i64)), &cuda)?
        }
        _ => {
            let (start, step) = (start.to_f64(), step.to_f64());
            let text = "__dadd_rn(k[0], __dmul_rn(k[1], (f64)i))";
            let cuda = Expression { text, value: "f64", numbers: Numbers::Floats(&[start, step]) };
            filled(count, device, |i| start + step * i as f64, &cuda)?
        }
    };
    cast(&exact, dtype)
}

/// How many numbers there are, if the step leads to the end.
fn count(start: Scalar, end: Scalar, step: Scalar) -> Option<usize> {
    if let (Scalar::Int(start), Scalar::Int(end), Scalar::Int(step)) = (start, end, step) {
        let (way, step) = (i128::from(end) - i128::from(start), i128::from(step));
        let steps = way.checked_div(step)? + i128::from(way.checked_rem(step)? != 0);
        return usize::try_from(steps).ok().filter(|_| way.signum() * step.signum() >= 0);
    }
    let count = ((end.to_f64() - start.to_f64()) / step.to_f64()).ceil();
    let fits = step.to_f64() != 0.0 && (0.0..=isize::MAX as f64).contains(&count);
    fits.then_some(count as usize)
}

/// Start and step, if the dtype holds all numbers.
fn hold(start: Scalar, step: Scalar, count: usize, dtype: DType) -> Result<(Scalar, Scalar)> {
    if dtype.integers().is_none() {
        return Ok((start, step));
    }
    let (start, step) = (start.fitting("arange", dtype)?, step.fitting("arange", DType::I64)?);
    let last = i128::from(start.to_i64()) + i128::from(step.to_i64()) * (count.max(1) - 1) as i128;
    let last = i64::try_from(last).map_or(Scalar::Float(last as f64), Scalar::Int);
    last.fitting("arange", dtype)?;
    Ok((start, step))
}

fn filled<T: Element>(
    count: usize,
    device: Device,
    value: impl Fn(usize) -> T + Sync,
    expression: &Expression<'_>,
) -> Result<Tensor> {
    let mut out = Tensor::empty_for("arange", &[count], T::DTYPE, device)?;
    by_device(
        &mut out,
        |out| update("arange", out, |start, to: &mut [T]| dispatch(Filled { start, to, value: &value })),
        |out| {
            let before = out.clone();
            cuda::evaluate("arange", expression, [&before], out)
        },
    )?;
    Ok(out)
}

/// Sets element `i` of a piece that begins at number `start` to `value(start + i)`.
struct Filled<'a, T, F> {
    start: usize,
    to: &'a mut [T],
    value: &'a F,
}

impl<T, F: Fn(usize) -> T> Kernel for Filled<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (i, to) in self.to.iter_mut().enumerate() {
            *to = (self.value)(self.start + i);
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::arange;
    use crate::testing::values;

    #[test]
    fn numbers_that_the_dtype_cannot_hold_are_refused() {
        let run = |start: f64, end: i64, step: f64, dtype| arange(start, end, step, dtype, Device::CPU);
        assert_eq!(values(&run(250.0, 256, 5.0, DType::U8).unwrap()), [250.0, 255.0]);
        for (start, end, step) in [(250.0, 258, 1.0), (-1.0, 3, 1.0), (0.5, 3, 1.0), (0.0, 3, 0.5)] {
            let error = run(start, end, step, DType::U8).unwrap_err().to_string();
            assert!(error.starts_with("arange: got the number"), "{error}");
        }
        let far = 1i64 << 60;
        let near = arange(far, far + 2, 1, DType::I64, Device::CPU).unwrap().to_vec::<i64>().unwrap();
        assert_eq!(near, [far, far + 1], "the count is not rounded");
        assert_eq!(arange(3, 0, -2, DType::I32, Device::CPU).unwrap().to_vec::<i32>().unwrap(), [3, 1]);
        for (start, end, step) in [(0, 3, -1), (3, 0, 1), (0, 3, 0)] {
            assert!(arange(start, end, step, DType::I64, Device::CPU).is_err());
        }
    }

    #[test]
    fn counts_are_whole_and_what_has_no_memory_is_refused() {
        let run = |end: i64, device| arange(0, end, 1, DType::F32, device);
        assert_eq!(values(&run(4, Device::CPU).unwrap()), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(values(&arange(1.0, 0.0, -0.5, DType::F64, Device::CPU).unwrap()), [1.0, 0.5]);
        assert!(run(i64::MAX, Device::CPU).is_err());
        assert!(run(i64::MAX, Device::Meta(0)).is_err());
        assert_eq!(run(1 << 43, Device::Meta(0)).unwrap().shape(), [1 << 43]);
    }
}
