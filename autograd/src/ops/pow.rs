//! `y = a^b`, elementwise and broadcast, also with a number on either side.
//!
//! Derivative: `da = dy b a^(b-1)`, 0 where `b` is 0 (at `a = 0` too); `db = dy y ln a`, 0 where `a` is 0 and `b`
//! is not below. Both summed over what was broadcast. Saves both operands, not `y`, which is as quickly computed.

use phalanx_kernels as kernels;
use phalanx_tensor::{Result as TensorResult, Scalar, Tensor};

use super::broadcasting::{Broadcasting, broadcasting};
use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// `self^exponent`, broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn pow(&self, exponent: &Var) -> Result<Var> {
        begins();
        let y = kernels::pow(self.tensor(), exponent.tensor())?;
        broadcasting(&[self, exponent], y, Pow)
    }

    /// `self^exponent`, in this dtype.
    ///
    /// # Errors
    /// If this is a bool, or an integer and the exponent is not an integer from 0 up.
    pub fn pow_scalar(&self, exponent: impl Into<Scalar>) -> Result<Var> {
        begins();
        let exponent = exponent.into();
        let y = kernels::pow_scalar(self.tensor(), exponent)?;
        elementwise(self, y, PowScalar { exponent: exponent.to_f64() })
    }

    /// `base^self`, in this dtype.
    ///
    /// # Errors
    /// If this is a bool, or an integer and the base is not.
    pub fn rpow_scalar(&self, base: impl Into<Scalar>) -> Result<Var> {
        begins();
        let base = base.into();
        let y = kernels::rpow_scalar(self.tensor(), base)?;
        elementwise(self, y, ScalarPow { base: base.to_f64() })
    }
}

struct Pow;

impl Broadcasting for Pow {
    const NAME: &'static str = "pow";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let kernel = if i == 0 { kernels::pow_backward_base } else { kernels::pow_backward_exponent };
        kernel(x[0].tensor(), x[1].tensor(), dy).map(Some)
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        if i == 0 { base_gradient(&x[0], &x[1], dy) } else { exponent_gradient(&x[0], &x[1], dy) }
    }
}

fn base_gradient(a: &Var, b: &Var, dy: &Var) -> Result<Var> {
    let flat = b.eq_scalar(0.0)?;
    // With the exponent 1 in the place of 0 nothing infinite is made there, to be multiplied by 0.
    let b = Var::full(1.0, b)?.where_(&flat, b)?;
    let dx = dy.mul(&a.pow(&b.sub_scalar(1.0)?)?.mul(&b)?)?;
    Var::full(0.0, &dx)?.where_(&flat, &dx)
}

fn exponent_gradient(a: &Var, b: &Var, dy: &Var) -> Result<Var> {
    // Where both hold; a false exponent test puts a 1 in the place of the base.
    let candidate = Var::full(1.0, a)?.where_(&b.lt_scalar(0.0)?, a)?;
    let flat = candidate.eq_scalar(0.0)?;
    let a = Var::full(1.0, a)?.where_(&flat, a)?;
    let dx = dy.mul(&a.pow(b)?.mul(&a.log()?)?)?;
    Var::full(0.0, &dx)?.where_(&flat, &dx)
}

struct PowScalar {
    exponent: f64,
}

impl Elementwise for PowScalar {
    const NAME: &'static str = "pow";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::pow_scalar_backward(x, dy, self.exponent)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        if self.exponent == 0.0 {
            return Var::full(0.0, dy);
        }
        dy.mul(&x.pow_scalar(self.exponent - 1.0)?.mul_scalar(self.exponent)?)
    }
}

struct ScalarPow {
    base: f64,
}

impl Elementwise for ScalarPow {
    const NAME: &'static str = "pow";
    const OF_OUTPUT: bool = true;

    fn fused(&self, y: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::rpow_scalar_backward(y, dy, self.base)
    }

    fn composed(&self, y: &Var, dy: &Var) -> Result<Var> {
        dy.mul(&y.mul_scalar(self.base.ln())?)
    }
}
