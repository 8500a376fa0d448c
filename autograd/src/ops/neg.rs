//! `y = -x`, elementwise.
//!
//! Derivative: `dx = -dy`. Nothing is saved.

use phalanx_kernels as kernels;

use crate::{Backward, Cx, Grads, Result, Saver, Var, begins, grads1, record};

impl Var {
    /// The negative.
    ///
    /// # Errors
    /// If the dtype is bool.
    pub fn neg(&self) -> Result<Var> {
        begins();
        let y = kernels::neg(self.tensor())?;
        record("neg", &[self], y, |_: &Saver<'_>| Ok(Neg))
    }
}

struct Neg;

impl Backward for Neg {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().neg()?)
    }
}
