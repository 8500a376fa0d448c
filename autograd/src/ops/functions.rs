//! Elementwise functions of one tensor that are composed of other operations (`expm1`, `selu`, `prelu`), or whose
//! derivative is 0 or 1 almost everywhere (`round`, `sign`, `frac`), and `isnan`, `isinf` and `isfinite`.

use std::f64::consts::{FRAC_2_SQRT_PI, LN_2, LN_10};

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dims, Error, Tensor};

use super::elementwise::Formula;
use super::frame::{composed, floats, record_linear};
use crate::{Result, Var, begins, record_none};

// Functions of one value, elementwise, that PyTorch has and that need no kernel of their own: logarithms and powers to
// other bases, trigonometric and hyperbolic functions and their inverses, the bent and squashed lines that serve as
// activations.
//
// A line of the table states the function and its derivative, both of `x`. Saves `x`. At corners the derivative is
// PyTorch's.

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident: |$x:ident| $y:expr, slope |$at:ident| $slope:expr;)*) => {
        impl Var {$(
            $(#[$doc])*
            ///
            /// # Errors
            /// If the dtype is no floating-point one.
            pub fn $name(&self) -> Result<Var> {
                let function = Formula {
                    name: stringify!($name),
                    forward: |v| {
                        let $x = &v[0];
                        $y
                    },
                    gradient: |_, v, dy| {
                        let $at = &v[0];
                        dy.mul(&$slope?)
                    },
                };
                function.of(&[self])
            }
        )*}
    };
}

/// Of a constant, by a kernel.
macro_rules! kernel {
    ($name:ident, $x:expr) => {
        Ok(Var::new(kernels::$name($x.tensor())?))
    };
}

functions! {
    /// `2^x`.
    exp2: |x| kernel!(exp2, x), slope |x| x.exp2()?.mul_scalar(LN_2);
    /// The logarithm to base 2.
    log2: |x| kernel!(log2, x), slope |x| x.mul_scalar(LN_2)?.reciprocal();
    /// The logarithm to base 10.
    log10: |x| kernel!(log10, x), slope |x| x.mul_scalar(LN_10)?.reciprocal();
    /// The tangent.
    tan: |x| kernel!(tan, x), slope |x| x.tan()?.square()?.add_scalar(1.0);
    /// The angle in [-pi/2, pi/2] whose sine is `x`; NaN outside [-1, 1].
    asin: |x| kernel!(asin, x), slope |x| x.rsub_scalar(1.0)?.mul(&x.add_scalar(1.0)?)?.rsqrt();
    /// The angle in [0, pi] whose cosine is `x`; NaN outside [-1, 1].
    acos: |x| kernel!(acos, x), slope |x| x.rsub_scalar(1.0)?.mul(&x.add_scalar(1.0)?)?.rsqrt()?.neg();
    /// The angle in [-pi/2, pi/2] whose tangent is `x`.
    atan: |x| kernel!(atan, x), slope |x| x.square()?.add_scalar(1.0)?.reciprocal();
    /// The hyperbolic sine.
    sinh: |x| kernel!(sinh, x), slope |x| x.cosh();
    /// The hyperbolic cosine.
    cosh: |x| kernel!(cosh, x), slope |x| x.sinh();
    /// The inverse of the hyperbolic sine.
    asinh: |x| kernel!(asinh, x), slope |x| x.square()?.add_scalar(1.0)?.rsqrt();
    /// The inverse of the hyperbolic cosine, from 0 up; NaN below 1.
    acosh: |x| kernel!(acosh, x), slope |x| x.sub_scalar(1.0)?.mul(&x.add_scalar(1.0)?)?.rsqrt();
    /// The inverse of the hyperbolic tangent; NaN outside [-1, 1].
    atanh: |x| kernel!(atanh, x), slope |x| x.rsub_scalar(1.0)?.mul(&x.add_scalar(1.0)?)?.reciprocal();
    /// `1 - erf(x)`, accurate where that is small.
    erfc: |x| kernel!(erfc, x), slope |x| x.square()?.neg()?.exp()?.mul_scalar(-FRAC_2_SQRT_PI);
    /// `x - tanh(x)`.
    tanhshrink: |x| kernel!(tanhshrink, x), slope |x| x.tanh()?.square();
    /// `x / (1 + |x|)`.
    softsign: |x| x.div(&x.abs()?.add_scalar(1.0)?), slope |x| x.abs()?.add_scalar(1.0)?.square()?.reciprocal();
    /// `ln(sigmoid(x))`, safe for large negative values.
    logsigmoid: |x| x.neg()?.softplus(1.0, f64::INFINITY)?.neg(), slope |x| x.neg()?.sigmoid();
    /// `x tanh(ln(1 + e^x))`.
    mish: |x| x.mul(&gate(x)?), slope |x| {
        let gate = gate(x)?;
        let bend = gate.square()?.rsub_scalar(1.0)?.mul(&x.sigmoid()?)?;
        gate.add(&x.mul(&bend)?)
    };
    /// `(x + 3) / 6`, kept between 0 and 1. The derivative at -3 and 3 is 0, between them 1/6 in f32, as in PyTorch.
    hardsigmoid: |x| ramp(x), slope |x| between(x, f64::from(1.0f32 / 6.0), 0.0);
    /// `x hardsigmoid(x)`. The derivative at -3 is 0, at 3 it is 1.
    hardswish: |x| x.mul(&ramp(x)?), slope |x| {
        let bent = x.div_scalar(3.0)?.add_scalar(0.5)?;
        let low = bent.masked_fill(&x.le_scalar(-3.0)?, 0.0)?;
        low.masked_fill(&x.ge_scalar(3.0)?, 1.0)
    };
}

/// Of `mish`: the hyperbolic tangent of the softplus.
fn gate(x: &Var) -> Result<Var> {
    x.softplus(1.0, f64::INFINITY)?.tanh()
}

/// A line from 0 at -3 to 1 at 3.
fn ramp(x: &Var) -> Result<Var> {
    x.add_scalar(3.0)?.clamp(Some(0.0.into()), Some(6.0.into()))?.div_scalar(6.0)
}

/// One number strictly between -3 and 3, another elsewhere.
fn between(x: &Var, inside: f64, outside: f64) -> Result<Var> {
    Var::full(inside, x)?.masked_fill(&x.abs()?.ge_scalar(3.0)?, outside)
}

/// The scale of [`Var::selu`], and its `alpha`.
const SELU: (f64, f64) = (1.050_700_987_355_480_5, 1.673_263_242_354_377_2);

impl Var {
    /// `e^x - 1`, accurate near zero: [`Var::exp_m1`] by PyTorch's name.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn expm1(&self) -> Result<Var> {
        floats("expm1", &[self])?;
        self.exp_m1()
    }

    /// `ln(1 + x)`, accurate near zero: [`Var::ln_1p`] by PyTorch's name.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn log1p(&self) -> Result<Var> {
        floats("log1p", &[self])?;
        self.ln_1p()
    }

    /// `x` kept between two numbers. The derivative at either is 0.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or `min` is not below `max`.
    pub fn hardtanh(&self, min: f64, max: f64) -> Result<Var> {
        floats("hardtanh", &[self])?;
        if min.is_nan() || max.is_nan() || min > max {
            let why = format!("got bounds {min} and {max}, wanted the first no larger than the second");
            return Err(phalanx_tensor::Error::invalid("hardtanh", why).into());
        }
        self.clamp(Some(min.into()), Some(max.into()))
    }

    /// `x` kept between 0 and 6. The derivative at either is 0.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn relu6(&self) -> Result<Var> {
        floats("relu6", &[self])?;
        self.clamp(Some(0.0.into()), Some(6.0.into()))
    }

    /// `scale x` above 0, `scale alpha (e^x - 1)` below, with the two numbers that keep mean and variance of
    /// activations where they are (Klambauer et al. 2017).
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn selu(&self) -> Result<Var> {
        composed("selu", &[self], |v| v[0].elu(SELU.1)?.mul_scalar(SELU.0))
    }

    /// `x` above 0, `alpha (e^(x / alpha) - 1)` below: [`Var::elu`] with slope 1 at 0 whatever `alpha` is.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or `alpha` is 0.
    pub fn celu(&self, alpha: f64) -> Result<Var> {
        if alpha == 0.0 || alpha.is_nan() {
            let why = format!("got alpha {alpha}, wanted a number other than 0");
            return Err(phalanx_tensor::Error::invalid("celu", why).into());
        }
        composed("celu", &[self], |v| {
            let below = v[0].clamp(None, Some(0.0.into()))?.div_scalar(alpha)?.exp_m1()?.mul_scalar(alpha)?;
            // The clamped side's derivative at 0 is 0, so the other side has it there.
            v[0].where_(&v[0].ge_scalar(0.0)?, &below)
        })
    }

    /// One half of `dim` times the sigmoid of the other.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, there is no such dimension, or its size is odd.
    pub fn glu(&self, dim: impl phalanx_tensor::Dim) -> Result<Var> {
        let dim = dim.resolve(self.rank(), "glu")?;
        let size = self.shape()[dim];
        if !size.is_multiple_of(2) {
            let got = format!("{:?}", self.shape());
            let wanted = format!("an even size of dimension {dim}, which is halved");
            return Err(phalanx_tensor::Error::shape("glu", got, wanted).into());
        }
        composed("glu", &[self], |v| {
            let half = |at: usize| v[0].narrow(dim, at * (size / 2), size / 2);
            half(0)?.mul(&half(1)?.sigmoid()?)
        })
    }

    /// `x` above 0, `weight x` elsewhere; the weight has one element, or one for each channel (dimension 1).
    ///
    /// # Errors
    /// If the dtype is no floating-point one, dtypes or devices differ, or the weight has another size.
    pub fn prelu(&self, weight: &Var) -> Result<Var> {
        let channels = if self.rank() > 1 { self.shape()[1] } else { 1 };
        if weight.rank() > 1 || ![1, channels].contains(&weight.numel()) {
            let got = format!("a weight of shape {:?} for {:?}", weight.shape(), self.shape());
            let wanted = format!("[1] or [{channels}], one a channel (dimension 1)");
            return Err(phalanx_tensor::Error::shape("prelu", got, wanted).into());
        }
        floats("prelu", &[self, weight])?;
        let mut shape = vec![1; self.rank().min(2)];
        shape.last_mut().into_iter().for_each(|size| *size = weight.numel());
        shape.extend(std::iter::repeat_n(1, self.rank().saturating_sub(2)));
        let function = Formula {
            name: "prelu",
            forward: |v| v[0].where_(&v[0].gt_scalar(0.0)?, &v[0].mul(&v[1])?),
            gradient: |i, v, dy| {
                let (x, weight) = (&v[0], &v[1]);
                let above = x.gt_scalar(0.0)?;
                match i {
                    0 => dy.mul(&Var::full(1.0, dy)?.where_(&above, weight)?),
                    _ => dy.mul(&x.masked_fill(&above, 0.0)?),
                }
            },
        };
        function.of(&[self, &weight.reshape_to(&shape)?])
    }
}

// Whole numbers near a value, its sign and its fraction, and what kind of number it is.
//
// Derivative: 0, but of the fraction 1. Saves nothing.

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
