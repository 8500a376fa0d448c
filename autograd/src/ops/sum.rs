//! `y = sum(x)` over dimensions.
//!
//! Derivative: `dy` repeated along the summed dimensions. Nothing is saved but the shape.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, resolve_dims};

use crate::{Backward, Cx, Grads, Result, Saver, Var, grads1, record};

impl Var {
    /// The sum of all elements, without dimensions.
    ///
    /// # Errors
    /// If the dtype is no number.
    pub fn sum_all(&self) -> Result<Var> {
        let dims: Dims = (0..self.rank()).collect();
        self.sum(&dims, false)
    }

    /// The sum over `dims`, which stay with size 1 if `keepdim`.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn sum<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
        let dims = resolve_dims("sum", dims, self.rank())?;
        let y = kernels::sum(self.tensor(), &dims, keepdim)?;
        let from = Dims::from_slice(self.shape());
        record("sum", &[self], y, |_: &Saver<'_>| Ok(Sum { from, dims }))
    }
}

struct Sum {
    from: Dims,
    dims: Dims,
}

impl Backward for Sum {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let kept: Dims =
            self.from.iter().enumerate().map(|(d, &n)| if self.dims.contains(&d) { 1 } else { n }).collect();
        grads1(cx.dy().reshape_to(&kept)?.broadcast_to(&self.from)?)
    }
}
