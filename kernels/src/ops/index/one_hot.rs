//! Indices as unit vectors.

use phalanx_tensor::{DType, Dims, Result, Tensor};

use super::{check_range, indices};

/// `[index's shape, classes]` of i64: 1 where the last dimension's place is the index, else 0.
///
/// # Errors
/// If the indices are not i64 or i32, or one is out of range.
pub fn one_hot(index: &Tensor, classes: usize) -> Result<Tensor> {
    const OP: &str = "one_hot";
    let shape: Dims = index.shape().iter().chain([&classes]).copied().collect();
    let index = indices(OP, index, index)?;
    let mut out = Tensor::zeros(&shape, DType::I64, index.device())?;
    if out.device().is_meta() {
        return Ok(out);
    }
    let read = index.read::<i64>(OP)?;
    let at = &read[index.offset()..][..index.numel()];
    check_range(OP, at, classes)?;
    let mut target = out.write::<i64>(OP)?;
    at.iter().enumerate().for_each(|(row, &at)| target[row * classes + at as usize] = 1);
    drop(target);
    Ok(out)
}
