//! The gradients' norm when some parameters are cut over ranks and others are whole on each.

use phalanx_nn::{Parameter, Square, grad_squares, norm_of};
use phalanx_tensor::{Device, Tensor};

use crate::Result;
use crate::comm::Comm;

/// The Euclidean norm of all gradients of a model whose layers are cut over these ranks, the same bits on all of them:
/// parts of a parameter count from every rank, whole ones once. On a `meta` device it is 0.
///
/// # Errors
/// If a gradient cannot be read, or as [`crate::comm::Pending::wait`].
pub fn grad_norm(parameters: &[Parameter], comm: &Comm) -> Result<f64> {
    Ok(norm_of(sum_squares(grad_squares(parameters)?, comm)?))
}

/// Every parameter's sum of squares over all ranks, of those of this rank's parts: what ranks hold whole stays as it is,
/// of the rest the ranks' are added, in their order. All ranks call it with parameters of the same names.
///
/// # Errors
/// As [`crate::comm::Pending::wait`].
pub fn sum_squares(mut squares: Vec<Square>, comm: &Comm) -> Result<Vec<Square>> {
    if comm.size() == 1 || !comm.has_peers() {
        return Ok(squares);
    }
    squares.sort_by(|a, b| a.name.cmp(&b.name));
    let own: Vec<f64> = squares.iter().map(|square| square.sum).collect();
    let count = own.len();
    let own = Tensor::from_slice(&own, &[count], Device::CPU)?;
    let mut all = Tensor::zeros(&[count * comm.size()], own.dtype(), Device::CPU)?;
    comm.all_gather(&mut all, &own)?;
    let all = all.to_vec::<f64>()?;
    for (i, square) in squares.iter_mut().enumerate().filter(|(_, square)| !square.whole) {
        square.sum = (0..comm.size()).map(|rank| all[rank * count + i]).sum();
    }
    Ok(squares)
}
