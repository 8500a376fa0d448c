//! [`next_token_targets`]: labels as what each position predicts.

use phalanx_tensor::{DType, Tensor};

use crate::{Error, Result};

/// Labels `[B, T]` moved so that position t predicts label t + 1; the last position's target is -100. Also the number of
/// targets that count.
///
/// # Errors
/// If the labels are not a matrix of i64 with elements.
pub fn next_token_targets(labels: &Tensor) -> Result<(Tensor, usize)> {
    let (&[_, length], DType::I64) = (labels.shape(), labels.dtype()) else {
        let got = format!("got {:?} {}, wanted [B, T] i64", labels.shape(), labels.dtype());
        return Err(Error::invalid("labels", got));
    };
    let all = labels.to_vec::<i64>()?;
    let rows = all.chunks(length.max(1));
    let moved: Vec<i64> = rows.flat_map(|row| row[1..].iter().copied().chain([-100])).collect();
    let counted = moved.iter().filter(|&&target| target != -100).count();
    Ok((Tensor::from_vec(moved, labels.shape(), labels.device())?, counted))
}
