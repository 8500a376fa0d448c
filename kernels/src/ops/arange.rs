//! Evenly spaced numbers.

use phalanx_tensor::{DType, Device, Error, Result, Scalar, Tensor};

use crate::ops::cast::cast;

/// `start, start + step, ..` up to but not including `end`, on `device`. Computed in i64 or f64, each element apart,
/// and converted to `dtype`.
///
/// # Errors
/// If `step` is 0 or leads away from `end`, or a bound is not finite.
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
            let values: Vec<i64> =
                (0..count).map(|i| start.wrapping_add(step.wrapping_mul(i as i64))).collect();
            Tensor::from_slice(&values, &[count], device)?
        }
        _ => {
            let values: Vec<f64> = (0..count).map(|i| start.to_f64() + step.to_f64() * i as f64).collect();
            Tensor::from_slice(&values, &[count], device)?
        }
    };
    cast(&exact, dtype)
}
