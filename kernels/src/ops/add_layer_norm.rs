//! A sum and its layer normalisation in one pass: [`add`](super::add()) followed by [`layer_norm`](super::layer_norm()).

use phalanx_tensor::{Result, Tensor};

use super::layer_norm::{backward, forward};

/// `sum = x + residual`, of one shape, and [`layer_norm`](super::layer_norm()) of it, to the bit what the two give one after
/// the other: the sum (rounded before it is normalised), the normalised rows, and what the backward pass needs of each row.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn add_layer_norm(
    x: &Tensor,
    residual: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<[Tensor; 3]> {
    let mut sum = x.empty_like_for("add_layer_norm")?;
    let added = Some((residual, &mut sum));
    let (y, stats) = forward::<true>("add_layer_norm", x, added, normalized_shape, [weight, bias], eps)?;
    Ok([sum, y, stats])
}

/// The gradients of [`add_layer_norm`] with respect to each of the summands (one and the same), `weight` and `bias`: those
/// that `needs` names. `dy` is the normalised rows' gradient, `dsum` the sum's, which is added before the result is rounded.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn add_layer_norm_backward(
    sum: &Tensor,
    stats: &Tensor,
    normalized_shape: &[usize],
    weight: Option<&Tensor>,
    [dy, dsum]: [&Tensor; 2],
    needs: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let op = "add_layer_norm_backward";
    backward::<true>(op, [sum, dy], Some(dsum), stats, normalized_shape, weight, needs)
}
