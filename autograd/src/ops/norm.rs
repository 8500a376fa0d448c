//! `y = sum(|x|^p)^(1/p)` over dimensions.
//!
//! Derivative: `dx = dy sign(x) |x / y|^(p - 1)`, and 0 where `y` is 0; for an infinite `p` shared evenly by the
//! elements of that magnitude. The quotient is taken first, so that no power leaves the dtype's range.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Tensor};

use super::amax::share;
use super::over_dims::{OverDims, reduce};
use super::sum::dims_of;
use crate::{Result, Var};

impl Var {
    /// The vector norm of order `p` over `dims`, which stay with size 1 if `keepdim`. `f64::INFINITY` is the largest
    /// magnitude, 0 counts what is not 0.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, a dimension does not exist or is named twice, or `p` is infinite and
    /// there are no elements.
    pub fn norm<D: Dim>(&self, p: f64, dims: &[D], keepdim: bool) -> Result<Var> {
        reduce(self, dims_of("norm", dims, self)?, keepdim, Norm { p })
    }
}

struct Norm {
    p: f64,
}

impl OverDims for Norm {
    const NAME: &'static str = "norm";

    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor> {
        kernels::norm(x, self.p, dims, true)
    }

    fn gradient(&self, x: &Var, y: &Var, dy: &Var, dims: &[usize]) -> Result<Var> {
        if self.p == 0.0 {
            return Var::full(0.0, x);
        }
        if self.p.is_infinite() {
            return share(&x.abs()?, y, dims)?.mul(&sign(x)?)?.mul(dy);
        }
        if self.p == 1.0 {
            return sign(x)?.mul(dy);
        }
        // With 1 in the place of 0 nothing infinite is made there, to be multiplied by 0.
        let zero = y.eq_scalar(0.0)?;
        let ratio = x.div(&y.masked_fill(&zero, 1.0)?)?;
        if self.p == 2.0 {
            return ratio.mul(dy);
        }
        let none = x.eq_scalar(0.0)?;
        let power = ratio.abs()?.masked_fill(&none, 1.0)?.pow_scalar(self.p - 1.0)?;
        power.mul(&sign(x)?)?.mul(dy)
    }
}

/// -1, 0 or 1, as a constant.
fn sign(x: &Var) -> Result<Var> {
    let positive = x.gt_scalar(0.0)?.to(x.dtype())?;
    positive.sub(&x.lt_scalar(0.0)?.to(x.dtype())?)
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn norms_have_their_derivatives() {
        for p in [1.0, 1.5, 2.0, 3.0, f64::INFINITY] {
            check_twice(&[&[3, 4]], |v| v[0].norm(p, &[1], false)?.tanh());
        }
        check_twice(&[&[3, 4]], |v| v[0].norm(2.0, &[0, 1], true)?.tanh());
    }
}
