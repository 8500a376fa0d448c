//! `y = max(a, b)` and `y = min(a, b)`, elementwise and broadcast; NaN where either is.
//!
//! Derivative: `dy` for the element that was taken, half of it for each at a tie, summed over what was broadcast.
//! Saves both.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::broadcasting::{Broadcasting, broadcasting};
use crate::{Result, Var, begins};

impl Var {
    /// The larger element, broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn maximum(&self, other: &Var) -> Result<Var> {
        begins();
        broadcasting(&[self, other], kernels::maximum(self.tensor(), other.tensor())?, Maximum)
    }

    /// The smaller element, broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn minimum(&self, other: &Var) -> Result<Var> {
        begins();
        broadcasting(&[self, other], kernels::minimum(self.tensor(), other.tensor())?, Minimum)
    }
}

struct Maximum;

impl Broadcasting for Maximum {
    const NAME: &'static str = "maximum";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        kernels::maximum_backward(x[i].tensor(), x[1 - i].tensor(), dy).map(Some)
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        taken(&x[i], &x[1 - i], dy)
    }
}

struct Minimum;

impl Broadcasting for Minimum {
    const NAME: &'static str = "minimum";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        kernels::maximum_backward(x[1 - i].tensor(), x[i].tensor(), dy).map(Some)
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        taken(&x[1 - i], &x[i], dy)
    }
}

/// `dy` where `high` is not below `low`, half of it where they are equal.
fn taken(high: &Var, low: &Var, dy: &Var) -> Result<Var> {
    let shared = dy.mul_scalar(0.5)?.where_(&high.eq(low)?, dy)?;
    Var::full(0.0, dy)?.where_(&high.lt(low)?, &shared)
}
