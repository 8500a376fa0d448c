//! Constants.

use phalanx_tensor::{DType, Device, Element, Result, Scalar, Tensor, bf16, f16};

use crate::ops::cast::to_odd;
use crate::pointwise::cuda::{self, Expression};

/// A tensor of `shape` with `value` everywhere.
///
/// # Errors
/// If it cannot be allocated.
pub fn full(shape: &[usize], value: impl Into<Scalar>, dtype: DType, device: Device) -> Result<Tensor> {
    let mut out = Tensor::empty(shape, dtype, device)?;
    fill_(&mut out, value)?;
    Ok(out)
}

/// Sets every element, in place, whatever the strides.
///
/// # Errors
/// If the device refuses.
pub fn fill_(out: &mut Tensor, value: impl Into<Scalar>) -> Result<()> {
    if out.device().is_meta() {
        out.bump_version();
        return Ok(());
    }
    let (value, x) = (value.into(), Scalar::to_f64);
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
    if out.device().is_cuda() {
        let bits = [cuda::bits(value)];
        let constant = Expression::of_bits("k[0]", T::DTYPE, &bits);
        let before = out.clone();
        return cuda::evaluate("fill", &constant, [&before], out);
    }
    let layout = out.layout().clone();
    let mut target = out.write::<T>("fill")?;
    crate::strided::for_each_run_mut(&mut target, &layout, |run| run.set(value));
    Ok(())
}
