//! `y = a / b`, broadcast, and `y = a / s`, `y = s / a` with a number.
//!
//! Derivative: `da = dy / b`, `db = -dy a / b²`, each summed over what was broadcast. Saves `b`, and `a` if `b`
//! needs a gradient. Quotients of integers are f32.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Scalar, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads1, grads2, record};

impl Var {
    /// `self / other`, broadcast, of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn div(&self, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::div(self.tensor(), other.tensor())?;
        record("div", &[self, other], y, |s: &Saver<'_>| {
            let a = s.needs(1).then(|| s.input(0)).transpose()?;
            Ok(Div { a, b: s.input(1)? })
        })
    }

    /// `self / number`, in this dtype.
    ///
    /// # Errors
    /// If the result cannot be allocated.
    pub fn div_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
        begins();
        let number = number.into();
        let y = kernels::div_scalar(self.tensor(), number)?;
        record("div", &[self], y, |_: &Saver<'_>| Ok(DivScalar { number }))
    }

    /// `number / self`, in this dtype.
    ///
    /// # Errors
    /// If the result cannot be allocated.
    pub fn rdiv_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
        begins();
        let number = number.into();
        elementwise(self, kernels::rdiv_scalar(self.tensor(), number)?, ScalarDiv { number })
    }
}

struct Div {
    a: Option<SavedVariable>,
    b: SavedVariable,
}

impl Backward for Div {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (dy, b) = (cx.dy(), cx.get(&self.b)?);
        let da = cx.needs(0).then(|| cx.sum_to_input(0, dy.div(&b)?)).transpose()?;
        let Some(a) = self.a.as_ref().filter(|_| cx.needs(1)) else { return grads2(da, None) };
        let a = cx.get(a)?;
        let db = match cx.create_graph() {
            true => dy.mul(&a.div(&b)?.div(&b)?)?.neg()?,
            false => Var::new(kernels::div_backward_divisor(a.tensor(), b.tensor(), dy.tensor())?),
        };
        grads2(da, Some(cx.sum_to_input(1, db)?))
    }
}

struct DivScalar {
    number: Scalar,
}

impl Backward for DivScalar {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().div_scalar(self.number)?)
    }
}

/// `dx = -dy s / x²`.
struct ScalarDiv {
    number: Scalar,
}

impl Elementwise for ScalarDiv {
    const NAME: &'static str = "div";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::rdiv_backward(x, dy, self.number)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        dy.mul(&x.rdiv_scalar(self.number)?.div(x)?)?.neg()
    }
}
