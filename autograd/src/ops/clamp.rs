//! `y = min(max(x, min), max)`, elementwise.
//!
//! Derivative: `dx = dy` strictly between the bounds, else 0 (on a bound too). Saves `x`.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Scalar, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// Every element kept between the bounds; an absent one does not bind. NaN stays.
    ///
    /// # Errors
    /// If the dtype is bool, a bound is NaN, or the dtype is an integer one and a bound is no integer or leaves none of the
    /// dtype's numbers.
    pub fn clamp(&self, min: Option<Scalar>, max: Option<Scalar>) -> Result<Var> {
        begins();
        elementwise(self, kernels::clamp(self.tensor(), min, max)?, Clamp { min, max })
    }
}

struct Clamp {
    min: Option<Scalar>,
    max: Option<Scalar>,
}

impl Elementwise for Clamp {
    const NAME: &'static str = "clamp";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::clamp_backward(x, dy, self.min, self.max)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        let zero = Var::full(0.0, dy)?;
        let dx = self.min.map_or(Ok(dy.clone()), |min| zero.where_(&x.le_scalar(min)?, dy))?;
        self.max.map_or(Ok(dx.clone()), |max| zero.where_(&x.ge_scalar(max)?, &dx))
    }
}
