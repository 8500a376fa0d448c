//! `y = x` where `x > 0`, else `alpha (e^x - 1)`, elementwise.
//!
//! Derivative: `dx = dy` where `x > 0`, else `dy alpha e^x`. Saves `x`.
//! At 0 it is that of the negative side.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The exponential linear unit.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn elu(&self, alpha: f64) -> Result<Var> {
        begins();
        let y = kernels::elu(self.tensor(), alpha)?;
        elementwise(self, y, Elu { alpha })
    }
}

struct Elu {
    alpha: f64,
}

impl Elementwise for Elu {
    const NAME: &'static str = "elu";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::elu_backward(x, dy, self.alpha)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        let positive = x.gt_scalar(0.0)?;
        // Where the exponential is not used it must not overflow: its derivative is multiplied by 0.
        let exp = Var::full(0.0, x)?.where_(&positive, x)?.exp()?;
        dy.where_(&positive, &dy.mul(&exp.mul_scalar(self.alpha)?)?)
    }
}
