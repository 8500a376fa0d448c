//! The conjugate collectives: exchanges between ranks whose backward pass is another exchange (Megatron-LM's *f* and *g*).
//!
//! ```text
//!                             forward          backward
//! copy_to_region       f      x                sum of the ranks' dy
//! reduce_from_region   g      sum of x         dy
//! scatter_to_region           own part of x    all parts of dy
//! gather_from_region          all parts of x   own part of dy
//! all_gather                  all parts of x   own part of the sum of dy
//! reduce_scatter              own part of sum  all parts of dy
//! ```
//! In the first four, every rank holds the same tensor outside of the region, and the same gradient. In the last two the
//! activations outside are split as well (sequence parallelism). Parts are equal. All ranks call the same functions in the
//! same order.
//!
//! Source: Shoeybi et al.: Megatron-LM (2019), section 3; Korthikanti et al. (2022), section 4.2.2.

use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{Backward, Cx, Error, Grads, Result, Var, begins, grads1, record};
use phalanx_nn::{Error as NnError, Result as NnResult};
use phalanx_tensor::{Dim, Tensor, even_piece};

use crate::comm::{self, Call, Comm, Pending, Reduction};

/// `f`: enters the region with `x`, of which every rank then computes something else. Backward adds the ranks' gradients.
///
/// # Errors
/// As [`crate::comm::Pending::wait`], in the backward pass.
pub fn copy_to_region(x: &Var, comm: &Comm) -> Result<Var> {
    exchanged("copy_to_region", x.clone(), comm, [Exchange::Keep, Exchange::Sum])
}

/// `g`: leaves the region with the sum of all ranks' `x`, in order of the ranks. Backward copies the gradient.
///
/// # Errors
/// As [`crate::comm::Pending::wait`].
pub fn reduce_from_region(x: &Var, comm: &Comm) -> Result<Var> {
    exchanged("reduce_from_region", x.clone(), comm, [Exchange::Sum, Exchange::Keep])
}

/// This rank's part along `dim` of `x`, which all ranks hold.
///
/// # Errors
/// If the dimension does not divide by the ranks.
pub fn scatter_to_region(x: &Var, dim: impl Dim, comm: &Comm) -> Result<Var> {
    let split = whole("scatter_to_region", x, dim, comm)?;
    exchanged("scatter_to_region", x.clone(), comm, [Exchange::Part(split.clone()), Exchange::Gather(split)])
}

/// All ranks' `x` side by side along `dim`.
///
/// # Errors
/// As [`crate::comm::Pending::wait`].
pub fn gather_from_region(x: &Var, dim: impl Dim, comm: &Comm) -> Result<Var> {
    let split = part("gather_from_region", x, dim, comm)?;
    exchanged("gather_from_region", x.clone(), comm, [Exchange::Gather(split.clone()), Exchange::Part(split)])
}

/// All ranks' `x` side by side along `dim`, of which every rank then computes something else.
///
/// # Errors
/// As [`crate::comm::Pending::wait`].
pub fn all_gather(x: &Var, dim: impl Dim, comm: &Comm) -> Result<Var> {
    let split = part("all_gather", x, dim, comm)?;
    exchanged("all_gather", x.clone(), comm, [Exchange::Gather(split.clone()), Exchange::SumPart(split)])
}

/// This rank's part along `dim` of the sum of all ranks' `x`.
///
/// # Errors
/// If the dimension does not divide by the ranks, or as [`crate::comm::Pending::wait`].
pub fn reduce_scatter(x: &Var, dim: impl Dim, comm: &Comm) -> Result<Var> {
    let split = whole("reduce_scatter", x, dim, comm)?;
    exchanged("reduce_scatter", x.clone(), comm, [Exchange::SumPart(split.clone()), Exchange::Gather(split)])
}

/// How `x` is split.
fn whole(op: &'static str, x: &Var, dim: impl Dim, comm: &Comm) -> Result<Split> {
    let dim = dim.resolve(x.rank(), op)?;
    Ok(Split::even(op, dim, x.shape()[dim], comm.size())?)
}

/// How the tensor of which `x` is a part is split.
fn part(op: &'static str, x: &Var, dim: impl Dim, comm: &Comm) -> Result<Split> {
    let dim = dim.resolve(x.rank(), op)?;
    Ok(Split::of_parts(dim, x.shape()[dim], comm.size()))
}

/// The result of the first exchange; backward does the second one. If `x` is the only handle, the result may use its memory.
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

/// The node of [`exchanged`]: backward is the second exchange, and its own backward the first again.
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

/// An exchange of a tensor between ranks, which can be started and finished apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    /// The tensor itself.
    Keep,
    /// The sum of all ranks' tensors (all-reduce).
    Sum,
    /// This rank's part of the tensor.
    Part(Split),
    /// All ranks' tensors side by side (all-gather).
    Gather(Split),
    /// This rank's part of the sum of all ranks' tensors (reduce-scatter).
    SumPart(Split),
}

impl Exchange {
    /// Starts the exchange. With `spare` the tensor is not used any more, and the result may take its memory.
    pub(super) fn start(&self, comm: &Comm, x: &Tensor, spare: bool) -> Result<PendingExchange> {
        let (rank, begun) = (comm.rank(), |call: Call| Some(comm.start(call)));
        let done = |result| Ok(PendingExchange { pending: None, result, unpack: None });
        if comm.size() == 1 {
            return done(x.clone());
        }
        match self {
            Exchange::Keep => done(x.clone()),
            Exchange::Part(split) => {
                let range = split.range(rank);
                done(x.narrow(split.dim, range.start, range.len())?.copy()?)
            }
            Exchange::Sum => {
                let sum = if spare && x.is_contiguous() { x.clone() } else { x.copy()? };
                let pending = begun(Call::all_reduce(sum.clone(), Reduction::Sum));
                Ok(PendingExchange { pending, result: sum, unpack: None })
            }
            Exchange::Gather(split) => {
                let shape = split.shape(x.shape(), split.total());
                let parts = Tensor::empty(&[shape.iter().product()], x.dtype(), x.device())?;
                let counts = counts(split, x.shape());
                let pending = begun(Call::all_gather_uneven(parts.clone(), x.clone(), &counts));
                Ok(PendingExchange { pending, result: parts, unpack: Some((split.clone(), shape)) })
            }
            Exchange::SumPart(split) => {
                let sum = Tensor::empty(&split.shape(x.shape(), split.lengths[rank]), x.dtype(), x.device())?;
                let call = Call::reduce_scatter_uneven(
                    sum.clone(),
                    pack(split, x)?,
                    &counts(split, x.shape()),
                    Reduction::Sum,
                );
                Ok(PendingExchange { pending: begun(call), result: sum, unpack: None })
            }
        }
    }

    /// Starts the exchange and waits for the result.
    pub(super) fn run(&self, comm: &Comm, x: &Tensor, spare: bool) -> Result<Tensor> {
        self.start(comm, x, spare)?.finish()
    }
}

/// An exchange that was started.
pub(super) struct PendingExchange {
    pending: Option<Pending>,
    result: Tensor,
    /// If the result is parts one after the other: the split, and the shape of the whole tensor.
    unpack: Option<(Split, Vec<usize>)>,
}

impl PendingExchange {
    /// Waits for the result.
    pub(super) fn finish(self) -> Result<Tensor> {
        if let Some(pending) = self.pending {
            pending.wait().map_err(failed)?;
        }
        match self.unpack {
            Some((split, shape)) => unpack(&split, &self.result, &shape),
            None => Ok(self.result),
        }
    }
}

/// A communication error as an error of an operation.
pub(super) fn failed(error: comm::Error) -> Error {
    crate::Error::from(error).into()
}

/// The number of elements of each rank's part of a tensor of this shape.
fn counts(split: &Split, shape: &[usize]) -> Vec<usize> {
    split.lengths.iter().map(|&length| split.shape(shape, length).iter().product()).collect()
}

/// Whether the parts are contiguous in the whole tensor, one after the other.
fn is_outermost(split: &Split, shape: &[usize]) -> bool {
    shape[..split.dim].iter().product::<usize>() == 1
}

/// For each part a view of it in the whole tensor, and one in a row of parts.
fn parts<'a>(
    split: &'a Split,
    whole: &'a Tensor,
    row: &'a Tensor,
) -> impl Iterator<Item = Result<(Tensor, Tensor)>> + 'a {
    let each = whole.numel() / split.total().max(1);
    (0..split.lengths.len()).map(move |rank| {
        let range = split.range(rank);
        let part = row.narrow(0, range.start * each, range.len() * each)?;
        let part = part.with_shape(&split.shape(whole.shape(), range.len()))?;
        Ok((whole.narrow(split.dim, range.start, range.len())?, part))
    })
}

/// The parts of a tensor one after the other, as collectives want them.
fn pack(split: &Split, whole: &Tensor) -> Result<Tensor> {
    if is_outermost(split, whole.shape()) {
        return Ok(whole.contiguous()?);
    }
    let row = Tensor::empty(&[whole.numel()], whole.dtype(), whole.device())?;
    for pair in parts(split, whole, &row) {
        let (from, mut to) = pair?;
        kernels::copy_(&mut to, &from)?;
    }
    Ok(row)
}

/// The whole tensor, made of parts one after the other.
fn unpack(split: &Split, row: &Tensor, shape: &[usize]) -> Result<Tensor> {
    if is_outermost(split, shape) {
        return Ok(row.with_shape(shape)?);
    }
    let whole = Tensor::empty(shape, row.dtype(), row.device())?;
    for pair in parts(split, &whole, row) {
        let (mut to, from) = pair?;
        kernels::copy_(&mut to, &from)?;
    }
    Ok(whole)
}

/// A dimension split into parts, one a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// The dimension.
    pub(super) dim: usize,
    /// The size of each rank's part.
    pub(super) lengths: Vec<usize>,
}

impl Split {
    /// `count` along `dim` in parts that differ by at most one, the larger first. Nothing is padded.
    pub(super) fn uneven(what: &str, dim: usize, count: usize, ranks: usize) -> NnResult<Split> {
        if count < ranks {
            let why = format!("got {count} to cut over {ranks} ranks, wanted at least one each");
            return Err(NnError::invalid(what, why));
        }
        let lengths = (0..ranks).map(|rank| even_piece(count, ranks, rank).len()).collect();
        Ok(Split { dim, lengths })
    }

    /// `count` along `dim` in equal parts.
    pub(super) fn even(what: &str, dim: usize, count: usize, ranks: usize) -> NnResult<Split> {
        if !count.is_multiple_of(ranks) || count == 0 {
            let why = format!("got {count} to cut over {ranks} ranks, wanted a multiple of {ranks}");
            return Err(NnError::invalid(what, why));
        }
        Ok(Split { dim, lengths: vec![count / ranks; ranks] })
    }

    /// The split of a dimension of which every rank has a part of `length`.
    pub(super) fn of_parts(dim: usize, length: usize, ranks: usize) -> Split {
        Split { dim, lengths: vec![length; ranks] }
    }

    /// The range of a rank's part.
    pub(super) fn range(&self, rank: usize) -> Range<usize> {
        let start = self.lengths[..rank].iter().sum();
        start..start + self.lengths[rank]
    }

    /// The size of the whole dimension.
    pub(super) fn total(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// The shape of a rank's part of a tensor of `shape`.
    pub(super) fn shape(&self, shape: &[usize], length: usize) -> Vec<usize> {
        let mut shape = shape.to_vec();
        shape[self.dim] = length;
        shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_differ_by_at_most_one_and_cover_the_whole() {
        let split = Split::uneven("vocabulary", 0, 256, 3).unwrap();
        assert_eq!(split.lengths, [86, 85, 85]);
        assert_eq!([split.range(0), split.range(1), split.range(2)], [0..86, 86..171, 171..256]);
        assert_eq!((split.total(), split.shape(&[256, 7], 85)), (256, vec![85, 7]));
        assert_eq!(Split::even("heads", 1, 6, 3).unwrap().lengths, [2, 2, 2]);
        assert_eq!(Split::of_parts(1, 4, 2).total(), 8);
    }

    #[test]
    fn what_cannot_be_cut_is_refused_with_both_numbers() {
        let error = Split::even("heads", 1, 6, 4).unwrap_err().to_string();
        assert_eq!(error, "heads: got 6 to cut over 4 ranks, wanted a multiple of 4");
        let error = Split::uneven("vocabulary", 0, 2, 3).unwrap_err().to_string();
        assert!(error.contains("vocabulary") && error.contains("2") && error.contains("3 ranks"), "{error}");
    }
}
