//! The conjugate functions: exchanges between ranks whose backward pass is another exchange.
//!
//! ```text
//!                         forward          backward
//! copy_to_region          x                sum of the ranks' dy
//! reduce_from_region      sum of x         dy
//! scatter_to_region       own part of x    all parts of dy
//! gather_from_region      all parts of x   own part of dy
//! all_gather              all parts of x   own part of the sum of dy
//! reduce_scatter          own part of sum  all parts of dy
//! ```
//! In the first four, what all ranks hold (outside of the region) is the same on each, and so is its gradient. In the
//! last two the stream outside is cut, too. Parts are equal. All ranks call the same in the same order.
//! Source: Shoeybi et al.: Megatron-LM (2019), section 3; Korthikanti et al. (2022), section 4.2.2.

use phalanx_nn::autograd::{Backward, Cx, Grads, Result, Var, begins, grads1, record};
use phalanx_tensor::Dim;

use super::cut::Cut;
use super::exchange::Exchange;
use crate::comm::Comm;

/// `x` itself, on its way to where every rank does something else with it.
///
/// # Errors
/// As [`crate::comm::Pending::wait`], in the backward pass.
pub fn copy_to_region(x: &Var, comm: &Comm) -> Result<Var> {
    exchanged("copy_to_region", x.clone(), comm, [Exchange::Keep, Exchange::Sum])
}

/// The sum of all ranks' `x`, in order of the ranks.
///
/// # Errors
/// As [`crate::comm::Pending::wait`].
pub fn reduce_from_region(x: &Var, comm: &Comm) -> Result<Var> {
    exchanged("reduce_from_region", x.clone(), comm, [Exchange::Sum, Exchange::Keep])
}

/// This rank's part of `x`, which all have, along `dim`.
///
/// # Errors
/// If the dimension does not divide by the ranks.
pub fn scatter_to_region(x: &Var, dim: impl Dim, comm: &Comm) -> Result<Var> {
    let cut = whole("scatter_to_region", x, dim, comm)?;
    exchanged("scatter_to_region", x.clone(), comm, [Exchange::Part(cut.clone()), Exchange::Gather(cut)])
}

/// All ranks' `x` side by side along `dim`.
///
/// # Errors
/// As [`crate::comm::Pending::wait`].
pub fn gather_from_region(x: &Var, dim: impl Dim, comm: &Comm) -> Result<Var> {
    let cut = part("gather_from_region", x, dim, comm)?;
    exchanged("gather_from_region", x.clone(), comm, [Exchange::Gather(cut.clone()), Exchange::Part(cut)])
}

/// All ranks' `x` side by side along `dim`, on its way to where every rank does something else with it.
///
/// # Errors
/// As [`crate::comm::Pending::wait`].
pub fn all_gather(x: &Var, dim: impl Dim, comm: &Comm) -> Result<Var> {
    let cut = part("all_gather", x, dim, comm)?;
    exchanged("all_gather", x.clone(), comm, [Exchange::Gather(cut.clone()), Exchange::SumPart(cut)])
}

/// This rank's part along `dim` of the sum of all ranks' `x`.
///
/// # Errors
/// If the dimension does not divide by the ranks, or as [`crate::comm::Pending::wait`].
pub fn reduce_scatter(x: &Var, dim: impl Dim, comm: &Comm) -> Result<Var> {
    let cut = whole("reduce_scatter", x, dim, comm)?;
    exchanged("reduce_scatter", x.clone(), comm, [Exchange::SumPart(cut.clone()), Exchange::Gather(cut)])
}

/// How `x` is cut.
fn whole(op: &'static str, x: &Var, dim: impl Dim, comm: &Comm) -> Result<Cut> {
    let dim = dim.resolve(x.rank(), op)?;
    Ok(Cut::even(op, dim, x.shape()[dim], comm.size())?)
}

/// How the tensor is cut that `x` is a part of.
fn part(op: &'static str, x: &Var, dim: impl Dim, comm: &Comm) -> Result<Cut> {
    let dim = dim.resolve(x.rank(), op)?;
    Ok(Cut::of_parts(dim, x.shape()[dim], comm.size()))
}

/// The first exchange; backward does the second. If nobody else has `x`, its memory may become the result's.
pub(super) fn exchanged(
    name: &'static str,
    x: Var,
    comm: &Comm,
    [forth, back]: [Exchange; 2],
) -> Result<Var> {
    begins();
    let y = forth.run(comm, x.tensor(), x.tensor().is_sole_owner())?;
    record(name, &[&x], y, |_| Ok(Conjugate { name, comm: comm.clone(), exchanges: [back, forth] }))
}

struct Conjugate {
    name: &'static str,
    comm: Comm,
    exchanges: [Exchange; 2],
}

impl Backward for Conjugate {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(exchanged(self.name, cx.dy().clone(), &self.comm, self.exchanges.clone())?)
    }
}
