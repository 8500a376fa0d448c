//! Dimensions in another order; a view.
//!
//! Derivative: `dy` with its dimensions put back.

use phalanx_tensor::{Dim, Dims, resolve_dims};

use crate::{Backward, Cx, Grads, Result, Saver, Var, grads1, record};

impl Var {
    /// Dimension `i` of the result is dimension `dims[i]` of this.
    ///
    /// # Errors
    /// If `dims` is not a permutation of the dimensions.
    pub fn permute<D: Dim>(&self, dims: &[D]) -> Result<Var> {
        let dims = resolve_dims("permute", dims, self.rank())?;
        let y = self.tensor().permute(&dims)?;
        record("permute", &[self], y, |_: &Saver<'_>| Ok(Permute { dims }))
    }
}

struct Permute {
    dims: Dims,
}

impl Backward for Permute {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let mut back = Dims::from_elem(0, self.dims.len());
        for (to, &from) in self.dims.iter().enumerate() {
            back[from] = to;
        }
        grads1(cx.dy().permute(&back)?)
    }

    fn is_view(&self) -> bool {
        true
    }
}
