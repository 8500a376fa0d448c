//! Matrix products, batched and broadcast.

mod cpu;
mod cuda;

pub(super) use cpu::multiply;
pub(super) use cuda::multiply as multiply_on_gpu;

use std::borrow::Cow;

use phalanx_tensor::{DType, Dims, Error, Result, Tensor, broadcast_shapes};

use super::cast::cast;
use super::gelu::Gelu;
use crate::check;
use crate::dispatch::Kernels;
use crate::gemm::Write;
use crate::pointwise::{map_into, pointwise};
use crate::real::for_real;
use crate::work;

/// The product of matrices in the last two dimensions; the dimensions before them broadcast. A tensor of one
/// dimension is a row on the left and a column on the right, and that dimension is not in the result. Floating-point
/// dtypes; any strides are read where they lie.
///
/// # Errors
/// If the inner sizes differ, the others do not broadcast, a tensor has no dimensions, or dtypes or devices differ.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let product = Product::new("matmul", a, b)?;
    let mut out = Tensor::empty_for("matmul", &product.out_shape(a, b), a.dtype(), a.device())?;
    product.run(&mut out, Finish::default())?;
    Ok(out)
}

/// [`matmul`] into a tensor that exists: contiguous, of the product's shape and dtype. What it held is gone.
///
/// # Errors
/// As [`matmul`]; if `c` does not fit or shares a storage with an operand.
pub fn matmul_into(c: &mut Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    const OP: &str = "matmul_into";
    let product = Product::new(OP, a, b)?;
    check::same(OP, &[a, c])?;
    product.fits(OP, "a result", c, a, b)?;
    product.run(c, Finish::default())
}

/// `c += a b` in place, all of the product summed before it is added: the bits of [`matmul`] added by
/// [`crate::accumulate_`]. `c` is contiguous and of the product's shape and dtype, or f32 where that is a half: then the
/// product is not rounded before it is added.
///
/// # Errors
/// As [`matmul`]; if `c` does not fit or shares a storage with an operand.
pub fn matmul_accumulate_(c: &mut Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    const OP: &str = "matmul_accumulate";
    let product = Product::new(OP, a, b)?;
    // A GPU adds products of halves to f32 as they are; on a CPU the halves are widened first.
    if c.dtype() == DType::F32 && a.dtype().size() == 2 && !c.device().is_cuda() {
        return matmul_accumulate_(c, &cast(a, DType::F32)?, &cast(b, DType::F32)?);
    }
    check::same_device(OP, &[a, c])?;
    if c.dtype() != a.dtype() && !(c.dtype() == DType::F32 && a.dtype().size() == 2) {
        return Err(Error::dtype(OP, c.dtype(), a.dtype().name()));
    }
    product.fits(OP, "a sum", c, a, b)?;
    product.run(c, Finish { write: Write::Accumulate, ..Finish::default() })
}

/// What is done to the finished sums.
pub(super) struct Finish<'a> {
    pub(super) write: Write,
    /// A contiguous value per column.
    pub(super) bias: Option<&'a Tensor>,
    pub(super) activation: Option<Gelu>,
}

impl Default for Finish<'_> {
    fn default() -> Self {
        Finish { write: Write::Store, bias: None, activation: None }
    }
}

/// A product whose operands fit: matrices of one batch shape, `batch x m x k` and `batch x k x n`; the caller's own tensors
/// where they already are that.
pub(super) struct Product<'a> {
    op: &'static str,
    batch: Dims,
    /// The result's rows and columns.
    size: [usize; 2],
    a: Cow<'a, Tensor>,
    b: Cow<'a, Tensor>,
}

const MULTIPLY: Kernels<Multiply> = Kernels { cpu: run_on_cpu, cuda: run_on_gpu };

type Multiply = fn(&Product<'_>, &mut Tensor, Finish<'_>) -> Result<()>;

impl<'a> Product<'a> {
    /// Checks the operands and views them as matrices.
    pub(super) fn new(op: &'static str, a: &'a Tensor, b: &'a Tensor) -> Result<Product<'a>> {
        check::float(op, a)?;
        check::same(op, &[a, b])?;
        let wrong = || {
            let wanted = "[.., m, k] and [.., k, n], in which one dimension alone is k";
            Error::shape(op, format!("shapes {:?} and {:?}", a.shape(), b.shape()), wanted)
        };
        if let (&[m, a_inner], &[b_inner, n]) = (a.shape(), b.shape())
            && a_inner == b_inner
        {
            // The short way for two matrices.
            let (a, b) = (Cow::Borrowed(a), Cow::Borrowed(b));
            return Ok(Product { op, batch: Dims::new(), size: [m, n], a, b });
        }
        if a.rank() == 0 || b.rank() == 0 {
            return Err(wrong());
        }
        let row = if a.rank() == 1 { Cow::Owned(a.unsqueeze(0)?) } else { Cow::Borrowed(a) };
        let column = if b.rank() == 1 { Cow::Owned(b.unsqueeze(1)?) } else { Cow::Borrowed(b) };
        let ((a_batch, a_size), (b_batch, b_size)) = (split(row.shape()), split(column.shape()));
        if a_size[1] != b_size[0] {
            return Err(wrong());
        }
        let batch = broadcast_shapes(op, a_batch, b_batch).map_err(|_| wrong())?;
        let size = [a_size[0], b_size[1]];
        let (a, b) = (spread(op, row, &batch)?, spread(op, column, &batch)?);
        Ok(Product { op, batch, size, a, b })
    }

    /// The result's shape for operands of these ranks.
    pub(super) fn out_shape(&self, a: &Tensor, b: &Tensor) -> Dims {
        let mut shape = self.batch.clone();
        let [m, n] = self.size;
        shape.extend((a.rank() > 1).then_some(m));
        shape.extend((b.rank() > 1).then_some(n));
        shape
    }

    /// Whether `c` has the result's shape and is contiguous.
    fn fits(&self, op: &'static str, what: &'static str, c: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
        let matrices = a.rank() == 2 && b.rank() == 2; // whose product's shape need not be put together
        if !(matrices && matches!(*c.shape(), [m, n] if [m, n] == self.size)) {
            check::shape(op, what, c, &self.out_shape(a, b))?;
        }
        if !c.is_contiguous() {
            return Err(Error::shape(
                op,
                format!("{what} with strides {:?}", c.strides()),
                "a contiguous one",
            ));
        }
        Ok(())
    }

    /// Computes into `out`, which is contiguous.
    pub(super) fn run(&self, out: &mut Tensor, finish: Finish<'_>) -> Result<()> {
        work::count([out.numel(), self.a.shape().last().copied().unwrap_or(1)]);
        if out.device().is_meta() {
            out.bump_version();
            return Ok(());
        }
        MULTIPLY.run(out.device(), |multiply| multiply(self, out, finish))
    }

    /// Whether each element is one product of halves, which needs no tiles of sums.
    fn is_outer(&self, out: &Tensor, finish: &Finish<'_>) -> bool {
        let plain = finish.write == Write::Store && finish.bias.is_none() && finish.activation.is_none();
        plain && self.a.shape().last() == Some(&1) && out.dtype().size() == 2 && out.rank() == self.a.rank()
    }
}

fn run_on_cpu(product: &Product<'_>, out: &mut Tensor, finish: Finish<'_>) -> Result<()> {
    if product.is_outer(out, &finish) {
        return map_into(product.op, Outer, [&product.a, &product.b], out);
    }
    for_real!(product.op, out.dtype(), T => multiply::<T>(product.op, &product.a, &product.b, out, finish))
}

fn run_on_gpu(product: &Product<'_>, out: &mut Tensor, finish: Finish<'_>) -> Result<()> {
    cuda::multiply(product.op, &product.a, &product.b, out, finish)
}

// A chain of one step: a product of -0 becomes 0.
pointwise!(Outer, |a, b| a.mul_add(b, V::zero()));

/// The tensor with these batch dimensions.
fn spread<'a>(op: &'static str, matrices: Cow<'a, Tensor>, batch: &[usize]) -> Result<Cow<'a, Tensor>> {
    let (own, size) = split(matrices.shape());
    if own == batch {
        return Ok(matrices);
    }
    Ok(Cow::Owned(matrices.broadcast_for(op, &[batch, size].concat())?))
}

/// The batch dimensions and the matrix's two.
fn split(shape: &[usize]) -> (&[usize], &[usize]) {
    shape.split_at(shape.len() - 2)
}

#[cfg(test)]
mod tests;
