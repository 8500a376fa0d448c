//! [`gather_sums`]: few numbers of all ranks, added as the caller says.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Tensor};

use crate::Result;
use crate::comm::{Call, Comm};

/// Gathers what every rank has, `own` here (f64 `[counts[rank]]`), one rank after another. Returns `count` sums, f64
/// `[count]`, on the device of `own`: they are 0 at first, then for each pair `(to, from)` in order, the gathered number
/// `from` is added to the sum `to`; where `to` is `count` or more, it is added to the gathered number `to - count`.
/// Nothing waits for a GPU.
///
/// # Errors
/// As [`crate::comm::Pending::wait`].
pub(crate) fn gather_sums(
    comm: &Comm,
    own: &Tensor,
    counts: &[usize],
    count: usize,
    pairs: impl IntoIterator<Item = (usize, usize)>,
) -> Result<Tensor> {
    let gathered = counts.iter().sum();
    let mut all = Tensor::zeros(&[count + gathered], DType::F64, own.device())?;
    let room = all.narrow(0, count, gathered)?;
    comm.run(Call::all_gather_uneven(room, own.clone(), counts))?;
    let pairs: Vec<_> = pairs.into_iter().map(|(to, from)| (to, count + from)).collect();
    kernels::add_pairs_(&mut all, &pairs)?;
    Ok(all.narrow(0, 0, count)?)
}
