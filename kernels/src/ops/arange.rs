//! Evenly spaced numbers.

use phalanx_tensor::{DType, Device, Element, Error, Result, Scalar, Tensor};

use crate::ops::cast::cast;
use crate::pointwise::cuda::{self, Expression, Numbers};

/// `start, start + step, ..` up to but not including `end`, on `device`. Computed in i64 or f64, each element apart,
/// and converted to `dtype`.
///
/// # Errors
/// If `step` is 0 or leads away from `end`, a bound is not finite, or there is no memory for so many.
pub fn arange(
    start: impl Into<Scalar>,
    end: impl Into<Scalar>,
    step: impl Into<Scalar>,
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    let (start, end, step) = (start.into(), end.into(), step.into());
    let count = ((end.to_f64() - start.to_f64()) / step.to_f64()).ceil();
    if step.to_f64() == 0.0 || !(0.0..=isize::MAX as f64).contains(&count) {
        let why = format!("got {start:?} to {end:?} by {step:?}, wanted a finite step that leads to the end");
        return Err(Error::invalid("arange", why));
    }
    let count = count as usize;
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

fn filled<T: Element>(
    count: usize,
    device: Device,
    value: impl Fn(usize) -> T,
    expression: &Expression<'_>,
) -> Result<Tensor> {
    let mut out = Tensor::empty(&[count], T::DTYPE, device)?;
    if device.is_cuda() {
        let before = out.clone();
        cuda::evaluate("arange", expression, [&before], &mut out)?;
    } else if !device.is_meta() {
        let mut target = out.write::<T>("arange")?;
        target[..count].iter_mut().enumerate().for_each(|(i, to)| *to = value(i));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::arange;
    use crate::testing::values;

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
