//! The same elements in another shape.
//!
//! Derivative: `dy` in the old shape. A view where strides can express it, else a copy.

use phalanx_tensor::{Dims, resolve_shape};

use crate::{Backward, Cx, Grads, Result, Saver, Var, grads1, record};

impl Var {
    /// The elements in row-major order in another shape, in which one size may be -1 and is inferred.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape(&self, shape: &[isize]) -> Result<Var> {
        self.reshape_to(&resolve_shape("reshape", self.shape(), shape)?)
    }

    /// [`Var::reshape`] to a shape without -1.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape_to(&self, shape: &[usize]) -> Result<Var> {
        let y = self.tensor().with_shape(shape)?;
        let from = Dims::from_slice(self.shape());
        record("reshape", &[self], y, |_: &Saver<'_>| Ok(Reshape { from }))
    }
}

struct Reshape {
    from: Dims,
}

impl Backward for Reshape {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().reshape_to(&self.from)?)
    }

    fn is_view(&self) -> bool {
        true
    }
}
