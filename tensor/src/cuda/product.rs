//! [`multiply`]: batches of matrix products of tensors by cuBLASLt.
#![allow(unsafe_code)]

use phalanx_cuda::{Epilogue, Float, MatrixLayout, ProductForm, ProductPointers};

use crate::{DType, Error, Result, Tensor};

/// Addresses are told apart up to this alignment.
const ALIGNMENT_MAX: u64 = 256;

/// A batch of matrices in a tensor: element (i, row, col) is `start + i * strides[0] + row * strides[1] + col * strides[2]`
/// elements after the tensor's first.
#[derive(Clone, Copy, Debug)]
pub struct Matrices<'a> {
    /// Where the elements are.
    pub tensor: &'a Tensor,
    /// The first matrix's first element.
    pub start: usize,
    /// From one matrix, row and column to the next.
    pub strides: [usize; 3],
}

/// A batch of products `c = finish(a b + bias)`, or `c += a b`.
pub struct Products<'a> {
    /// How many.
    pub count: usize,
    /// m, n and k of `m x k` times `k x n`.
    pub size: [usize; 3],
    /// The left factors.
    pub a: Matrices<'a>,
    /// The right ones, of the same dtype.
    pub b: Matrices<'a>,
    /// Where the result goes: the tensor, its first element's place there, and the strides from one matrix and from one
    /// row to the next; a row's elements lie side by side. Of the factors' dtype, or f32 where theirs is a half.
    pub c: (&'a mut Tensor, usize, [usize; 2]),
    /// Whether the products are added to the elements of `c`.
    pub accumulate: bool,
    /// A contiguous value a column.
    pub bias: Option<&'a Tensor>,
    /// What is done with the sums.
    pub sums: Epilogue,
    /// With [`Epilogue::GeluKept`], where the sums go, at the same places as the result; of the factors' dtype.
    pub before: Option<&'a mut Tensor>,
}

/// Computes products. Returns false and does nothing if cuBLASLt is not there or does not do such products.
///
/// # Errors
/// If a matrix exceeds its tensor, dtypes or devices do not fit, a tensor is in use, or the device is lost.
pub fn multiply(op: &'static str, products: Products<'_>) -> Result<bool> {
    let gpu = products.c.0.device().gpu()?;
    check(op, &products)?;
    let Some(form) = form(&products) else { return Ok(false) };
    let Products { a, b, c: (c, c_start, _), bias, before, .. } = products;
    let address = |t: &Tensor, start: usize| t.device_address() + (start * t.dtype().size()) as u64;
    let pointers = ProductPointers {
        a: address(a.tensor, a.start),
        b: address(b.tensor, b.start),
        c: address(c, c_start),
        bias: bias.map_or(0, Tensor::device_address),
        sums: before.as_deref().map_or(0, |t| address(t, c_start)),
    };
    let Some(planned) = gpu.plan_product(op, &form, &pointers).map_err(Error::of_gpu)? else {
        return Ok(false);
    };
    let (_a, _b) = (a.tensor.lock_read(op)?, b.tensor.lock_read(op)?);
    let _bias = bias.map(|t| t.lock_read(op)).transpose()?;
    let _c = c.lock_write(op)?;
    let _before = before.map(|t| t.lock_write(op)).transpose()?;
    // SAFETY: the plan is this device's, for the form; `check` proved that all matrices lie in their tensors, which are locked until the
    // call returns and freed in the order of their stream.
    unsafe { gpu.multiply(op, &planned, pointers) }.map_err(Error::of_gpu)?;
    Ok(true)
}

/// All matrices are within their tensors, of dtypes that belong together, and the result overlaps nothing.
fn check(op: &'static str, products: &Products<'_>) -> Result<()> {
    let Products { count, size: [m, n, k], a, b, c: (c, start, [step, row]), bias, before, .. } = products;
    for (tensor, dtype) in [(a.tensor, a.tensor.dtype()), (b.tensor, a.tensor.dtype())]
        .into_iter()
        .chain(bias.map(|t| (t, a.tensor.dtype())))
        .chain(before.as_deref().map(|t| (t, a.tensor.dtype())))
    {
        if tensor.dtype() != dtype {
            return Err(Error::dtype(op, tensor.dtype(), dtype.name()));
        }
        if tensor.device() != c.device() {
            return Err(Error::Device { op, left: c.device(), right: tensor.device() });
        }
        if tensor.shares_storage(c) {
            return Err(Error::invalid(op, "the result shares its storage with an operand"));
        }
    }
    let half = a.tensor.dtype().size() == 2 && c.dtype() == DType::F32;
    if c.dtype() != a.tensor.dtype() && !half {
        return Err(Error::dtype(op, c.dtype(), a.tensor.dtype().name()));
    }
    let within = |tensor: &Tensor, start: usize, loops: [(usize, usize); 3]| {
        let here = tensor.storage().bytes() / tensor.dtype().size() - tensor.offset();
        let spans = loops.iter().map(|&(n, stride)| n.saturating_sub(1).checked_mul(stride));
        let last = { spans }.try_fold(start, |sum, span| sum.checked_add(span?));
        let empty = loops.iter().any(|&(n, _)| n == 0);
        match last {
            Some(last) if empty || last < here => Ok(()),
            _ => Err(Error::invalid(op, format!("matrices {loops:?} from {start} exceed {here} elements"))),
        }
    };
    let loops = |sizes: [usize; 3], strides: [usize; 3]| std::array::from_fn(|i| (sizes[i], strides[i]));
    within(a.tensor, a.start, loops([*count, *m, *k], a.strides))?;
    within(b.tensor, b.start, loops([*count, *k, *n], b.strides))?;
    within(c, *start, loops([*count, *m, *n], [*step, *row, 1]))?;
    if let Some(before) = before {
        within(before, *start, loops([*count, *m, *n], [*step, *row, 1]))?;
    }
    match bias {
        Some(bias) if bias.shape() != [*n] || !bias.is_contiguous() => {
            Err(Error::shape(op, format!("a bias of shape {:?}", bias.shape()), format!("[{n}], contiguous")))
        }
        _ => Ok(()),
    }
}

/// The form; none if the library cannot express it.
fn form(products: &Products<'_>) -> Option<ProductForm> {
    let Products { count, size: [m, n, k], a, b, c: (c, start, [step, row]), .. } = products;
    if [*count, *m, *n, *k].contains(&0) || *count > i32::MAX as usize || (*m > 1 && row < n) {
        return None;
    }
    if products.sums == Epilogue::GeluKept && products.before.is_none() {
        return None;
    }
    // A plan may read the bias in vectors, and its choice does not take the bias's address into account.
    if products.bias.is_some_and(|bias| !bias.device_address().is_multiple_of(16)) {
        return None;
    }
    let align = |tensor: &Tensor, start: usize| {
        let address = tensor.device_address() + (start * tensor.dtype().size()) as u64;
        ALIGNMENT_MAX.min(1 << address.trailing_zeros().min(32)) as u32
    };
    Some(ProductForm {
        float: float(a.tensor.dtype()),
        out_float: float(c.dtype()),
        count: *count,
        size: [*m, *n, *k],
        a: MatrixLayout::of(*m, *k, a.strides)?,
        b: MatrixLayout::of(*k, *n, b.strides)?,
        c: MatrixLayout { in_columns: false, ld: if *m > 1 { *row } else { *n }, step: *step },
        accumulate: products.accumulate,
        bias: products.bias.is_some(),
        epilogue: products.sums,
        alignment: [align(a.tensor, a.start), align(b.tensor, b.start), align(c, *start)],
    })
}

fn float(dtype: DType) -> Float {
    match dtype {
        DType::F64 => Float::F64,
        DType::BF16 => Float::BF16,
        DType::F16 => Float::F16,
        _ => Float::F32,
    }
}
