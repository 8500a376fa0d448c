//! `y = x` where `x > 0`, else `slope x`, elementwise.
//!
//! Derivative: `dx = dy` where `x > 0`, else `slope dy`. Saves `x`.
//! At 0 it is that of the negative side.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The leaky rectified linear unit.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn leaky_relu(&self, slope: f64) -> Result<Var> {
        begins();
        let y = kernels::leaky_relu(self.tensor(), slope)?;
        elementwise(self, y, LeakyRelu { slope })
    }
}

struct LeakyRelu {
    slope: f64,
}

impl Elementwise for LeakyRelu {
    const NAME: &'static str = "leaky_relu";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::leaky_relu_backward(x, dy, self.slope)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        dy.where_(&x.gt_scalar(0.0)?, &dy.mul_scalar(self.slope)?)
    }
}
