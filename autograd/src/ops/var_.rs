//! `y = sum((x - mean)²) / (n - correction)` over dimensions.
//!
//! Derivative: `dx = dy 2 (x - mean) / (n - correction)`.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Tensor};

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

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn variances_have_their_derivatives() {
        check_twice(&[&[3, 4]], |v| v[0].var(&[1], 1.0, false)?.tanh());
        check_twice(&[&[3, 4]], |v| v[0].var(&[0, -1], 0.0, true)?.tanh());
    }
}
