//! `y = ln(1 + e^(beta x)) / beta`, and `x` where `beta x > threshold`, elementwise.
//!
//! Derivative: `dx = dy sigmoid(beta x)`, and `dy` where `beta x > threshold`. Saves `x`.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// A smooth rectifier; usually `beta` is 1 and `threshold`, from which it is the identity, 20.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn softplus(&self, beta: f64, threshold: f64) -> Result<Var> {
        begins();
        let y = kernels::softplus(self.tensor(), beta, threshold)?;
        elementwise(self, y, Softplus { beta, threshold })
    }
}

struct Softplus {
    beta: f64,
    threshold: f64,
}

impl Elementwise for Softplus {
    const NAME: &'static str = "softplus";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::softplus_backward(x, dy, self.beta, self.threshold)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        let z = x.mul_scalar(self.beta)?;
        dy.where_(&z.gt_scalar(self.threshold)?, &dy.mul(&z.sigmoid()?)?)
    }
}
