//! `y = a` where a condition holds, else `b`; all three broadcast.
//!
//! Derivative: `da = dy` where it holds, else 0; `db` the other way round; each summed over what was broadcast.
//! Saves the condition.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dims, Scalar};

use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads2, record};

impl Var {
    /// This where `condition` (a bool) holds, else `other`; all three broadcast.
    ///
    /// # Errors
    /// If the shapes do not broadcast, dtypes or devices differ, or the condition is no bool.
    pub fn where_(&self, condition: &Var, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::where_(condition.tensor(), self.tensor(), other.tensor())?;
        record("where", &[self, other, condition], y, |s: &Saver<'_>| {
            let shapes = [Dims::from_slice(self.shape()), Dims::from_slice(other.shape())];
            Ok(Where { shapes, condition: s.input(2)? })
        })
    }

    /// This with `value` wherever `mask` (a bool, which broadcasts to this shape) is true. The gradient is 0 there.
    ///
    /// # Errors
    /// If the mask does not broadcast to this shape, is no bool, or is on another device, or an integer dtype cannot hold
    /// the value.
    pub fn masked_fill(&self, mask: &Var, value: impl Into<Scalar>) -> Result<Var> {
        begins();
        let y = kernels::masked_fill(self.tensor(), mask.tensor(), value.into())?;
        record("masked_fill", &[self, mask], y, |s: &Saver<'_>| Ok(MaskedFill { mask: s.input(1)? }))
    }

    /// `value` everywhere, with the shape, dtype and device of `like`, without memory for each element.
    pub(crate) fn full(value: f64, like: &Var) -> Result<Var> {
        let one = kernels::full(&[], value, like.dtype(), like.device())?;
        Ok(Var::new(one.broadcast_to(like.shape())?))
    }
}

struct Where {
    shapes: [Dims; 2],
    condition: SavedVariable,
}

impl Backward for Where {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (dy, condition) = (cx.dy(), cx.get(&self.condition)?);
        let zero = Var::full(0.0, dy)?;
        let da = || dy.where_(&condition, &zero)?.sum_to(&self.shapes[0]);
        let db = || zero.where_(&condition, dy)?.sum_to(&self.shapes[1]);
        grads2(cx.needs(0).then(da).transpose()?, cx.needs(1).then(db).transpose()?)
    }
}

struct MaskedFill {
    mask: SavedVariable,
}

impl Backward for MaskedFill {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        crate::grads1(cx.dy().masked_fill(&cx.get(&self.mask)?, 0.0)?)
    }
}
