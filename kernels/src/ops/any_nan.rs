//! The search for NaN.

use phalanx_tensor::{Result, Tensor};

use crate::real::{Real, for_real};
use crate::source::{BLOCK, Source};

/// Whether an element is NaN.
///
/// # Errors
/// If the dtype is no floating-point one, or the device has no elements.
pub fn any_nan(x: &Tensor) -> Result<bool> {
    for_real!("any_nan", x.dtype(), T => search::<T>(x))
}

fn search<T: Real>(x: &Tensor) -> Result<bool> {
    let source = Source::<T>::open("any_nan", x, x.shape())?;
    let mut scratch = [T::zeroed(); BLOCK];
    let is_nan = |x: &T| x.partial_cmp(x).is_none();
    let starts = (0..x.numel()).step_by(BLOCK);
    Ok(starts
        .into_iter()
        .any(|start| source.block(start, BLOCK.min(x.numel() - start), &mut scratch).iter().any(is_nan)))
}
