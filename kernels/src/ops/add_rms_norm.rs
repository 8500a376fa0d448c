//! A sum and its root-mean-square normalisation in one pass: [`add_layer_norm`](super::add_layer_norm()) without the mean.

use phalanx_tensor::{Result, Tensor};

use super::layer_norm::{backward, forward};

/// `sum = x + residual`, of one shape, and [`rms_norm`](super::rms_norm()) of it, to the bit what the two give one after the
/// other: the sum (rounded before it is normalised), the normalised rows, and what the backward pass needs of each row.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn add_rms_norm(
    x: &Tensor,
    residual: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    eps: f64,
) -> Result<[Tensor; 3]> {
    let mut sum = x.empty_like_for("add_rms_norm")?;
    let added = Some((residual, &mut sum));
    let (y, stats) = forward::<false>("add_rms_norm", x, added, normalized_shape, [weight, None], eps)?;
    Ok([sum, y, stats])
}

/// The gradients of [`add_rms_norm`] with respect to each of the summands (one and the same) and `weight`: those that
/// `needs` names. `dy` is the normalised rows' gradient, `dsum` the sum's, which is added before the result is rounded.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn add_rms_norm_backward(
    sum: &Tensor,
    stats: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    [dy, dsum]: [&Tensor; 2],
    [dx, dw]: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    let (op, needs) = ("add_rms_norm_backward", [dx, dw, false]);
    let [dx, dw, _] = backward::<false>(op, [sum, dy], Some(dsum), stats, normalized_shape, weight, needs)?;
    Ok([dx, dw])
}
