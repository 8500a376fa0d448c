//! `y = log(sum(e^x))` over dimensions.
//!
//! Derivative: `dx = dy e^(x - y)`.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Tensor};

use super::over_dims::{OverDims, reduce};
use super::sum::dims_of;
use crate::{Result, Var};

impl Var {
    /// The logarithm of the sum of exponentials over `dims`, which stay with size 1 if `keepdim`; safe for large
    /// values.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
    pub fn logsumexp<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
        reduce(self, dims_of("logsumexp", dims, self)?, keepdim, LogSumExp)
    }
}

struct LogSumExp;

impl OverDims for LogSumExp {
    const NAME: &'static str = "logsumexp";

    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor> {
        kernels::logsumexp(x, dims, true)
    }

    fn gradient(&self, x: &Var, y: &Var, dy: &Var, _: &[usize]) -> Result<Var> {
        x.sub(y)?.exp()?.mul(dy)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn logsumexp_has_its_derivatives() {
        check_twice(&[&[3, 4]], |v| v[0].logsumexp(&[1], false)?.tanh());
        check_twice(&[&[3, 4]], |v| v[0].logsumexp(&[0, 1], true)?.tanh());
    }
}
