//! [`multiply`]: batches of matrix products of tensors by cuBLASLt.
#![allow(unsafe_code)]

use phalanx_cuda::{Float, MatrixLayout, ProductForm, ProductPointers};

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
    pub epilogue: Epilogue<'a>,
}

/// What is done with the sums of a product. Its tensors have the result's dtype.
pub enum Epilogue<'a> {
    /// They are stored.
    Plain,
    /// Gelu (the approximation by tanh) of them is stored, and they are stored in this tensor, at the same places as the result.
    GeluKept(&'a mut Tensor),
    /// They are multiplied by gelu's slope at the elements of this tensor, which has them at the same places as the result.
    GeluBackward(&'a Tensor),
    /// They are stored, and the sum of each row of the only left factor goes to this contiguous tensor.
    RowSums(&'a mut Tensor),
}

impl Epilogue<'_> {
    fn kind(&self) -> phalanx_cuda::Epilogue {
        match self {
            Epilogue::Plain => phalanx_cuda::Epilogue::Plain,
            Epilogue::GeluKept(_) => phalanx_cuda::Epilogue::GeluKept,
            Epilogue::GeluBackward(_) => phalanx_cuda::Epilogue::GeluBackward,
            Epilogue::RowSums(_) => phalanx_cuda::Epilogue::RowSums,
        }
    }

    /// Its tensor, if any.
    fn tensor(&self) -> Option<&Tensor> {
        match self {
            Epilogue::Plain => None,
            Epilogue::GeluBackward(kept) => Some(kept),
            Epilogue::GeluKept(out) | Epilogue::RowSums(out) => Some(out),
        }
    }
}

/// Computes products. Returns false and does nothing if cuBLASLt is not there or does not do such products.
///
/// # Errors
/// If a matrix exceeds its tensor, dtypes or devices do not fit, a tensor is in use, or the device is lost.
pub fn multiply(op: &'static str, products: Products<'_>) -> Result<bool> {
    let gpu = products.c.0.device().gpu()?;
    check(op, &products)?;
    let Some(form) = form(&products) else { return Ok(false) };
    let Products { a, b, c: (c, c_start, _), bias, epilogue, .. } = products;
    let mut pointers = ProductPointers {
        a: address(a.tensor, a.start),
        b: address(b.tensor, b.start),
        c: address(c, c_start),
        bias: bias.map_or(0, Tensor::device_address),
        kept: 0,
    };
    match &epilogue {
        Epilogue::RowSums(sums) => pointers.bias = sums.device_address(),
        other => pointers.kept = other.tensor().map_or(0, |kept| address(kept, c_start)),
    }
    let Some(planned) = gpu.plan_product(op, &form, &pointers).map_err(Error::of_gpu)? else {
        return Ok(false);
    };
    let (_a, _b) = (a.tensor.lock_read(op)?, b.tensor.lock_read(op)?);
    let _bias = bias.map(|t| t.lock_read(op)).transpose()?;
    let _c = c.lock_write(op)?;
    let (_read, _written);
    match epilogue {
        Epilogue::Plain => {}
        Epilogue::GeluBackward(kept) => _read = kept.lock_read(op)?,
        Epilogue::GeluKept(out) | Epilogue::RowSums(out) => _written = out.lock_write(op)?,
    }
    // SAFETY: the plan is this device's, for the form; `check` proved that all matrices lie in their tensors, which are locked until the
    // call returns and freed in the order of their stream.
    unsafe { gpu.multiply(op, &planned, pointers) }.map_err(Error::of_gpu)?;
    Ok(true)
}

/// The address of an element.
fn address(tensor: &Tensor, start: usize) -> u64 {
    tensor.device_address() + (start * tensor.dtype().size()) as u64
}

/// All matrices are within their tensors, of dtypes that belong together, and the result overlaps nothing.
fn check(op: &'static str, products: &Products<'_>) -> Result<()> {
    let Products { count, size: [m, n, k], a, b, c: (c, start, [step, row]), bias, epilogue, .. } = products;
    let factors = [a.tensor, b.tensor].map(|factor| (factor, a.tensor.dtype()));
    let others = bias.iter().copied().chain(epilogue.tensor()).map(|other| (other, c.dtype()));
    for (tensor, dtype) in factors.into_iter().chain(others) {
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
    let vector = |what: &str, vector: &Tensor, size: usize| {
        if vector.shape() == [size] && vector.is_contiguous() {
            return Ok(());
        }
        Err(Error::shape(
            op,
            format!("{what} of shape {:?}", vector.shape()),
            format!("[{size}], contiguous"),
        ))
    };
    match epilogue {
        Epilogue::Plain => {}
        Epilogue::RowSums(sums) => vector("sums of rows", sums, *m)?,
        Epilogue::GeluKept(kept) => within(kept, *start, loops([*count, *m, *n], [*step, *row, 1]))?,
        Epilogue::GeluBackward(kept) => within(kept, *start, loops([*count, *m, *n], [*step, *row, 1]))?,
    }
    bias.map_or(Ok(()), |bias| vector("a bias", bias, *n))
}

/// The form; none if the library cannot express it.
fn form(products: &Products<'_>) -> Option<ProductForm> {
    let Products { count, size: [m, n, k], a, b, c: (c, start, [step, row]), epilogue, .. } = products;
    if [*count, *m, *n, *k].contains(&0) || *count > i32::MAX as usize || (*m > 1 && row < n) {
        return None;
    }
    let (kind, ld) = (epilogue.kind(), if *m > 1 { *row } else { *n });
    // What the library demands of a matrix beside C: NVIDIA's documentation, `CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD` and `_BATCH_STRIDE`.
    if kind.has_kept() && !(ld.is_multiple_of(8) && (*count == 1 || step.is_multiple_of(8))) {
        return None;
    }
    if kind == phalanx_cuda::Epilogue::RowSums && *count > 1 {
        return None;
    }
    // A plan may read these in vectors, and its choice does not take their addresses into account.
    let kept = epilogue.tensor().map(|kept| address(kept, if kind.has_kept() { *start } else { 0 }));
    let beside = kept.into_iter().chain(products.bias.map(Tensor::device_address));
    if beside.into_iter().any(|address| !address.is_multiple_of(16)) {
        return None;
    }
    let align = |tensor: &Tensor, start: usize| {
        ALIGNMENT_MAX.min(1 << address(tensor, start).trailing_zeros().min(32)) as u32
    };
    Some(ProductForm {
        float: float(a.tensor.dtype()),
        out_float: float(c.dtype()),
        count: *count,
        size: [*m, *n, *k],
        a: MatrixLayout::of(*m, *k, a.strides)?,
        b: MatrixLayout::of(*k, *n, b.strides)?,
        c: MatrixLayout { in_columns: false, ld, step: *step },
        accumulate: products.accumulate,
        bias: products.bias.is_some(),
        epilogue: kind,
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
