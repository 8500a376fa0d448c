//! Matrix products, batched and broadcast ([`matmul`]), and `x Wᵀ + b` ([`linear`]). A CPU's are [`crate::gemm`], a GPU's are in `cuda.rs`.
//! Products with a step before or after them that cuBLASLt does on the way are in `fused.rs`, weights that lie as products read them in `panels.rs`.

mod cuda;
mod fused;
mod panels;

use std::borrow::Cow;

use phalanx_tensor::{
    DType, Dims, Element, Error, Loops, Result, Tensor, bf16, broadcast_shapes, contiguous_strides,
};

use super::activation::Gelu;
use super::cast::cast;
use crate::dispatch::Kernels;
use crate::gemm::{
    Batch, Epilogue, GEMV_STEPS_MIN, GemmElem, MatMut, MatRef, Write, gemm_batched, gemm_continue_by_tiles,
    gemv, has_tiles, is_parallel,
};
use crate::pointwise::{map_into, pointwise};
use crate::real::{for_real, wide_dtype};
use crate::{check, flops};

pub(super) use cuda::multiply as multiply_on_gpu;
pub use fused::{
    fuses_epilogues, linear_gelu, linear_gelu_kept, matmul_accumulate_row_sums_, matmul_gelu_backward,
    matmul_row_sums,
};
pub use panels::WeightPanels;

/// The product of matrices in the last two dimensions; the dimensions before them broadcast. A tensor of one
/// dimension is a row on the left and a column on the right, and that dimension is not in the result. Floating-point
/// dtypes; any strides are read in place.
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

/// Steps at whose multiples a product may be cut for [`matmul_continue_`]: AMX's tiles add bf16 in blocks of so many. Elsewhere, and of other
/// dtypes, any cut will do.
pub const PART_STEPS: usize = 32;
#[cfg(target_arch = "x86_64")]
const _: () = assert!(PART_STEPS.is_multiple_of(crate::simd::amx::STEPS));

/// `c += a b` in place, where the additions of each element go on from what `c` holds. So on a CPU a product whose steps come in
/// parts, cut at multiples of [`PART_STEPS`], has the bits of one [`matmul`], if it has more than one column and, of bf16 with AMX, is of two
/// matrices; on a GPU each part is added as a whole. `c` is contiguous, of the product's shape, and of the dtype that `a` and `b` are computed in: f32 for halves.
///
/// # Errors
/// As [`matmul_accumulate_`].
pub fn matmul_continue_(c: &mut Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    const OP: &str = "matmul_continue";
    check::dtype(OP, c, wide_dtype(a.dtype()))?;
    if c.device().is_cuda() {
        return matmul_accumulate_(c, a, b);
    }
    let by_tiles = a.dtype() == DType::BF16 && a.rank() == 2 && b.rank() == 2 && has_tiles();
    let dtype = if by_tiles { a.dtype() } else { c.dtype() };
    let (a, b) = (cast(a, dtype)?, cast(b, dtype)?);
    let product = Product::new(OP, &a, &b)?;
    check::same_device(OP, &[&a, c])?;
    product.fits(OP, "a sum", c, &a, &b)?;
    product.run(c, Finish { write: Write::Continue, ..Finish::default() })
}

/// The epilogue: what is done to the finished sums.
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
        flops::count_multiply_adds([out.numel(), self.a.shape().last().copied().unwrap_or(1)]);
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
    if finish.write == Write::Continue && product.a.dtype() != out.dtype() {
        return continue_by_tiles(product, out);
    }
    for_real!(product.op, out.dtype(), T => multiply::<T>(product.op, &product.a, &product.b, out, finish))
}

/// A matrix product of bf16 whose sums, of f32, go on.
fn continue_by_tiles(product: &Product<'_>, out: &mut Tensor) -> Result<()> {
    let (Product { op, size: [m, n], a, b, .. }, offset) = (product, out.offset());
    let pool = out.device().pool()?;
    let (a_data, b_data) = (a.read::<bf16>(op)?, b.read::<bf16>(op)?);
    let (a, b) = (mat(&a_data, a, 0, 0), mat(&b_data, b, 0, 0));
    let mut c = out.write::<f32>(op)?;
    let c = MatMut::row_major(&mut c[offset..][..m * n], *m, *n);
    gemm_continue_by_tiles(Some(&pool), a, b, c);
    Ok(())
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

/// `out = a b` for operands of one batch shape; `out` is contiguous.
pub(in crate::ops) fn multiply<T: GemmElem + Element>(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    out: &mut Tensor,
    finish: Finish<'_>,
) -> Result<()> {
    let lead = a.rank() - 2;
    let [m, k, n] = [a.shape()[lead], a.shape()[lead + 1], b.shape()[lead + 1]];
    if out.numel() == 0 {
        return Ok(());
    }
    let (offset, numel) = (out.offset(), out.numel());
    // To ask for the threads takes as long as a tiny product.
    let pool = if is_parallel(numel, 1, k) { Some(out.device().pool()?) } else { None };
    let (a_data, b_data) = (a.read::<T>(op)?, b.read::<T>(op)?);
    let bias = finish.bias.map(|bias| Ok((bias.read::<T>(op)?, bias.offset()))).transpose()?;
    let epilogue = Epilogue {
        bias: bias.as_ref().map(|(values, offset)| &values[*offset..][..n]),
        activation: finish.activation,
    };
    let mut c_data = out.write::<T>(op)?;
    let c_data = &mut c_data[offset..][..numel];
    let mut run =
        |count: usize, [a_start, b_start, c_start]: [usize; 3], [a_step, b_step, c_step]: [usize; 3]| {
            let a_mat = mat(&a_data, a, a_start, a_step);
            let b_mat = mat(&b_data, b, b_start, b_step);
            let c_mat = MatMut::row_major(&mut c_data[c_start..], m, n);
            let batch = Batch { count, a: a_step, b: b_step, c: c_step };
            // Not for one row, too: it may be one of a batch that was cut, and has the bits that it has there.
            let multiply = if n == 1 && k >= GEMV_STEPS_MIN && finish.write != Write::Continue {
                gemv
            } else {
                gemm_batched
            };
            multiply(pool.as_deref(), batch, a_mat, b_mat, c_mat, finish.write, epilogue);
        };
    if lead == 0 {
        run(1, [0; 3], [0; 3]);
        return Ok(());
    }
    let batch = &a.shape()[..lead];
    let mut c_strides = contiguous_strides(batch);
    c_strides.iter_mut().for_each(|stride| *stride *= m * n);
    let loops = Loops::new(batch, [&a.strides()[..lead], &b.strides()[..lead], &c_strides]);
    // Items may run in any order: the longest loop is the batch, the others go around it.
    let inner = (0..loops.sizes().len()).max_by_key(|&axis| loops.sizes()[axis]).unwrap_or(0);
    let (count, steps) = (loops.sizes()[inner], loops.strides()[inner]);
    for index in 0..loops.sizes().iter().product::<usize>() / count {
        run(count, start_of(&loops, inner, index), steps);
    }
    Ok(())
}

/// The matrix in the last two dimensions, `start` elements after the tensor's first.
fn mat<'a, T>(data: &'a [T], tensor: &Tensor, start: usize, step: usize) -> MatRef<'a, T> {
    let (&[.., rows, cols], &[.., row_stride, col_stride]) = (tensor.shape(), tensor.strides()) else {
        unreachable!("a matrix has two dimensions")
    };
    // A single row's stride says nothing: with the batch's, the batch may become rows of one product.
    let row_stride = if rows == 1 { step } else { row_stride };
    let data = data.get(tensor.offset() + start..).unwrap_or(&[]); // only a tensor without elements ends before
    MatRef::new(data, rows, cols, row_stride, col_stride)
}

/// Where turn `index` of the loops around `inner` begins.
fn start_of(loops: &Loops<3>, inner: usize, mut index: usize) -> [usize; 3] {
    let mut at = [0; 3];
    for axis in (0..loops.sizes().len()).rev().filter(|&axis| axis != inner) {
        let step = index % loops.sizes()[axis];
        index /= loops.sizes()[axis];
        for (at, stride) in at.iter_mut().zip(loops.strides()[axis]) {
            *at += step * stride;
        }
    }
    at
}

/// `x weightᵀ + bias` for `x` of shape `[.., in]`, `weight` `[out, in]` and `bias` `[out]`: `[.., out]`, the bias
/// added to the finished sums.
///
/// # Errors
/// If the shapes do not fit, the dtype is no floating-point one, or dtypes or devices differ.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    run_linear("linear", x, weight, bias, |product, mut out, bias| {
        product.run(&mut out, Finish { bias, ..Finish::default() })?;
        Ok(out)
    })
}

/// Calls `run` with the product, memory for the result, and the contiguous bias.
fn run_linear<R>(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    run: impl FnOnce(&Product<'_>, Tensor, Option<&Tensor>) -> Result<R>,
) -> Result<R> {
    let inputs = x.shape().last().copied();
    let fits = weight.rank() == 2 && inputs == Some(weight.shape()[1]);
    if !fits {
        let got = format!("an input of shape {:?} and a weight of shape {:?}", x.shape(), weight.shape());
        return Err(phalanx_tensor::Error::shape(op, got, "[.., in] and [out, in]"));
    }
    let columns = weight.transpose(0, 1)?;
    let product = Product::new(op, x, &columns)?;
    let bias = match bias {
        Some(bias) => {
            check::same(op, &[x, bias])?;
            check::shape(op, "a bias", bias, &weight.shape()[..1])?;
            Some(bias.contiguous()?)
        }
        None => None,
    };
    let out = Tensor::empty_for(op, &product.out_shape(x, weight), x.dtype(), x.device())?;
    run(&product, out, bias.as_ref())
}

#[cfg(test)]
mod tests;
