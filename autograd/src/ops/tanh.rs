//! `y = tanh(x)`, elementwise.
//!
//! Derivative: `dx = dy (1 - y²)`. Saves `y`, which the derivative is made of.

use phalanx_kernels as kernels;

use crate::{Backward, Cx, Grads, Result, Saved, Saver, Var, grads1, record};

impl Var {
    /// The hyperbolic tangent.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn tanh(&self) -> Result<Var> {
        let y = kernels::tanh(self.tensor())?;
        record("tanh", &[self], y, |s: &Saver<'_>| Ok(Tanh { y: s.output(0)? }))
    }
}

struct Tanh {
    y: Saved,
}

impl Backward for Tanh {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let y = cx.get(&self.y)?;
        if !cx.create_graph() {
            return grads1(Var::new(kernels::tanh_backward(y.tensor(), cx.dy().tensor())?));
        }
        let slope = y.mul(&y)?.mul_scalar(-1.0)?.add_scalar(1.0)?;
        grads1(cx.dy().mul(&slope)?)
    }
}
