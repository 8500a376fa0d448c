//! [`Exchange`]: what ranks do with a tensor together, started and finished apart.

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{Error, Result};
use phalanx_tensor::Tensor;

use super::cut::Cut;
use crate::comm::{self, Call, Comm, Pending, Reduction};

/// What becomes of a rank's tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    /// It stays as it is.
    Keep,
    /// The sum of all ranks'.
    Sum,
    /// This rank's part of it.
    Part(Cut),
    /// All ranks' side by side.
    Gather(Cut),
    /// This rank's part of the sum of all ranks'.
    SumPart(Cut),
}

impl Exchange {
    /// Starts it. `spare`: nobody else looks at the tensor, which may become the result.
    pub(super) fn start(&self, comm: &Comm, x: &Tensor, spare: bool) -> Result<Exchanged> {
        let (rank, begun) = (comm.rank(), |call: Call| Some(comm.start(call)));
        let done = |result| Ok(Exchanged { pending: None, result, unpack: None });
        if comm.size() == 1 {
            return done(x.clone());
        }
        match self {
            Exchange::Keep => done(x.clone()),
            Exchange::Part(cut) => {
                let range = cut.range(rank);
                done(x.narrow(cut.dim, range.start, range.len())?.copy()?)
            }
            Exchange::Sum => {
                let sum = if spare && x.is_contiguous() { x.clone() } else { x.copy()? };
                let pending = begun(Call::all_reduce(sum.clone(), Reduction::Sum));
                Ok(Exchanged { pending, result: sum, unpack: None })
            }
            Exchange::Gather(cut) => {
                let shape = cut.shape(x.shape(), cut.whole());
                let parts = Tensor::empty(&[shape.iter().product()], x.dtype(), x.device())?;
                let counts = counts(cut, x.shape());
                let pending = begun(Call::all_gather_uneven(parts.clone(), x.clone(), &counts));
                Ok(Exchanged { pending, result: parts, unpack: Some((cut.clone(), shape)) })
            }
            Exchange::SumPart(cut) => {
                let sum = Tensor::empty(&cut.shape(x.shape(), cut.lengths[rank]), x.dtype(), x.device())?;
                let call = Call::reduce_scatter_uneven(
                    sum.clone(),
                    pack(cut, x)?,
                    &counts(cut, x.shape()),
                    Reduction::Sum,
                );
                Ok(Exchanged { pending: begun(call), result: sum, unpack: None })
            }
        }
    }

    /// Does it.
    pub(super) fn run(&self, comm: &Comm, x: &Tensor, spare: bool) -> Result<Tensor> {
        self.start(comm, x, spare)?.finish()
    }
}

/// An exchange that was started.
pub(super) struct Exchanged {
    pending: Option<Pending>,
    result: Tensor,
    /// Parts that lie one after the other, the cut and the whole's shape.
    unpack: Option<(Cut, Vec<usize>)>,
}

impl Exchanged {
    /// Waits for the result.
    pub(super) fn finish(self) -> Result<Tensor> {
        if let Some(pending) = self.pending {
            pending.wait().map_err(failed)?;
        }
        match self.unpack {
            Some((cut, shape)) => unpack(&cut, &self.result, &shape),
            None => Ok(self.result),
        }
    }
}

/// An error between ranks, inside an operation.
pub(super) fn failed(error: comm::Error) -> Error {
    crate::Error::from(error).into()
}

/// Elements of each rank's part of a tensor of this shape.
fn counts(cut: &Cut, shape: &[usize]) -> Vec<usize> {
    cut.lengths.iter().map(|&length| cut.shape(shape, length).iter().product()).collect()
}

/// Whether the parts lie one after the other in the whole.
fn is_outermost(cut: &Cut, shape: &[usize]) -> bool {
    shape[..cut.dim].iter().product::<usize>() == 1
}

/// Each part in turn with where it lies in the whole and in a row of parts: `(whole, part)`, as views.
fn parts<'a>(
    cut: &'a Cut,
    whole: &'a Tensor,
    row: &'a Tensor,
) -> impl Iterator<Item = Result<(Tensor, Tensor)>> + 'a {
    let each = whole.numel() / cut.whole().max(1);
    (0..cut.lengths.len()).map(move |rank| {
        let range = cut.range(rank);
        let part = row.narrow(0, range.start * each, range.len() * each)?;
        let part = part.with_shape(&cut.shape(whole.shape(), range.len()))?;
        Ok((whole.narrow(cut.dim, range.start, range.len())?, part))
    })
}

/// The parts one after the other.
fn pack(cut: &Cut, whole: &Tensor) -> Result<Tensor> {
    if is_outermost(cut, whole.shape()) {
        return Ok(whole.contiguous()?);
    }
    let row = Tensor::empty(&[whole.numel()], whole.dtype(), whole.device())?;
    for pair in parts(cut, whole, &row) {
        let (from, mut to) = pair?;
        kernels::copy_(&mut to, &from)?;
    }
    Ok(row)
}

/// The whole of parts that lie one after the other.
fn unpack(cut: &Cut, row: &Tensor, shape: &[usize]) -> Result<Tensor> {
    if is_outermost(cut, shape) {
        return Ok(row.with_shape(shape)?);
    }
    let whole = Tensor::empty(shape, row.dtype(), row.device())?;
    for pair in parts(cut, &whole, row) {
        let (mut to, from) = pair?;
        kernels::copy_(&mut to, &from)?;
    }
    Ok(whole)
}
