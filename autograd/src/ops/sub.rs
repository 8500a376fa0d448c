//! `y = a - b`, broadcast, and `y = a - s`, `y = s - a` with a number.
//!
//! Derivative: `da = dy`, `db = -dy`, each summed over what was broadcast. Nothing is saved but the shapes.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dims, Scalar};

use crate::{Backward, Cx, Grads, Result, Saver, Var, begins, grads1, grads2, record};

impl Var {
    /// `self - other`, broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn sub(&self, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::sub(self.tensor(), other.tensor())?;
        let shapes = || [Dims::from_slice(self.shape()), Dims::from_slice(other.shape())];
        record("sub", &[self, other], y, |_: &Saver<'_>| Ok(Sub { shapes: shapes() }))
    }

    /// `self - number`, in this dtype.
    ///
    /// # Errors
    /// If this is a bool, or an integer and the number is not.
    pub fn sub_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
        begins();
        let y = kernels::sub_scalar(self.tensor(), number.into())?;
        record("sub", &[self], y, |_: &Saver<'_>| Ok(SubScalar))
    }

    /// `number - self`, in this dtype.
    ///
    /// # Errors
    /// If this is a bool, or an integer and the number is not.
    pub fn rsub_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
        begins();
        let y = kernels::rsub_scalar(self.tensor(), number.into())?;
        record("sub", &[self], y, |_: &Saver<'_>| Ok(ScalarSub))
    }
}

struct Sub {
    shapes: [Dims; 2],
}

impl Backward for Sub {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let da = cx.needs(0).then(|| cx.dy().sum_to(&self.shapes[0])).transpose()?;
        let db = cx.needs(1).then(|| cx.dy().sum_to(&self.shapes[1])?.neg()).transpose()?;
        grads2(da, db)
    }
}

struct SubScalar;

impl Backward for SubScalar {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().clone())
    }
}

struct ScalarSub;

impl Backward for ScalarSub {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().neg()?)
    }
}
