//! The gradients' norm when some parameters are cut over ranks and others are whole on each.

use phalanx_nn::{Parameter, Squares, grad_squares, norm_of};

use crate::Result;
use crate::comm::Comm;
use crate::sums::gather_sums;

/// The Euclidean norm of all gradients of a model whose layers are cut over these ranks, the same bits on all of them:
/// parts of a parameter count from every rank, whole ones once. On a `meta` device it is 0.
///
/// # Errors
/// If a gradient cannot be read, or as [`crate::comm::Pending::wait`].
pub fn grad_norm(parameters: &[Parameter], comm: &Comm) -> Result<f64> {
    Ok(norm_of(&sum_squares(grad_squares(parameters)?, comm)?)?)
}

/// Every parameter's sum of squares over all ranks, of those of this rank's parts: what ranks hold whole stays as it is,
/// of the rest the ranks' are added, in their order. All ranks call it with parameters of the same names. Nothing waits for a
/// GPU.
///
/// # Errors
/// As [`crate::comm::Pending::wait`].
pub fn sum_squares(squares: Squares, comm: &Comm) -> Result<Squares> {
    let Squares { mut of, sums } = squares;
    let parts: Vec<bool> = of.iter().map(|square| !square.whole).collect();
    of.iter_mut().for_each(|square| square.whole = true);
    if comm.size() == 1 || !comm.has_peers() {
        return Ok(Squares { of, sums });
    }
    let count = of.len();
    let pairs = parts.into_iter().enumerate().flat_map(|(i, part)| {
        let ranks = if part { 0..comm.size() } else { comm.rank()..comm.rank() + 1 };
        ranks.map(move |rank| (i, rank * count + i))
    });
    let sums = gather_sums(comm, &sums, &vec![count; comm.size()], count, pairs)?;
    Ok(Squares { of, sums })
}
