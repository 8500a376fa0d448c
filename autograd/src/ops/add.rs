//! `y = a + b`, broadcast, and `y = a + s` with a number.
//!
//! Derivative: `da = dy`, `db = dy`, each summed over what was broadcast. Nothing is saved.

use phalanx_kernels as kernels;
use phalanx_tensor::Scalar;

use crate::{Backward, Cx, Grads, Result, Saver, Var, begins, grads1, grads2, record};

impl Var {
    /// `self + other`, broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn add(&self, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::add(self.tensor(), other.tensor())?;
        record("add", &[self, other], y, |_: &Saver<'_>| Ok(Add))
    }

    /// `self + number`, in this dtype.
    ///
    /// # Errors
    /// If this is a bool, or an integer and the number is not.
    pub fn add_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
        begins();
        let y = kernels::add_scalar(self.tensor(), number.into())?;
        record("add", &[self], y, |_: &Saver<'_>| Ok(AddScalar))
    }
}

struct Add;

impl Backward for Add {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let grad = |i: usize| cx.needs(i).then(|| cx.sum_to_input(i, cx.dy().clone())).transpose();
        grads2(grad(0)?, grad(1)?)
    }

    fn backward_once(self, cx: &mut Cx<'_>) -> Result<Grads> {
        if cx.needs(0) && cx.needs(1) {
            let db = cx.sum_to_input(1, cx.dy().clone())?;
            let dy = cx.take_dy();
            return grads2(Some(cx.sum_to_input(0, dy)?), Some(db));
        }
        let (i, dy) = (usize::from(cx.needs(1)), cx.take_dy());
        let mut grads = [None, None];
        grads[i] = Some(cx.sum_to_input(i, dy)?);
        let [da, db] = grads;
        grads2(da, db)
    }
}

struct AddScalar;

impl Backward for AddScalar {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().clone())
    }

    fn backward_once(self, cx: &mut Cx<'_>) -> Result<Grads> {
        grads1(cx.take_dy())
    }
}
