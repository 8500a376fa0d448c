//! Root-mean-square normalisation: [`layer_norm`](super::layer_norm()) without the mean.

use phalanx_tensor::{Result, Tensor};

use super::layer_norm::{backward, forward};

/// `y = x / sqrt(mean(x²) + eps) * weight` over the last dimensions of `x`, which must be `normalized_shape`. Also
/// gives each row's inverse root, which the backward pass needs.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn rms_norm(
    x: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    forward::<false>("rms_norm", x, None, normalized_shape, [weight, None], eps)
}

/// The gradients of [`rms_norm`] with respect to `x` and `weight`: those that `needs` names.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn rms_norm_backward(
    x: &Tensor,
    stats: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    dy: &Tensor,
    [dx, dw]: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    let op = "rms_norm_backward";
    let [dx, dw, _] = backward::<false>(op, [x, dy], None, stats, normalized_shape, weight, [dx, dw, false])?;
    Ok([dx, dw])
}
