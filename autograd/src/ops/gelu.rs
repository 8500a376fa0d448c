//! `y = x P(X <= x)` for a standard normal X, or its approximation by tanh, elementwise.
//!
//! Derivative: with `cdf` and `pdf` of the normal distribution `dx = dy (cdf(x) + x pdf(x))`; the approximation is
//! `y = x s` with `s = sigmoid(2 u)`, `u = sqrt(2/pi) (x + 0.044715 x³)`, and `dx = dy (s + 2 x s (1 - s) u')`.
//! Saves `x`, of which `y` is made again for what would save it ([`Rematerialized`](crate::Rematerialized)). Source: Hendrycks and Gimpel, Gaussian error linear units (2016).

use phalanx_kernels::{self as kernels, Gelu};
use phalanx_tensor::{Result as TensorResult, Tensor};

use super::elementwise::{Elementwise, elementwise};
use crate::{Result, Var, begins};

impl Var {
    /// The Gaussian error linear unit.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn gelu(&self, kind: Gelu) -> Result<Var> {
        begins();
        elementwise(self, kernels::gelu(self.tensor(), kind)?, kind)
    }
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

    fn again(&self) -> Option<fn(&Tensor) -> TensorResult<Tensor>> {
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
