//! Whole numbers near a value, its sign and its fraction, and what kind of number it is.
//!
//! Derivative: 0, but of the fraction 1. Saves nothing.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dims, Error, Tensor};

use super::linear_map::record_linear;
use crate::{Result, Var, begins, record_none};

macro_rules! steps {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        impl Var {$(
            $(#[$doc])*
            /// The derivative is 0.
            ///
            /// # Errors
            /// If the dtype is bool.
            pub fn $name(&self) -> Result<Var> {
                stepped(stringify!($name), self, kernels::$name(self.tensor())?)
            }
        )*}
    };
}

steps! {
    /// The largest whole number not above `x`; integers as they are.
    floor;
    /// The smallest whole number not below `x`; integers as they are.
    ceil;
    /// The nearest whole number, of two the even one; integers as they are.
    round;
    /// `x` without its fraction; integers as they are.
    trunc;
    /// -1, 0 or 1, as `x` is; 0 of a NaN.
    sign;
}

impl Var {
    /// `x` less [`Var::trunc`] of it, which has the sign of `x`. The derivative is 1.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn frac(&self) -> Result<Var> {
        begins();
        record_linear("frac", self, kernels::frac(self.tensor())?, |dy| Ok(dy.clone()))
    }

    /// Whether each element is no number; integers and bools are. A bool.
    ///
    /// # Errors
    /// If the result cannot be allocated.
    pub fn isnan(&self) -> Result<Var> {
        begins();
        record_none("isnan", &[self], kernels::ne(self.tensor(), self.tensor())?)
    }

    /// Whether each element is an infinity, of either sign. A bool.
    ///
    /// # Errors
    /// If the result cannot be allocated.
    pub fn isinf(&self) -> Result<Var> {
        begins();
        if !self.dtype().is_float() {
            return record_none("isinf", &[self], kernels::ne(self.tensor(), self.tensor())?);
        }
        let y = kernels::eq_scalar(&kernels::abs(self.tensor())?, f64::INFINITY.into())?;
        record_none("isinf", &[self], y)
    }

    /// Whether each element is a number and no infinity. A bool.
    ///
    /// # Errors
    /// If the result cannot be allocated.
    pub fn isfinite(&self) -> Result<Var> {
        begins();
        if !self.dtype().is_float() {
            return record_none("isfinite", &[self], kernels::eq(self.tensor(), self.tensor())?);
        }
        let y = kernels::lt_scalar(&kernels::abs(self.tensor())?, f64::INFINITY.into())?;
        record_none("isfinite", &[self], y)
    }
}

/// Records `y`, which is constant between steps of `x`.
fn stepped(name: &'static str, x: &Var, y: Tensor) -> Result<Var> {
    if x.dtype() == DType::Bool {
        return Err(Error::dtype(name, x.dtype(), "a number dtype").into());
    }
    let shape = Dims::from_slice(x.shape());
    record_linear(name, x, y, move |dy| Var::full(0.0, dy)?.broadcast_to(&shape))
}
