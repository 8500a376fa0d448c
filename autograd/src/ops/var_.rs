//! `y = sum((x - mean)²) / (n - correction)` over dimensions.
//!
//! Derivative: `dx = dy 2 (x - mean) / (n - correction)`. Of the standard deviation, its root:
//! `dx = dy (x - mean) / (y (n - correction))`, and 0 where `y` is 0.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dim, Tensor};

use super::over_dims::{OverDims, reduce};
use super::sum::dims_of;
use crate::{Result, Var};

impl Var {
    /// The variance over `dims`, which stay with size 1 if `keepdim`: 1 is the correction for a sample's, 0 for a
    /// population's.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
    pub fn var<D: Dim>(&self, dims: &[D], correction: f64, keepdim: bool) -> Result<Var> {
        let dims = dims_of("var", dims, self)?;
        reduce(self, dims, keepdim, Variance { correction })
    }

    /// The standard deviation over `dims`, the root of [`Var::var`]. Its derivative where all elements are equal is 0.
    ///
    /// # Errors
    /// As [`Var::var`].
    pub fn std<D: Dim>(&self, dims: &[D], correction: f64, keepdim: bool) -> Result<Var> {
        let dims = dims_of("std", dims, self)?;
        super::composed::floats("std", &[self])?;
        reduce(self, dims, keepdim, Deviation { correction })
    }
}

struct Variance {
    correction: f64,
}

impl OverDims for Variance {
    const NAME: &'static str = "var";

    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor> {
        kernels::var(x, dims, self.correction, true)
    }

    fn gradient(&self, x: &Var, _: &Var, dy: &Var, dims: &[usize]) -> Result<Var> {
        let n: usize = dims.iter().map(|&d| x.shape()[d]).product();
        let deviation = x.sub(&x.mean(dims, true)?)?;
        deviation.mul(&dy.mul_scalar(2.0 / (n as f64 - self.correction).max(0.0))?)
    }
}

struct Deviation {
    correction: f64,
}

impl OverDims for Deviation {
    const NAME: &'static str = "std";

    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor> {
        // A half is rounded once, behind the root.
        let wide = if x.dtype().size() == 2 { DType::F32 } else { x.dtype() };
        let variance = kernels::var(&kernels::cast(x, wide)?, dims, self.correction, true)?;
        kernels::cast(&kernels::sqrt(&variance)?, x.dtype())
    }

    fn gradient(&self, x: &Var, y: &Var, dy: &Var, dims: &[usize]) -> Result<Var> {
        let n: usize = dims.iter().map(|&d| x.shape()[d]).product();
        let slope = dy.div(&y.mul_scalar((n as f64 - self.correction).max(0.0))?)?;
        let slope = slope.masked_fill(&y.eq_scalar(0.0)?, 0.0)?;
        x.sub(&x.mean(dims, true)?)?.mul(&slope)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn variances_have_their_derivatives() {
        check_twice(&[&[3, 4]], |v| v[0].var(&[1], 1.0, false)?.tanh());
        check_twice(&[&[3, 4]], |v| v[0].var(&[0, -1], 0.0, true)?.tanh());
    }
}
