//! `+`, `-`, `*`, `/` and unary `-` for [`Var`]s, references to them, and numbers on either side.
//!
//! An operation can fail, so each gives a [`Result`], which may be the next one's operand beside a `Var`: then one
//! `?` for the whole is enough.
//!
//! ```
//! use phalanx_autograd::{Var, tensor::Device};
//! let (x, y) = (Var::scalar(3.0, Device::CPU)?, Var::scalar(4.0, Device::CPU)?);
//! assert_eq!((&x * &y + &x)?.item::<f64>()?, 15.0);
//! assert_eq!((&x - 2.0 * &y)?.item::<f64>()?, -5.0);
//! assert_eq!((-&x)?.item::<f64>()?, -3.0);
//! # Ok::<(), phalanx_autograd::Error>(())
//! ```

use std::ops::{Add, Div, Mul, Neg, Sub};

use phalanx_tensor::Scalar;

use crate::{Result, Var};

/// What may stand on the right of an operator: a [`Var`], a reference to one, the result of another operation, or a
/// number.
pub trait Operand {
    /// Calls whichever function takes this.
    ///
    /// # Errors
    /// Whatever the function returns, or the error that this is.
    fn join(
        self,
        left: &Var,
        tensors: fn(&Var, &Var) -> Result<Var>,
        number: fn(&Var, Scalar) -> Result<Var>,
    ) -> Result<Var>;
}

impl Operand for &Var {
    fn join(
        self,
        left: &Var,
        tensors: fn(&Var, &Var) -> Result<Var>,
        _number: fn(&Var, Scalar) -> Result<Var>,
    ) -> Result<Var> {
        tensors(left, self)
    }
}

impl Operand for Var {
    fn join(
        self,
        left: &Var,
        tensors: fn(&Var, &Var) -> Result<Var>,
        _number: fn(&Var, Scalar) -> Result<Var>,
    ) -> Result<Var> {
        tensors(left, &self)
    }
}

impl Operand for Result<Var> {
    fn join(
        self,
        left: &Var,
        tensors: fn(&Var, &Var) -> Result<Var>,
        _number: fn(&Var, Scalar) -> Result<Var>,
    ) -> Result<Var> {
        tensors(left, &self?)
    }
}

macro_rules! operator {
    ($trait:ident $method:ident $scalar:ident) => {
        impl<T: Operand> $trait<T> for &Var {
            type Output = Result<Var>;

            fn $method(self, right: T) -> Result<Var> {
                right.join(self, Var::$method, |left, number| left.$scalar(number))
            }
        }

        impl<T: Operand> $trait<T> for Var {
            type Output = Result<Var>;

            fn $method(self, right: T) -> Result<Var> {
                $trait::$method(&self, right)
            }
        }

        operator!(@result $trait $method Var);
        operator!(@result $trait $method &Var);
    };
    (@result $trait:ident $method:ident $right:ty) => {
        impl $trait<$right> for Result<Var> {
            type Output = Result<Var>;

            fn $method(self, right: $right) -> Result<Var> {
                $trait::$method(&self?, right)
            }
        }
    };
    (@left $number:ty; $trait:ident $method:ident $scalar:ident $right:ty) => {
        impl $trait<$right> for $number {
            type Output = Result<Var>;

            fn $method(self, right: $right) -> Result<Var> {
                right.$scalar(self)
            }
        }
    };
    (@left $number:ty; $trait:ident $method:ident $scalar:ident) => {
        operator!(@left $number; $trait $method $scalar Var);
        operator!(@left $number; $trait $method $scalar &Var);
    };
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Operand for $number {
            fn join(
                self,
                left: &Var,
                _tensors: fn(&Var, &Var) -> Result<Var>,
                number: fn(&Var, Scalar) -> Result<Var>,
            ) -> Result<Var> {
                number(left, self.into())
            }
        }

        operator!(@left $number; Add add add_scalar);
        operator!(@left $number; Sub sub rsub_scalar);
        operator!(@left $number; Mul mul mul_scalar);
        operator!(@left $number; Div div rdiv_scalar);
    )*};
}

operator!(Add add add_scalar);
operator!(Sub sub sub_scalar);
operator!(Mul mul mul_scalar);
operator!(Div div div_scalar);
numbers!(f64, f32, i64, i32);

impl Neg for &Var {
    type Output = Result<Var>;

    fn neg(self) -> Result<Var> {
        Var::neg(self)
    }
}

impl Neg for Var {
    type Output = Result<Var>;

    fn neg(self) -> Result<Var> {
        Var::neg(&self)
    }
}
