//! Constants.

use phalanx_tensor::{DType, Device, Element, Result, Scalar, Tensor, bf16, f16};

use crate::dispatch::by_device;
use crate::moves;
use crate::ops::cast::to_odd;
use crate::pointwise::cuda::{self, Expression};
use crate::pointwise::{refuse_overlap, update};

/// A tensor of `shape` with `value` everywhere.
///
/// # Errors
/// If it cannot be allocated, or an integer dtype cannot hold the value.
pub fn full(shape: &[usize], value: impl Into<Scalar>, dtype: DType, device: Device) -> Result<Tensor> {
    full_for("full", shape, value.into(), dtype, device)
}

/// [`full`] for an operation, which errors name.
pub(crate) fn full_for(
    op: &'static str,
    shape: &[usize],
    value: Scalar,
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    let value = value.fitting(op, dtype)?;
    let mut out = Tensor::empty_for(op, shape, dtype, device)?;
    fill_(&mut out, value)?;
    Ok(out)
}

/// Sets every element, in place: `out` may be any view that does not overlap itself.
///
/// # Errors
/// If the destination overlaps itself, or an integer dtype cannot hold the value.
pub fn fill_(out: &mut Tensor, value: impl Into<Scalar>) -> Result<()> {
    fill_all(out, value.into())
}

fn fill_all(out: &mut Tensor, value: Scalar) -> Result<()> {
    let value = value.fitting("fill", out.dtype())?;
    refuse_overlap("fill", out)?;
    let x = Scalar::to_f64;
    match out.dtype() {
        DType::F64 => fill(out, x(value)),
        DType::F32 => fill(out, x(value) as f32),
        DType::BF16 => fill(out, bf16::from_f32(to_odd(x(value)))),
        DType::F16 => fill(out, f16::from_f32(to_odd(x(value)))),
        DType::I64 => fill(out, value.to_i64()),
        DType::I32 => fill(out, value.to_i64() as i32),
        DType::U8 => fill(out, value.to_i64() as u8),
        DType::Bool => fill(out, u8::from(x(value) != 0.0)),
    }
}

fn fill<T: Element>(out: &mut Tensor, value: T) -> Result<()> {
    by_device(
        out,
        |out| fill_on_cpu(out, value),
        |out| {
            let bits = [cuda::bits(value)];
            let constant = Expression::of_bits("k[0]", T::DTYPE, &bits);
            let before = out.clone();
            cuda::evaluate("fill", &constant, [&before], out)
        },
    )
}

fn fill_on_cpu<T: Element>(out: &mut Tensor, value: T) -> Result<()> {
    if out.is_contiguous() {
        return update("fill", out, |_, to| moves::fill(to, value));
    }
    let layout = out.layout().clone();
    let mut target = out.write::<T>("fill")?;
    crate::strided::for_each_run_mut(&mut target, &layout, |run| run.set(value));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_the_dtype_cannot_hold_is_refused_and_not_wrapped() {
        let refused = |value: Scalar, dtype| {
            let error = full(&[2], value, dtype, Device::CPU).unwrap_err().to_string();
            assert!(error.starts_with("full: got the number") && error.contains(dtype.name()), "{error}");
            let mut held = Tensor::zeros(&[2], dtype, Device::CPU).unwrap();
            assert!(fill_(&mut held, value).is_err());
            let mut meta = Tensor::zeros(&[2], dtype, Device::Meta(0)).unwrap();
            assert!(fill_(&mut meta, value).is_err());
        };
        refused(Scalar::Int(300), DType::U8);
        refused(Scalar::Int(-1), DType::U8);
        refused(Scalar::Int(1 << 40), DType::I32);
        for value in [1.5, f64::NAN, f64::INFINITY, 1e30] {
            refused(Scalar::Float(value), DType::I64);
        }
        assert_eq!(full(&[], 255, DType::U8, Device::CPU).unwrap().item::<u8>().unwrap(), 255);
        assert_eq!(full(&[], -2.0, DType::I32, Device::CPU).unwrap().item::<i32>().unwrap(), -2);
        assert!(full(&[], f64::NAN, DType::Bool, Device::CPU).unwrap().item::<bool>().unwrap());
    }

    #[test]
    fn a_destination_that_overlaps_itself_is_refused() {
        let zero = Tensor::zeros(&[1], DType::F32, Device::CPU).unwrap();
        let error = fill_(&mut zero.broadcast_to(&[3]).unwrap(), 1).unwrap_err().to_string();
        assert!(error.starts_with("fill: the destination overlaps itself"), "{error}");
    }
}
