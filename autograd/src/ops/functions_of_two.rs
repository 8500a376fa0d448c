//! Elementwise functions of two or three broadcast tensors: `pow`, `maximum`, `minimum`, `where_`, `atan2`, `hypot`,
//! `lerp`, `addcmul`, ..

use phalanx_kernels as kernels;
use phalanx_tensor::{Device, Dims, Error, Result as TensorResult, Scalar, Tensor};

use super::elementwise::{Broadcasting, Elementwise, Formula, broadcasting, elementwise};
use super::frame::{broadcasts, composed, named, same};
use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, grads2, record};

/// `y = a^b`, elementwise and broadcast, also with a number on either side.
///
/// Derivative: `da = dy b a^(b-1)`, 0 where `b` is 0 (at `a = 0` too); `db = dy y ln a`, 0 where `a` is 0 and `b`
/// is not below. Both summed over what was broadcast. Saves both operands, not `y`, which is as quickly computed.
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

/// `y = max(a, b)` and `y = min(a, b)`, elementwise and broadcast; NaN where either is.
///
/// Derivative: `dy` for the element that was taken, half of it for each at a tie, summed over what was broadcast.
/// Saves both.
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

/// `y = a` where a condition holds, else `b`; all three broadcast.
///
/// Derivative: `da = dy` where it holds, else 0; `db` the other way round; each summed over what was broadcast.
/// Saves the condition.
impl Var {
    /// This where `condition` (a bool) holds, else `other`; all three broadcast.
    ///
    /// # Errors
    /// If the shapes do not broadcast, dtypes or devices differ, or the condition is no bool.
    pub fn where_(&self, condition: &Var, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::where_(condition.tensor(), self.tensor(), other.tensor())?;
        record("where", &[self, other, condition], y, |s: &SaveContext<'_>| {
            let shapes = [Dims::from_slice(self.shape()), Dims::from_slice(other.shape())];
            Ok(Where { shapes, condition: s.input(2)? })
        })
    }

    /// This with `value` wherever `mask` (a bool, which broadcasts to this shape) is true. The gradient is 0 there.
    ///
    /// # Errors
    /// If the mask does not broadcast to this shape, is no bool, or is on another device, or an integer dtype cannot hold
    /// the value.
    pub fn masked_fill(&self, mask: &Var, value: impl Into<Scalar>) -> Result<Var> {
        begins();
        let y = kernels::masked_fill(self.tensor(), mask.tensor(), value.into())?;
        record("masked_fill", &[self, mask], y, |s: &SaveContext<'_>| Ok(MaskedFill { mask: s.input(1)? }))
    }

    /// `value` everywhere, with the shape, dtype and device of `like`, without memory for each element.
    pub(crate) fn full(value: f64, like: &Var) -> Result<Var> {
        let one = kernels::full(&[], value, like.dtype(), like.device())?;
        Ok(Var::new(one.broadcast_to(like.shape())?))
    }
}

struct Where {
    shapes: [Dims; 2],
    condition: SavedVariable,
}

impl Backward for Where {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (dy, condition) = (cx.dy(), cx.get(&self.condition)?);
        let zero = Var::full(0.0, dy)?;
        let da = || dy.where_(&condition, &zero)?.sum_to(&self.shapes[0]);
        let db = || zero.where_(&condition, dy)?.sum_to(&self.shapes[1]);
        grads2(cx.needs(0).then(da).transpose()?, cx.needs(1).then(db).transpose()?)
    }
}

struct MaskedFill {
    mask: SavedVariable,
}

impl Backward for MaskedFill {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        crate::grads1(cx.dy().masked_fill(&cx.get(&self.mask)?, 0.0)?)
    }
}

// Functions of two or three values, elementwise and broadcast, that need no vectors of their own: angles and distances,
// sums of logarithms, quotients and their remainders, ways between two values.
//
// Derivatives are stated with each; the inputs are saved. Integers have none.

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident($a:ident, $b:ident, $dy:ident): [$da:expr, $db:expr];)*) => {
        impl Var {$(
            $(#[$doc])*
            ///
            /// # Errors
            /// If the dtype is no floating-point one, dtypes or devices differ, or the shapes do not broadcast.
            pub fn $name(&self, other: &Var) -> Result<Var> {
                let function = Formula {
                    name: stringify!($name),
                    forward: |v| Ok(Var::new(kernels::$name(v[0].tensor(), v[1].tensor())?)),
                    gradient: |i, v, $dy| {
                        let ($a, $b) = (&v[0], &v[1]);
                        if i == 0 { $da } else { $db }
                    },
                };
                function.of(&[self, other])
            }
        )*}
    };
}

functions! {
    /// The angle of the point `(other, self)`, in [-pi, pi]: that of `self / other`, with the signs of both. The
    /// derivative at the origin is NaN.
    atan2(y, x, dy): [turned(x, y, x, dy), turned(y, y, x, dy)?.neg()];
    /// `sqrt(self² + other²)`, without overflow on the way. The derivative at the origin is NaN.
    hypot(a, b, dy): [dy.mul(&a.div(&a.hypot(b)?)?), dy.mul(&b.div(&a.hypot(b)?)?)];
    /// `ln(e^self + e^other)`, without overflow on the way.
    logaddexp(a, b, dy): [dy.mul(&a.sub(b)?.sigmoid()?), dy.mul(&b.sub(a)?.sigmoid()?)];
    /// `self ln(other)`, 0 where `self` is 0 and `other` is no NaN.
    xlogy(a, b, dy): [
        dy.xlogy(b)?.masked_fill(&a.eq_scalar(0.0)?.logical_and(&b.le_scalar(0.0)?)?, 0.0),
        dy.mul(&a.div(b)?)
    ];
}

/// `dy part / (y² + x²)`, without overflow on the way.
fn turned(part: &Var, y: &Var, x: &Var, dy: &Var) -> Result<Var> {
    let distance = y.hypot(x)?;
    dy.mul(&part.div(&distance)?.div(&distance)?)
}

macro_rules! quotients {
    ($($(#[$doc:meta])* $name:ident $name_scalar:ident($a:ident, $b:ident, $dy:ident): [$da:expr, $db:expr];)*) => {
        impl Var {$(
            $(#[$doc])*
            ///
            /// Integers are looked through for a divisor of 0, for which the host waits on a GPU.
            ///
            /// # Errors
            /// If the dtype is bool, dtypes or devices differ, the shapes do not broadcast, or an integer divisor is 0.
            pub fn $name(&self, other: &Var) -> Result<Var> {
                if !self.dtype().is_float() {
                    same(stringify!($name), &[self, other])?;
                    no_zero(stringify!($name), other.tensor())?;
                    return Ok(Var::new(kernels::$name(self.tensor(), other.tensor())?));
                }
                let function = Formula {
                    name: stringify!($name),
                    forward: |v| Ok(Var::new(kernels::$name(v[0].tensor(), v[1].tensor())?)),
                    gradient: |i, v, $dy| {
                        let ($a, $b) = (&v[0], &v[1]);
                        if i == 0 { $da } else { $db }
                    },
                };
                function.of(&[self, other])
            }

            #[doc = concat!("[`Var::", stringify!($name), "`] with a number, rounded to this dtype.")]
            ///
            /// # Errors
            /// If the dtype is bool, or an integer one and the number is 0 or no integer.
            pub fn $name_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
                self.$name(&number_like(stringify!($name), number.into(), self)?)
            }
        )*}
    };
}

quotients! {
    /// The remainder of `self / other`, with the sign of `self`, as in C (Python's `%` is
    /// [`Var::remainder`]). The derivative by `self` is 1, that by `other` minus the whole quotient.
    fmod fmod_scalar(a, b, dy): [Ok(dy.clone()), less(kernels::trunc_divide, a, b, dy)];
    /// The remainder of `self / other`, with the sign of `other`, as Python's `%`. The derivative by `self`
    /// is 1, that by `other` minus the whole quotient.
    remainder remainder_scalar(a, b, dy): [Ok(dy.clone()), less(kernels::floor_divide, a, b, dy)];
    /// The largest whole number not above `self / other`, as Python's `//`. The derivative is 0.
    floor_divide floor_divide_scalar(_a, _b, dy): [Var::full(0.0, dy), Var::full(0.0, dy)];
}

/// Minus `dy` times a whole quotient, which is a constant.
fn less(quotient: fn(&Tensor, &Tensor) -> TensorResult<Tensor>, a: &Var, b: &Var, dy: &Var) -> Result<Var> {
    dy.mul(&Var::new(quotient(a.tensor(), b.tensor())?))?.neg()
}

/// An error if an integer divisor is 0.
fn no_zero(name: &'static str, divisor: &Tensor) -> Result<()> {
    if matches!(divisor.device(), Device::Meta(_)) || divisor.dtype() == phalanx_tensor::DType::Bool {
        return Ok(());
    }
    let zeros = kernels::eq_scalar(divisor, 0.into())?;
    let all: Vec<usize> = (0..zeros.rank()).collect();
    match kernels::sum(&zeros, &all, false)?.item::<i64>()? {
        0 => Ok(()),
        n => Err(Error::invalid(name, format!("{n} of the integer divisors are 0")).into()),
    }
}

/// A number as a tensor without dimensions, of `like`'s dtype and device.
pub(super) fn number_like(name: &'static str, number: Scalar, like: &Var) -> Result<Var> {
    let one = match (number, like.dtype().is_float()) {
        (Scalar::Int(x), false) => Tensor::scalar(x, Device::CPU)?,
        (Scalar::Float(x), false) => {
            let why = format!("got the number {x} for a tensor of {}, wanted an integer", like.dtype());
            return Err(Error::invalid(name, why).into());
        }
        (number, true) => Tensor::scalar(number.to_f64(), Device::CPU)?,
    };
    let one = kernels::cast(&one, like.dtype())?;
    match like.device() {
        Device::Meta(_) => Ok(Var::new(Tensor::empty(&[], like.dtype(), like.device())?)),
        device => Ok(Var::new(one.to_device(device, false)?)),
    }
}

impl Var {
    /// `self + weight (end - self)`, all three broadcast.
    ///
    /// Derivative: `1 - weight` by this, `weight` by the end, `end - self` by the weight.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, dtypes or devices differ, or the shapes do not broadcast.
    pub fn lerp(&self, end: &Var, weight: &Var) -> Result<Var> {
        let function = Formula {
            name: "lerp",
            forward: |v| Ok(Var::new(kernels::lerp(v[0].tensor(), v[1].tensor(), v[2].tensor())?)),
            gradient: |i, v, dy| match i {
                0 => dy.mul(&v[2].rsub_scalar(1.0)?),
                1 => dy.mul(&v[2]),
                _ => dy.mul(&v[1].sub(&v[0])?),
            },
        };
        function.of(&[self, end, weight])
    }

    /// [`Var::lerp`] with a number for weight.
    ///
    /// # Errors
    /// As [`Var::lerp`].
    pub fn lerp_scalar(&self, end: &Var, weight: f64) -> Result<Var> {
        self.lerp(end, &number_like("lerp", weight.into(), self)?)
    }

    /// `self + value a b`, all three broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If dtypes or devices differ, the shapes do not broadcast, the dtype is bool, or integers meet a value that is none.
    pub fn addcmul(&self, a: &Var, b: &Var, value: impl Into<Scalar>) -> Result<Var> {
        let (name, value) = ("addcmul", value.into());
        same(name, &[self, a, b])?;
        broadcasts(name, &[self, a, b])?;
        if self.dtype().is_float() {
            return composed(name, &[self, a, b], |v| v[0].add(&v[1].mul(&v[2])?.mul_scalar(value)?));
        }
        named(name, a.mul(b).and_then(|product| self.add(&product.mul_scalar(value)?)))
    }

    /// `self + value a / b`, all three broadcast.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, dtypes or devices differ, or the shapes do not broadcast.
    pub fn addcdiv(&self, a: &Var, b: &Var, value: f64) -> Result<Var> {
        broadcasts("addcdiv", &[self, a, b])?;
        composed("addcdiv", &[self, a, b], |v| v[0].add(&v[1].div(&v[2])?.mul_scalar(value)?))
    }

    /// Every element kept between those of two tensors, all three broadcast: `min(max(x, min), max)`. An absent bound
    /// does not bind.
    ///
    /// Derivative: `dy` by `x` strictly between the bounds, by a bound where it was taken; 0 on a bound.
    ///
    /// # Errors
    /// If both bounds are absent, dtypes or devices differ, the shapes do not broadcast, or the dtype is bool.
    pub fn clamp_tensor(&self, min: Option<&Var>, max: Option<&Var>) -> Result<Var> {
        const NAME: &str = "clamp_tensor";
        let inputs: Vec<&Var> = [Some(self), min, max].into_iter().flatten().collect();
        same(NAME, &inputs)?;
        broadcasts(NAME, &inputs)?;
        let forward: fn(&[Var]) -> Result<Var> = match (min, max) {
            (Some(_), Some(_)) => |v| v[0].maximum(&v[1])?.minimum(&v[2]),
            (Some(_), None) => |v| v[0].maximum(&v[1]),
            (None, Some(_)) => |v| v[0].minimum(&v[1]),
            (None, None) => {
                return Err(Error::invalid(NAME, "got neither a lower nor an upper bound").into());
            }
        };
        if !self.dtype().is_float() {
            let inputs: Vec<Var> = inputs.into_iter().cloned().collect();
            return named(NAME, forward(&inputs));
        }
        let gradient: fn(usize, &[Var], &Var) -> Result<Var> = match (min, max) {
            (Some(_), Some(_)) => |i, v, dy| {
                let (x, min, max) = (&v[0], &v[1], &v[2]);
                match i {
                    0 => passed(dy, &x.gt(min)?.logical_and(&x.lt(max)?)?),
                    1 => passed(dy, &x.lt(min)?.logical_and(&min.lt(max)?)?),
                    _ => passed(dy, &x.gt(max)?.logical_or(&max.lt(min)?)?),
                }
            },
            (Some(_), None) => |i, v, dy| passed(dy, &if i == 0 { v[0].gt(&v[1]) } else { v[0].lt(&v[1]) }?),
            _ => |i, v, dy| passed(dy, &if i == 0 { v[0].lt(&v[1]) } else { v[0].gt(&v[1]) }?),
        };
        Formula { name: NAME, forward, gradient }.of(&inputs)
    }
}

/// `dy` where a condition holds, else 0.
fn passed(dy: &Var, condition: &Var) -> Result<Var> {
    dy.where_(condition, &Var::full(0.0, dy)?)
}
