//! Products with a step that cuBLASLt does on the way, in its epilogue: gelu, gelu's derivative, and the sums of a factor's rows. For halves
//! on a GPU; what the library does not do, and on other devices, is done step by step. In one pass a product's sums are not rounded before
//! gelu or its slope is applied.

use phalanx_tensor::cuda::Epilogue;
use phalanx_tensor::{Error, Result, Tensor};

use super::super::activation::{Gelu, gelu, gelu_backward_over};
use super::super::sum::sum;
use super::cuda::multiply_fused;
use super::{Finish, Product, linear, run_linear};
use crate::gemm::Write;
use crate::{check, flops};

/// Whether a product of such tensors does further steps on the way: of halves on a GPU. The library's gelu, by tanh, is no more exact
/// than halves are.
pub fn fuses_epilogues(x: &Tensor) -> bool {
    x.device().is_cuda() && x.dtype().size() == 2
}

/// [`linear`], then [`crate::gelu`], in one pass, with the bits of both operations; by tanh with those of [`linear_gelu_kept`].
///
/// # Errors
/// As [`linear`].
pub fn linear_gelu(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, kind: Gelu) -> Result<Tensor> {
    if kind == Gelu::Tanh && fuses_epilogues(x) {
        // Not by an epilogue that keeps nothing, whose algorithm may have other bits.
        return Ok(linear_gelu_kept(x, weight, bias)?.0);
    }
    run_linear("linear_gelu", x, weight, bias, |product, mut out, bias| {
        product.run(&mut out, Finish { bias, activation: Some(kind), ..Finish::default() })?;
        Ok(out)
    })
}

/// `gelu(z)`, by tanh, of `z = x weightᵀ + bias`, and `z`.
///
/// # Errors
/// As [`linear`].
pub fn linear_gelu_kept(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
    const OP: &str = "linear_gelu";
    if fuses_epilogues(x) {
        let made = run_linear(OP, x, weight, bias, |product, mut y, bias| {
            let mut z = Tensor::empty_for(OP, y.shape(), y.dtype(), y.device())?;
            let finish = Finish { bias, ..Finish::default() };
            let done = product.run_fused(&mut y, &finish, Epilogue::GeluKept(&mut z))?;
            Ok(done.then_some((y, z)))
        })?;
        if let Some(made) = made {
            return Ok(made);
        }
    }
    let z = linear(x, weight, bias)?;
    Ok((gelu(&z, Gelu::Tanh)?, z))
}

/// `a b` times the derivative of gelu, by tanh, at `z`, which has the product's shape: the gradient of `z`, where `a` is that of
/// `gelu(z) bᵀ`.
///
/// # Errors
/// As [`crate::matmul`]; if `z` has another shape, dtype or device than the product.
pub fn matmul_gelu_backward(a: &Tensor, b: &Tensor, z: &Tensor) -> Result<Tensor> {
    const OP: &str = "matmul_gelu_backward";
    let product = Product::new(OP, a, b)?;
    check::same(OP, &[a, z])?;
    let mut out = Tensor::empty_for(OP, &product.out_shape(a, b), a.dtype(), a.device())?;
    check::shape(OP, "gelu's input", z, out.shape())?;
    let can_fuse = fuses_epilogues(a) && z.is_contiguous();
    if can_fuse && product.run_fused(&mut out, &Finish::default(), Epilogue::GeluBackward(z))? {
        return Ok(out);
    }
    product.run(&mut out, Finish::default())?;
    gelu_backward_over(z, out, Gelu::Tanh)
}

/// The product of two matrices, and the sums of `a`'s rows: the gradients of a linear map's weight and bias, where `a` is the transpose
/// of its output's gradient.
///
/// # Errors
/// As [`crate::matmul`]; if they are no matrices.
pub fn matmul_row_sums(a: &Tensor, b: &Tensor) -> Result<(Tensor, Tensor)> {
    const OP: &str = "matmul_row_sums";
    let product = Product::new(OP, a, b)?;
    let mut c = Tensor::empty_for(OP, &product.out_shape(a, b), a.dtype(), a.device())?;
    let sums = product.run_with_row_sums(&mut c, Write::Store, a, b)?;
    Ok((c, sums))
}

/// [`crate::matmul_accumulate_`] of two matrices; returns the sums of `a`'s rows, which are added to nothing. They have the bits of
/// [`matmul_row_sums`].
///
/// # Errors
/// As [`crate::matmul_accumulate_`]; if they are no matrices, or dtypes differ.
pub fn matmul_accumulate_row_sums_(c: &mut Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "matmul_accumulate_row_sums";
    let product = Product::new(OP, a, b)?;
    check::same(OP, &[a, c])?;
    product.fits(OP, "a sum", c, a, b)?;
    product.run_with_row_sums(c, Write::Accumulate, a, b)
}

impl Product<'_> {
    /// Computes into `out`, which is contiguous, by one call of the library; false if it does not do that.
    fn run_fused(&self, out: &mut Tensor, finish: &Finish<'_>, epilogue: Epilogue<'_>) -> Result<bool> {
        let done = multiply_fused(self.op, &self.a, &self.b, out, finish, epilogue)?;
        if done {
            flops::count_multiply_adds([out.numel(), self.a.shape().last().copied().unwrap_or(1)]);
        }
        Ok(done)
    }

    fn run_with_row_sums(&self, c: &mut Tensor, write: Write, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        if a.rank() != 2 || b.rank() != 2 {
            let got = format!("shapes {:?} and {:?}", a.shape(), b.shape());
            return Err(Error::shape(self.op, got, "two matrices"));
        }
        let finish = Finish { write, ..Finish::default() };
        if fuses_epilogues(a) {
            let mut sums = Tensor::empty_for(self.op, &a.shape()[..1], c.dtype(), c.device())?;
            if self.run_fused(c, &finish, Epilogue::RowSums(&mut sums))? {
                return Ok(sums);
            }
        }
        self.run(c, finish)?;
        sum(a, &[1], false)
    }
}
