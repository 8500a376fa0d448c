//! [`SumOverRanks`]: the sum of all ranks' tensors, as a differentiable operation.

use phalanx_nn::autograd::{Cx, Error, Function, Grads, Result, Saved, grads1};
use phalanx_tensor::Tensor;

use crate::comm::{Comm, Reduction};

/// `y = sum of x over the ranks`, on each; `dx = sum of dy over the ranks`, since every rank's `y` has every rank's `x`.
pub(super) struct SumOverRanks(pub(super) Comm);

impl Function for SumOverRanks {
    fn name(&self) -> &'static str {
        "sum_over_ranks"
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let mut sum = inputs[0].copy()?;
        let failed = |error: crate::comm::Error| Error::from(crate::Error::from(error));
        self.0.all_reduce(&mut sum, Reduction::Sum).map_err(failed)?;
        Ok(vec![sum])
    }

    fn backward(&self, cx: &Cx<'_>, _: &[Saved]) -> Result<Grads> {
        grads1(SumOverRanks(self.0.clone()).apply(&[cx.dy()])?.swap_remove(0))
    }
}
