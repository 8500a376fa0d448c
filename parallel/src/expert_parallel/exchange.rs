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

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device};

    use super::*;
    use crate::comm;
    use crate::launch;

    /// Rank r sends row counts[r][i] to rank i. A rank sends nothing, and one gets nothing.
    const COUNTS: [[usize; 3]; 3] = [[1, 0, 2], [3, 0, 1], [0, 0, 0]];

    #[test]
    fn rows_go_to_other_ranks_and_their_gradients_come_back() {
        let ranks = launch::threads(3, |rank| -> crate::Result<_> {
            let me = rank.rank();
            let (sent, wanted) = (COUNTS[me], [0, 1, 2].map(|from| COUNTS[from][me]));
            let rows: usize = sent.iter().sum();
            let values: Vec<f64> = (0..2 * rows).map(|i| (100 * me + i) as f64).collect();
            let x = Var::leaf(Tensor::from_slice(&values, &[rows, 2], Device::CPU)?)?;
            let y = all_to_all(&x, &sent, &wanted, rank.comm())?;
            // A gradient that says which element of which rank it is.
            let weights: Vec<f64> = (0..y.tensor().numel()).map(|i| (1000 * me + i) as f64).collect();
            let weights = Var::from_slice(&weights, y.shape(), Device::CPU)?;
            y.mul(&weights)?.sum_all()?.backward()?;
            let grad = x.grad().map(|grad| grad.tensor().to_vec::<f64>()).transpose()?;
            Ok((y.tensor().to_vec::<f64>()?, grad.unwrap_or_default()))
        });
        let ranks = ranks.unwrap();
        assert_eq!(ranks[0].0, [0.0, 1.0, 100.0, 101.0, 102.0, 103.0, 104.0, 105.0]);
        assert_eq!(ranks[2].0, [2.0, 3.0, 4.0, 5.0, 106.0, 107.0]);
        assert!(ranks[1].0.is_empty());
        assert_eq!(ranks[0].1, [0.0, 1.0, 2000.0, 2001.0, 2002.0, 2003.0]);
        assert_eq!(ranks[1].1, [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 2004.0, 2005.0]);
        assert!(ranks[2].1.is_empty());
    }

    #[test]
    fn numbers_of_rows_that_do_not_fit_are_refused() {
        let comm = comm::meta(1, 2).unwrap();
        let x = Var::new(Tensor::empty(&[3, 4], DType::F32, Device::Meta(0)).unwrap());
        assert_eq!(all_to_all(&x, &[1, 2], &[5, 2], &comm).unwrap().shape(), [7, 4]);
        for (sent, wanted) in [(&[1, 1][..], &[1, 1][..]), (&[3], &[1, 1]), (&[1, 2], &[1])] {
            let refused = all_to_all(&x, sent, wanted, &comm).unwrap_err().to_string();
            assert!(
                refused.contains("all_to_all: got shape [3, 4]") && refused.contains("2 ranks"),
                "{refused}"
            );
        }
        // Of what another rank sends, and of what the rank keeps.
        for (wanted, why) in
            [([2, 1], "the ranks call different things"), ([1, 2], "1 elements for itself and 2 from")]
        {
            let unlike = launch::threads(2, |rank| -> crate::Result<()> {
                let x = Var::new(Tensor::zeros(&[2, 1], DType::F32, Device::CPU)?);
                let wanted = if rank.rank() == 1 { wanted } else { [1, 1] };
                Ok(all_to_all(&x, &[1, 1], &wanted, rank.comm()).map(drop)?)
            });
            let refused = unlike.unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
