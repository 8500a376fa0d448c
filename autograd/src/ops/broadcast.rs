//! Broadcasting and its reverse, the sum over what was repeated.

use phalanx_kernels as kernels;
use phalanx_tensor::Dims;

use crate::{Backward, Cx, Grads, Result, Saver, Var, grads1, record};

impl Var {
    /// Repeats dimensions of size 1, and adds dimensions in front, to reach `shape`; no copy is made.
    ///
    /// Derivative: the sum over the repeated dimensions.
    ///
    /// # Errors
    /// If the shape does not broadcast to `shape`.
    pub fn broadcast_to(&self, shape: &[usize]) -> Result<Var> {
        let y = self.tensor().broadcast_to(shape)?;
        let from = Dims::from_slice(self.shape());
        record("broadcast_to", &[self], y, |_: &Saver<'_>| Ok(BroadcastTo { from }))
    }

    /// The reverse of [`Var::broadcast_to`]: sums over what was repeated from `shape`. Itself if the shapes agree.
    ///
    /// # Errors
    /// If `shape` does not broadcast to this shape.
    pub fn sum_to(&self, shape: &[usize]) -> Result<Var> {
        if self.shape() == shape {
            return Ok(self.clone());
        }
        let lead = self.rank().saturating_sub(shape.len());
        let repeated = |d: &usize| *d < lead || (shape[*d - lead] == 1 && self.shape()[*d] != 1);
        let dims: Dims = (0..self.rank()).filter(repeated).collect();
        let y = kernels::sum(self.tensor(), &dims, true)?.with_shape(shape)?;
        let from = Dims::from_slice(self.shape());
        record("sum_to", &[self], y, |_: &Saver<'_>| Ok(SumTo { from }))
    }
}

struct BroadcastTo {
    from: Dims,
}

impl Backward for BroadcastTo {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().sum_to(&self.from)?)
    }
}

struct SumTo {
    from: Dims,
}

impl Backward for SumTo {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().broadcast_to(&self.from)?)
    }
}
