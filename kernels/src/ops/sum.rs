//! Sums over dimensions.

use phalanx_tensor::{Dims, Result, Tensor};

use crate::check;
use crate::real::{Real, for_real};
use crate::simd::Float;
use crate::source::Source;

/// The sum over `dims` (each once, from the front), which stay with size 1 if `keepdim`. Floating-point dtypes,
/// accumulated in f64 at least per block and rounded once.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn sum(x: &Tensor, dims: &[usize], keepdim: bool) -> Result<Tensor> {
    check::float("sum", x)?;
    let kept: Dims = (0..x.rank()).filter(|d| !dims.contains(d)).collect();
    let order: Dims = kept.iter().chain(dims).copied().collect();
    let rows = x.permute(&order)?.contiguous()?;
    let shape: Dims = match keepdim {
        true => x.shape().iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect(),
        false => kept.iter().map(|&d| x.shape()[d]).collect(),
    };
    let mut out = Tensor::empty(&shape, x.dtype(), x.device())?;
    if out.device().is_meta() {
        return Ok(out);
    }
    for_real!("sum", x.dtype(), T => sum_rows::<T>(&rows, &mut out))?;
    Ok(out)
}

fn sum_rows<T: Real>(rows: &Tensor, out: &mut Tensor) -> Result<()> {
    let count = out.numel();
    let width = if count == 0 { 0 } else { rows.numel() / count };
    let source = Source::<T>::open("sum", rows, rows.shape())?;
    let mut target = out.write::<T>("sum")?;
    for (row, to) in target[..count].iter_mut().enumerate() {
        let elements = source.block(row * width, width, &mut []);
        let sum: f64 = elements.iter().map(|x| x.widen().to_f64()).sum();
        *to = T::narrow(T::Wide::from_f64(sum));
    }
    Ok(())
}
