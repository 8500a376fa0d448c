//! Sums, differences, products and quotients, broadcast or with a number: as methods and as operators.

use std::ops::{Add, Div, Mul, Neg, Sub};
use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::{Dims, Result as TensorResult, Scalar, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{
    Backward, Cx, Grads, Rematerialized, Result, SaveContext, SavedVariable, Var, begins, grads1, grads2,
    record,
};

/// `y = a + b`, broadcast, and `y = a + s` with a number.
///
/// Derivative: `da = dy`, `db = dy`, each summed over what was broadcast. Nothing is saved.
impl Var {
    /// `self + other`, broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn add(&self, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::add(self.tensor(), other.tensor())?;
        record("add", &[self, other], y, |_: &SaveContext<'_>| Ok(AddBackward))
    }

    /// `self + number`, in this dtype.
    ///
    /// # Errors
    /// If this is a bool, or an integer and the number is not.
    pub fn add_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
        begins();
        let y = kernels::add_scalar(self.tensor(), number.into())?;
        record("add", &[self], y, |_: &SaveContext<'_>| Ok(AddScalar))
    }
}

struct AddBackward;

impl Backward for AddBackward {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let grad = |i: usize| cx.needs(i).then(|| cx.sum_to_input(i, cx.dy().clone())).transpose();
        grads2(grad(0)?, grad(1)?)
    }

    fn backward_once(self, cx: &mut Cx<'_>) -> Result<Grads> {
        if cx.needs(0) && cx.needs(1) {
            let db = cx.sum_to_input(1, cx.dy().clone())?;
            let dy = cx.take_dy();
            return grads2(Some(cx.sum_to_input(0, dy)?), Some(db));
        }
        let (i, dy) = (usize::from(cx.needs(1)), cx.take_dy());
        let mut grads = [None, None];
        grads[i] = Some(cx.sum_to_input(i, dy)?);
        let [da, db] = grads;
        grads2(da, db)
    }
}

struct AddScalar;

impl Backward for AddScalar {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().clone())
    }

    fn backward_once(self, cx: &mut Cx<'_>) -> Result<Grads> {
        grads1(cx.take_dy())
    }
}

/// `y = a - b`, broadcast, and `y = a - s`, `y = s - a` with a number.
///
/// Derivative: `da = dy`, `db = -dy`, each summed over what was broadcast. Nothing is saved but the shapes.
impl Var {
    /// `self - other`, broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn sub(&self, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::sub(self.tensor(), other.tensor())?;
        let shapes = || [Dims::from_slice(self.shape()), Dims::from_slice(other.shape())];
        record("sub", &[self, other], y, |_: &SaveContext<'_>| Ok(SubBackward { shapes: shapes() }))
    }

    /// `self - number`, in this dtype.
    ///
    /// # Errors
    /// If this is a bool, or an integer and the number is not.
    pub fn sub_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
        begins();
        let y = kernels::sub_scalar(self.tensor(), number.into())?;
        record("sub", &[self], y, |_: &SaveContext<'_>| Ok(SubScalar))
    }

    /// `number - self`, in this dtype.
    ///
    /// # Errors
    /// If this is a bool, or an integer and the number is not.
    pub fn rsub_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
        begins();
        let y = kernels::rsub_scalar(self.tensor(), number.into())?;
        record("sub", &[self], y, |_: &SaveContext<'_>| Ok(ScalarSub))
    }
}

struct SubBackward {
    shapes: [Dims; 2],
}

impl Backward for SubBackward {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let da = cx.needs(0).then(|| cx.dy().sum_to(&self.shapes[0])).transpose()?;
        let db = cx.needs(1).then(|| cx.dy().sum_to(&self.shapes[1])?.neg()).transpose()?;
        grads2(da, db)
    }
}

struct SubScalar;

impl Backward for SubScalar {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().clone())
    }
}

struct ScalarSub;

impl Backward for ScalarSub {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().neg()?)
    }
}

/// `y = a b`, broadcast, and `y = a s` with a number.
///
/// Derivative: `da = dy b`, `db = dy a`, each summed over what was broadcast. Each operand is saved for the
/// other's gradient, if that is wanted. Where both are, and one is rematerialized, so is `y` ([`Rematerialized`]).
impl Var {
    /// `self * other`, broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn mul(&self, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::mul(self.tensor(), other.tensor())?;
        record("mul", &[self, other], y, |s: &SaveContext<'_>| {
            let mut operands = [None, None];
            for (i, operand) in operands.iter_mut().enumerate().filter(|(i, _)| s.needs(1 - i)) {
                *operand = Some(s.input(i)?);
            }
            let saved = operands.iter().flatten();
            let remakes = saved.clone().count() == 2 && saved.clone().any(SavedVariable::is_rematerialized);
            let rematerialized =
                remakes.then(|| s.rematerialized_of_rematerialized([0, 1], |x| kernels::mul(&x[0], &x[1])));
            Ok(MulBackward { operands, rematerialized: rematerialized.flatten() })
        })
    }

    /// `self * number`, in this dtype.
    ///
    /// # Errors
    /// If this is a bool, or an integer and the number is not.
    pub fn mul_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
        begins();
        let number = number.into();
        let y = kernels::mul_scalar(self.tensor(), number)?;
        record("mul", &[self], y, |_: &SaveContext<'_>| Ok(MulScalar { number }))
    }
}

struct MulBackward {
    operands: [Option<SavedVariable>; 2],
    rematerialized: Option<Arc<Rematerialized>>,
}

impl Backward for MulBackward {
    const REMATERIALIZES: bool = true;

    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let grad = |i: usize| -> Result<Option<Var>> {
            let Some(other) = self.operands[1 - i].as_ref().filter(|_| cx.needs(i)) else { return Ok(None) };
            Ok(Some(cx.sum_to_input(i, cx.dy().mul(&cx.get(other)?)?)?))
        };
        grads2(grad(0)?, grad(1)?)
    }

    fn backward_once(self, cx: &mut Cx<'_>) -> Result<Grads> {
        let [a, b] = self.operands;
        let mut grads = [None, None];
        for (i, other) in [b, a].into_iter().enumerate() {
            let Some(other) = other.filter(|_| cx.needs(i)) else { continue };
            let other = cx.take(other)?;
            let is_last = i == 1 || !cx.needs(1);
            let full = match is_last {
                true => kernels::mul_over(&other, cx.take_dy().into_tensor())?,
                false => kernels::mul(cx.dy().tensor(), &other)?,
            };
            grads[i] = Some(cx.sum_to_input(i, Var::new(full))?);
        }
        let [da, db] = grads;
        grads2(da, db)
    }

    fn rematerialized(&self, _: usize) -> Option<&Arc<Rematerialized>> {
        self.rematerialized.as_ref()
    }

    fn release(&mut self, later: &dyn Fn(usize) -> bool) {
        for i in 0..2 {
            self.operands[1 - i].take_if(|_| !later(i));
        }
    }
}

struct MulScalar {
    number: Scalar,
}

impl Backward for MulScalar {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().mul_scalar(self.number)?)
    }
}

/// `y = a / b`, broadcast, and `y = a / s`, `y = s / a` with a number.
///
/// Derivative: `da = dy / b`, `db = -dy a / b²`, each summed over what was broadcast. Saves `b`, and `a` if `b`
/// needs a gradient. Quotients of integers are f32.
impl Var {
    /// `self / other`, broadcast, of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn div(&self, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::div(self.tensor(), other.tensor())?;
        record("div", &[self, other], y, |s: &SaveContext<'_>| {
            let a = s.needs(1).then(|| s.input(0)).transpose()?;
            Ok(DivBackward { a, b: s.input(1)? })
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
        record("div", &[self], y, |_: &SaveContext<'_>| Ok(DivScalar { number }))
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

struct DivBackward {
    a: Option<SavedVariable>,
    b: SavedVariable,
}

impl Backward for DivBackward {
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

// `+`, `-`, `*`, `/` and unary `-` for [`Var`]s, references to them, and numbers on either side.
//
// An operation can fail, so each gives a [`Result`], which may be the next one's operand beside a `Var`: then one
// `?` for the whole is enough.
//
// ```
// use phalanx_autograd::{Var, tensor::Device};
// let (x, y) = (Var::scalar(3.0, Device::CPU)?, Var::scalar(4.0, Device::CPU)?);
// assert_eq!((&x * &y + &x)?.item::<f64>()?, 15.0);
// assert_eq!((&x - 2.0 * &y)?.item::<f64>()?, -5.0);
// assert_eq!((-&x)?.item::<f64>()?, -3.0);
// # Ok::<(), phalanx_autograd::Error>(())
// ```

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
