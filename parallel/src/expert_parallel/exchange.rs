//! [`all_to_all`]: rows to other ranks and back, as an operation that is differentiated.

use phalanx_nn::Error as NnError;
use phalanx_nn::autograd::{Backward, Cx, Error, Grads, Result, Var, begins, grads1, record};
use phalanx_tensor::Tensor;

use crate::comm::{Call, Comm};

/// Sends `sent[i]` rows of `x` `[rows, ..]` to rank `i` of a group, one rank's after the other's. The result has `wanted[j]` rows of rank
/// `j`, in order of the ranks. Backward sends the gradients back: it is the same exchange with both lists swapped. All ranks of the group
/// call it, and each has as `wanted[j]` what rank `j` has as `sent`.
///
/// # Errors
/// If there is not a number for each rank, or `sent` does not add up to the rows; if two ranks' numbers do not fit; or as
/// [`crate::comm::Pending::wait`].
pub fn all_to_all(x: &Var, sent: &[usize], wanted: &[usize], comm: &Comm) -> Result<Var> {
    begins();
    let (rows, ranks) = (x.shape().first().copied(), comm.size());
    if rows != Some(sent.iter().sum()) || sent.len() != ranks || wanted.len() != ranks {
        let why = format!(
            "got shape {:?}, {sent:?} rows to send and {wanted:?} to get, wanted a number for each of {ranks} ranks, and rows to send \
             that add up",
            x.shape()
        );
        return Err(NnError::invalid("all_to_all", why).into());
    }
    let y = exchanged(x.tensor(), sent, wanted, comm)?;
    let (sent, wanted) = (sent.to_vec(), wanted.to_vec());
    record("all_to_all", &[x], y, |_| Ok(AllToAll { comm: comm.clone(), sent, wanted }))
}

/// The node of [`all_to_all`].
struct AllToAll {
    comm: Comm,
    sent: Vec<usize>,
    wanted: Vec<usize>,
}

impl Backward for AllToAll {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(all_to_all(cx.dy(), &self.wanted, &self.sent, &self.comm)?)
    }
}

fn exchanged(x: &Tensor, sent: &[usize], wanted: &[usize], comm: &Comm) -> Result<Tensor> {
    let shape = [&[wanted.iter().sum()], &x.shape()[1..]].concat();
    let y = Tensor::empty(&shape, x.dtype(), x.device())?;
    let each: usize = x.shape()[1..].iter().product();
    let [sent, wanted] = [sent, wanted].map(|rows| rows.iter().map(|n| n * each).collect::<Vec<_>>());
    let call = Call::all_to_all_uneven(y.clone(), &wanted, x.contiguous()?, &sent);
    comm.run(call).map_err(|error| Error::from(crate::Error::from(error)))?;
    Ok(y)
}
