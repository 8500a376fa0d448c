//! Functions of one value, elementwise, that have a kernel: first those without parameters, as a table, then the others.
//!
//! Each has two derivatives: one by a kernel in one pass, and one of differentiable operations for second derivatives. Both
//! are made of the input or of the output, whichever is saved.

use std::sync::Arc;

use phalanx_kernels::{self as kernels, Gelu};
use phalanx_tensor::{Result as TensorResult, Scalar, Tensor};

use super::elementwise::{Elementwise, ElementwiseNode, elementwise, elementwise_made};
use crate::{
    Backward, Cx, Grads, Rematerialized, Result, SaveContext, SavedVariable, Var, begins, grads1, grads2,
    is_recording, record,
};

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident $Function:ident of $kind:ident, saves $saves:ident $saved:ident, $dy:ident:
        $fused:expr, $composed:expr;)*) => {
        impl Var {$(
            $(#[$doc])*
            ///
            /// # Errors
            #[doc = functions!(@refuses $kind)]
            pub fn $name(&self) -> Result<Var> {
                begins();
                elementwise(self, kernels::$name(self.tensor())?, $Function)
            }
        )*}

        $(
            struct $Function;

            impl Elementwise for $Function {
                const NAME: &'static str = stringify!($name);
                const OF_OUTPUT: bool = functions!(@of_output $saves);

                fn fused(&self, $saved: &Tensor, $dy: &Tensor) -> TensorResult<Tensor> {
                    $fused
                }

                fn composed(&self, $saved: &Var, $dy: &Var) -> Result<Var> {
                    $composed
                }
            }
        )*
    };
    (@of_output input) => { false };
    (@of_output output) => { true };
    (@refuses numbers) => { "If the dtype is bool." };
    (@refuses floats) => { "If the dtype is no floating-point one." };
}

// Name, type of the derivative, dtypes, what is saved; the kernel's derivative, the differentiable one.
functions! {
    /// `y = |x|`: the magnitude. Derivative: `dx = dy sign(x)`, made of x. At 0 it is 0.
    abs Abs of numbers, saves input x, dy:
        kernels::abs_backward(x, dy), signed(x, dy);
    /// `y = x²`: the square; integers wrap. Derivative: `dx = 2 x dy`, made of x.
    square Square of numbers, saves input x, dy:
        kernels::square_backward(x, dy), dy.mul(x)?.mul_scalar(2.0);
    /// `y = sqrt(x)`: the square root; NaN below zero. Derivative: `dx = dy / (2 y)`, made of y.
    sqrt Sqrt of floats, saves output y, dy:
        kernels::sqrt_backward(y, dy), dy.div(&y.mul_scalar(2.0)?);
    /// `y = 1 / sqrt(x)`: the inverse of the square root. Derivative: `dx = -dy y³ / 2`, made of y.
    rsqrt Rsqrt of floats, saves output y, dy:
        kernels::rsqrt_backward(y, dy), dy.mul(&y.pow_scalar(3.0)?.mul_scalar(-0.5)?);
    /// `y = 1 / x`: the inverse. Derivative: `dx = -dy y²`, made of y.
    reciprocal Reciprocal of floats, saves output y, dy:
        kernels::reciprocal_backward(y, dy), dy.mul(&y.square()?)?.neg();
    /// `y = e^x`: the exponential. Derivative: `dx = dy y`, made of y.
    exp Exp of floats, saves output y, dy:
        kernels::mul(y, dy), dy.mul(y);
    /// `y = e^x - 1`: the exponential less one, accurate near zero. Derivative: `dx = dy (y + 1)`, made of y.
    exp_m1 ExpM1 of floats, saves output y, dy:
        kernels::mul(dy, &kernels::add_scalar(y, 1.0.into())?), dy.mul(&y.add_scalar(1.0)?);
    /// `y = ln x`: the natural logarithm; NaN below zero. Derivative: `dx = dy / x`, made of x.
    log Log of floats, saves input x, dy:
        kernels::div(dy, x), dy.div(x);
    /// `y = ln(1 + x)`: the natural logarithm of one more, accurate near zero. Derivative: `dx = dy / (1 + x)`, made of x.
    ln_1p Ln1p of floats, saves input x, dy:
        kernels::div(dy, &kernels::add_scalar(x, 1.0.into())?), dy.div(&x.add_scalar(1.0)?);
    /// `y = sin x`: the sine of an angle in radians. Derivative: `dx = dy cos x`, made of x.
    sin Sin of floats, saves input x, dy:
        kernels::sin_backward(x, dy), dy.mul(&x.cos()?);
    /// `y = cos x`: the cosine of an angle in radians. Derivative: `dx = -dy sin x`, made of x.
    cos Cos of floats, saves input x, dy:
        kernels::cos_backward(x, dy), dy.mul(&x.sin()?)?.neg();
    /// `y = tanh(x)`: the hyperbolic tangent. Derivative: `dx = dy (1 - y²)`, made of y.
    tanh Tanh of floats, saves output y, dy:
        kernels::tanh_backward(y, dy), dy.mul(&y.square()?.rsub_scalar(1.0)?);
    /// `y = 1 / (1 + e^-x)`: the logistic function. Derivative: `dx = dy y (1 - y)`, made of y.
    sigmoid Sigmoid of floats, saves output y, dy:
        kernels::sigmoid_backward(y, dy), dy.mul(&y.rsub_scalar(1.0)?)?.mul(y);
    /// `y = max(x, 0)`: the rectified linear unit; NaN for NaN. Derivative: `dx = dy` where `y > 0`, else 0, made of y.
    relu Relu of numbers, saves output y, dy:
        kernels::relu_backward(y, dy), Var::full(0.0, dy)?.where_(&y.le_scalar(0.0)?, dy);
    /// `y = erf x`: the error function. Derivative: `dx = dy 2 / sqrt(pi) e^(-x²)`, made of x.
    erf Erf of floats, saves input x, dy:
        kernels::erf_backward(x, dy), {
        let slope = x.square()?.neg()?.exp()?.mul_scalar(std::f64::consts::FRAC_2_SQRT_PI)?;
        dy.mul(&slope)
    };
}

/// `dy sign(x)`, of differentiable operations; 0 at 0.
pub(super) fn signed(x: &Var, dy: &Var) -> Result<Var> {
    let right = dy.where_(&x.gt_scalar(0.0)?, &Var::full(0.0, dy)?)?;
    dy.neg()?.where_(&x.lt_scalar(0.0)?, &right)
}

/// `y = -x`, elementwise.
///
/// Derivative: `dx = -dy`. Nothing is saved.
impl Var {
    /// The negative.
    ///
    /// # Errors
    /// If the dtype is bool.
    pub fn neg(&self) -> Result<Var> {
        begins();
        let y = kernels::neg(self.tensor())?;
        record("neg", &[self], y, |_: &SaveContext<'_>| Ok(Neg))
    }
}

struct Neg;

impl Backward for Neg {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().neg()?)
    }
}

/// `y = min(max(x, min), max)`, elementwise.
///
/// Derivative: `dx = dy` strictly between the bounds, else 0 (on a bound too). Saves `x`.
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

/// `y = x` where `x > 0`, else `alpha (e^x - 1)`, elementwise.
///
/// Derivative: `dx = dy` where `x > 0`, else `dy alpha e^x`. Saves `x`.
/// At 0 it is that of the negative side.
impl Var {
    /// The exponential linear unit.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn elu(&self, alpha: f64) -> Result<Var> {
        begins();
        let y = kernels::elu(self.tensor(), alpha)?;
        elementwise(self, y, Elu { alpha })
    }
}

struct Elu {
    alpha: f64,
}

impl Elementwise for Elu {
    const NAME: &'static str = "elu";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::elu_backward(x, dy, self.alpha)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        let positive = x.gt_scalar(0.0)?;
        // Where the exponential is not used it must not overflow: its derivative is multiplied by 0.
        let exp = Var::full(0.0, x)?.where_(&positive, x)?.exp()?;
        dy.where_(&positive, &dy.mul(&exp.mul_scalar(self.alpha)?)?)
    }
}

/// `y = x` where `x > 0`, else `slope x`, elementwise.
///
/// Derivative: `dx = dy` where `x > 0`, else `slope dy`. Saves `x`.
/// At 0 it is that of the negative side.
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

/// `y = ln(1 + e^(beta x)) / beta`, and `x` where `beta x > threshold`, elementwise.
///
/// Derivative: `dx = dy sigmoid(beta x)`, and `dy` where `beta x > threshold`. Saves `x`.
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

/// `y = x sigmoid(x)`, elementwise.
///
/// Derivative: `dx = dy s (1 + x (1 - s))` with `s = sigmoid(x)`. Saves `x`, of which operations that would save `y`
/// compute it again ([`Rematerialized`](crate::Rematerialized)).
impl Var {
    /// The sigmoid-weighted linear unit, also called swish.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn silu(&self) -> Result<Var> {
        begins();
        elementwise(self, kernels::silu(self.tensor())?, Silu)
    }
}

struct Silu;

impl Elementwise for Silu {
    const NAME: &'static str = "silu";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::silu_backward(x, dy)
    }

    fn fused_over(&self, x: &Tensor, dy: Tensor) -> TensorResult<Tensor> {
        kernels::silu_backward_over(x, dy)
    }

    fn rematerialize(&self) -> Option<fn(&Tensor) -> TensorResult<Tensor>> {
        Some(kernels::silu)
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        let s = x.sigmoid()?;
        let slope = s.rsub_scalar(1.0)?.mul(x)?.add_scalar(1.0)?.mul(&s)?;
        dy.mul(&slope)
    }
}

/// `z = silu(x) y`, elementwise and broadcast.
///
/// Derivatives: `dx = dz y s (1 + x (1 - s))` with `s = sigmoid(x)`, `dy = dz silu(x)`. Saves `x` and `y`, of which operations that would save
/// `z` compute it again ([`Rematerialized`](crate::Rematerialized)).
impl Var {
    /// [`Var::silu`] of this, times another: the inner features of a gated perceptron, in one pass. In bf16 and f16 it is rounded once, where
    /// the two operations round twice. Source: Shazeer: GLU variants improve transformer (2020), SwiGLU.
    ///
    /// # Errors
    /// If the shapes do not broadcast, dtypes or devices differ, or the dtype is no floating-point one.
    pub fn silu_mul(&self, other: &Var) -> Result<Var> {
        begins();
        let z = kernels::silu_mul(self.tensor(), other.tensor())?;
        record("silu_mul", &[self, other], z, |s: &SaveContext<'_>| {
            let rematerialized = s.rematerialized(0, [0, 1], |x| kernels::silu_mul(&x[0], &x[1]));
            Ok(SiluMul { saved: [s.input(0)?, s.input(1)?], rematerialized })
        })
    }
}

struct SiluMul {
    saved: [SavedVariable; 2],
    rematerialized: Option<Arc<Rematerialized>>,
}

impl Backward for SiluMul {
    const REMATERIALIZES: bool = true;

    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, y, dz) = (cx.get(&self.saved[0])?, cx.get(&self.saved[1])?, cx.dy());
        let by_kernel = |dx: TensorResult<Tensor>| Ok(Var::new(dx?));
        let dx = || match cx.create_graph() {
            true => Silu.composed(&x, &dz.mul(&y)?),
            false => by_kernel(kernels::silu_mul_backward(x.tensor(), y.tensor(), dz.tensor())),
        };
        let dy = || match cx.create_graph() {
            true => x.silu_mul(dz),
            false => by_kernel(kernels::silu_mul(x.tensor(), dz.tensor())),
        };
        let dx = cx.needs(0).then(|| cx.sum_to_input(0, dx()?)).transpose()?;
        grads2(dx, cx.needs(1).then(|| cx.sum_to_input(1, dy()?)).transpose()?)
    }

    fn rematerialized(&self, _: usize) -> Option<&Arc<Rematerialized>> {
        self.rematerialized.as_ref()
    }
}

/// `y = x P(X <= x)` for a standard normal X, or its approximation by tanh, elementwise.
///
/// Derivative: with `cdf` and `pdf` of the normal distribution `dx = dy (cdf(x) + x pdf(x))`; the approximation is
/// `y = x s` with `s = sigmoid(2 u)`, `u = sqrt(2/pi) (x + 0.044715 x³)`, and `dx = dy (s + 2 x s (1 - s) u')`.
/// Saves `x`, of which
/// operations that would save `y` compute it again ([`Rematerialized`](crate::Rematerialized)). Source: Hendrycks and
/// Gimpel, Gaussian error linear units (2016).
impl Var {
    /// The Gaussian error linear unit.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn gelu(&self, kind: Gelu) -> Result<Var> {
        begins();
        elementwise(self, kernels::gelu(self.tensor(), kind)?, kind)
    }

    /// [`Var::gelu`], whose result has been computed together with this value.
    pub(super) fn gelu_made(&self, y: Tensor, kind: Gelu) -> Result<Var> {
        elementwise_made(self, y, kind)
    }

    /// The input of the gelu by tanh that has made this value, to send its gradient to; without elements. None if another
    /// operation has made it, or a product does not multiply by gelu's slope on the way.
    pub(super) fn fused_gelu_input(&self) -> Result<Option<Var>> {
        if !kernels::fuses_epilogues(self.tensor()) || !is_recording(&[self]) {
            return Ok(None);
        }
        let Some(edge) = self.edge().filter(|edge| edge.node.saves(tanh_gelu_input)) else { return Ok(None) };
        let place = Tensor::empty(&[0], self.dtype(), self.device())?;
        Ok(edge.node.inputs[0].clone().map(|input| Var::from_parts(place, Some(input))))
    }
}

/// What a gelu by tanh has saved: its input.
pub(super) fn tanh_gelu_input(gelu: &ElementwiseNode<Gelu>) -> Option<&SavedVariable> {
    (gelu.function == Gelu::Tanh).then_some(&gelu.saved)
}

impl Elementwise for Gelu {
    const NAME: &'static str = "gelu";
    const OF_OUTPUT: bool = false;

    fn fused(&self, x: &Tensor, dy: &Tensor) -> TensorResult<Tensor> {
        kernels::gelu_backward(x, dy, *self)
    }

    fn fused_over(&self, x: &Tensor, dy: Tensor) -> TensorResult<Tensor> {
        kernels::gelu_backward_over(x, dy, *self)
    }

    fn rematerialize(&self) -> Option<fn(&Tensor) -> TensorResult<Tensor>> {
        Some(match self {
            Gelu::Exact => |x| kernels::gelu(x, Gelu::Exact),
            Gelu::Tanh => |x| kernels::gelu(x, Gelu::Tanh),
        })
    }

    fn composed(&self, x: &Var, dy: &Var) -> Result<Var> {
        dy.mul(&match self {
            Gelu::Exact => exact_slope(x)?,
            Gelu::Tanh => tanh_slope(x)?,
        })
    }
}

fn exact_slope(x: &Var) -> Result<Var> {
    const SQRT_1_2: f64 = std::f64::consts::FRAC_1_SQRT_2;
    let cdf = x.mul_scalar(SQRT_1_2)?.erf()?.add_scalar(1.0)?.mul_scalar(0.5)?;
    let pdf_scale = 0.5 * std::f64::consts::FRAC_2_SQRT_PI * SQRT_1_2;
    let pdf = x.square()?.mul_scalar(-0.5)?.exp()?.mul_scalar(pdf_scale)?;
    cdf.add(&x.mul(&pdf)?)
}

fn tanh_slope(x: &Var) -> Result<Var> {
    let scale = 2.0 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
    // Beyond the bounds s is 0 or 1 and u' must not become infinite.
    let z = x.clamp(Some((-100.0).into()), Some(100.0.into()))?;
    let square = z.square()?;
    let s = square.mul_scalar(0.044715)?.add_scalar(1.0)?.mul(&z)?.mul_scalar(scale)?.sigmoid()?;
    let inner = square.mul_scalar(3.0 * 0.044715)?.add_scalar(1.0)?.mul_scalar(scale)?;
    s.add(&s.rsub_scalar(1.0)?.mul(&s)?.mul(&z)?.mul(&inner)?)
}
