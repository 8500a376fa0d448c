//! [`multiply`]: batches of matrix products by cuBLASLt.
//!
//! The library's matrices lie in columns, ours in rows. So the transpose is asked for: `Cᵀ = Bᵀ Aᵀ`, where a matrix in rows
//! is a transpose in columns and needs no flag. A bias of our columns is then one of its rows, which is what it offers.
//!
//! For each form of product (sizes, strides, dtypes, alignment) the library is asked once for an algorithm; so the same
//! form has the same bits each time. f32 is computed in f32, unless `PHALANX_CUDA_TF32=1` allows 19-bit factors; halves are
//! summed in f32. `PHALANX_CUDA_CUBLASLT=0` leaves all products to others.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use super::cublaslt::{Addresses, Handle, Plan};
use super::memory::DeviceBlock;
use super::{Gpu, Library, require};
use crate::{DType, Error, Result, Tensor};

/// Memory that an algorithm may work in, a stream: what NVIDIA advises for these GPUs.
const WORKSPACE_BYTES: usize = 32 << 20;
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

/// What becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sums {
    /// They are stored.
    Plain,
    /// Gelu by tanh of them is.
    Gelu,
    /// The same, and they themselves are stored too.
    GeluKept,
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
    /// Whether the products are added to what is there.
    pub accumulate: bool,
    /// A contiguous value a column.
    pub bias: Option<&'a Tensor>,
    /// What becomes of the sums.
    pub sums: Sums,
    /// With [`Sums::GeluKept`], where the sums go, at the same places as the result; of the factors' dtype.
    pub before: Option<&'a mut Tensor>,
}

/// How a matrix lies: in rows or in columns, which are `ld` elements apart; and the next matrix of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    pub(super) in_columns: bool,
    pub(super) ld: usize,
    pub(super) step: usize,
}

/// All by which two products' algorithms can differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub(super) dtype: DType,
    pub(super) out_dtype: DType,
    pub(super) count: usize,
    pub(super) size: [usize; 3],
    pub(super) a: Layout,
    pub(super) b: Layout,
    pub(super) c: Layout,
    pub(super) accumulate: bool,
    pub(super) bias: bool,
    pub(super) sums: Sums,
    pub(super) tf32: bool,
    /// Of A, B and C, in bytes.
    pub(super) alignment: [u32; 3],
}

/// What a device keeps for its products.
pub(super) struct Engine {
    handle: Handle,
    plans: RwLock<HashMap<Form, Option<Arc<Known>>>>,
    /// By stream.
    workspaces: Mutex<HashMap<usize, DeviceBlock>>,
}

struct Known {
    plan: Plan,
    /// The library has loaded what it needs for it.
    has_run: AtomicBool,
}

/// Computes products; false, and nothing done, if cuBLASLt is not there or does not do such ones.
///
/// # Errors
/// If a matrix exceeds its tensor, dtypes or devices do not fit, a tensor is in use, or the device is lost.
pub fn multiply(op: &'static str, products: Products<'_>) -> Result<bool> {
    let gpu = products.c.0.device().gpu()?;
    check(op, &products)?;
    let (Some(form), Some(library)) = (form(&products), gpu.products(op)?) else { return Ok(false) };
    let size = |dtype: DType| dtype.size() as u64;
    let Products { a, b, c: (c, c_start, _), bias, before, .. } = products;
    let at = |m: &Matrices<'_>| m.tensor.device_address() + m.start as u64 * size(form.dtype);
    let before_at = before.as_deref().map_or(0, |t| t.device_address() + c_start as u64 * size(form.dtype));
    let mut addresses = Addresses {
        a: at(&a),
        b: at(&b),
        c: c.device_address() + c_start as u64 * size(form.out_dtype),
        bias: bias.map_or(0, Tensor::device_address),
        before: before_at,
        workspace: 0,
    };
    let Some(known) = library.plan(op, gpu, &form, &addresses)? else { return Ok(false) };
    let plan = &known.plan;
    if plan.workspace_bytes > 0 {
        addresses.workspace = library.workspace(op, gpu)?;
    }
    let (_a, _b) = (a.tensor.lock_read(op)?, b.tensor.lock_read(op)?);
    let _bias = bias.map(|t| t.lock_read(op)).transpose()?;
    let _c = c.lock_write(op)?;
    let _before = before.map(|t| t.lock_write(op)).transpose()?;
    gpu.bind(op)?;
    // SAFETY: the plan is the form's; `check` proved that all matrices lie in their tensors, which are locked until the
    // call returns and freed in the order of their stream; the workspace is this stream's, and never freed.
    let run = || unsafe { library.handle.run(&form, plan, &addresses, gpu.stream()) };
    gpu.called(op, if known.has_run.load(Ordering::Relaxed) { run() } else { gpu.quietly(run) })?;
    known.has_run.store(true, Ordering::Relaxed);
    gpu.count_launch();
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
fn form(products: &Products<'_>) -> Option<Form> {
    let Products { count, size: [m, n, k], a, b, c: (c, start, [step, row]), .. } = products;
    if [*count, *m, *n, *k].contains(&0) || *count > i32::MAX as usize || (*m > 1 && row < n) {
        return None;
    }
    if products.sums == Sums::GeluKept && products.before.is_none() {
        return None;
    }
    // A plan may read the bias in packets; it is chosen without a look at where the bias lies.
    if products.bias.is_some_and(|bias| !bias.device_address().is_multiple_of(16)) {
        return None;
    }
    let align = |tensor: &Tensor, start: usize| {
        let address = tensor.device_address() + (start * tensor.dtype().size()) as u64;
        ALIGNMENT_MAX.min(1 << address.trailing_zeros().min(32)) as u32
    };
    Some(Form {
        dtype: a.tensor.dtype(),
        out_dtype: c.dtype(),
        count: *count,
        size: [*m, *n, *k],
        a: layout(*m, *k, a.strides)?,
        b: layout(*k, *n, b.strides)?,
        c: Layout { in_columns: false, ld: if *m > 1 { *row } else { *n }, step: *step },
        accumulate: products.accumulate,
        bias: products.bias.is_some(),
        sums: products.sums,
        tf32: is_set("PHALANX_CUDA_TF32", "1", &TF32),
        alignment: [align(a.tensor, a.start), align(b.tensor, b.start), align(c, *start)],
    })
}

/// How matrices lie, if their rows or columns do not overlap and their elements are side by side.
fn layout(rows: usize, cols: usize, [step, row, col]: [usize; 3]) -> Option<Layout> {
    if (col == 1 || cols == 1) && (row >= cols || rows == 1) {
        return Some(Layout { in_columns: false, ld: if rows == 1 { cols } else { row }, step });
    }
    let in_columns = (row == 1 || rows == 1) && (col >= rows || cols == 1);
    in_columns.then_some(Layout { in_columns, ld: if cols == 1 { rows } else { col }, step })
}

/// Whether factors of f32 products may be rounded to 19 bits; whether the library shall not be used.
static TF32: OnceLock<bool> = OnceLock::new();
static REFUSED: OnceLock<bool> = OnceLock::new();

/// Whether the environment says so, looked up once.
fn is_set(name: &str, wanted: &str, known: &OnceLock<bool>) -> bool {
    *known.get_or_init(|| std::env::var_os(name).is_some_and(|value| value == wanted))
}

impl Gpu {
    /// The library on this device, if there is one.
    fn products(&'static self, op: &'static str) -> Result<Option<&'static Engine>> {
        if is_set("PHALANX_CUDA_CUBLASLT", "0", &REFUSED) || require(Library::CublasLt).is_err() {
            return Ok(None);
        }
        if let Some(library) = self.products.get() {
            return Ok(Some(library));
        }
        self.bind(op)?;
        let handle = self.called(op, self.quietly(Handle::new))?;
        let (plans, workspaces) = Default::default();
        Ok(Some(self.products.get_or_init(|| Engine { handle, plans, workspaces })))
    }
}

impl Engine {
    fn plan(&self, op: &'static str, gpu: &Gpu, form: &Form, at: &Addresses) -> Result<Option<Arc<Known>>> {
        let plans = self.plans.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(form) {
            return Ok(plan.clone());
        }
        drop(plans);
        gpu.bind(op)?;
        let plan = gpu.called(op, self.handle.plan(form, at, WORKSPACE_BYTES))?;
        let plan = plan.map(|plan| Arc::new(Known { plan, has_run: AtomicBool::new(false) }));
        let mut plans = self.plans.write().unwrap_or_else(PoisonError::into_inner);
        Ok(plans.entry(*form).or_insert(plan).clone())
    }

    /// The current stream's working memory.
    fn workspace(&self, op: &'static str, gpu: &'static Gpu) -> Result<u64> {
        let mut workspaces = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        match workspaces.entry(gpu.stream().addr()) {
            Entry::Occupied(kept) => Ok(kept.get().address()),
            Entry::Vacant(free) => Ok(free.insert(gpu.allocate(op, WORKSPACE_BYTES)?).address()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_lies_in_rows_or_in_columns_or_in_no_way_that_the_library_knows() {
        let rows = |ld| Some(Layout { in_columns: false, ld, step: 7 });
        let columns = |ld| Some(Layout { in_columns: true, ld, step: 7 });
        assert_eq!(layout(3, 4, [7, 4, 1]), rows(4));
        assert_eq!(layout(3, 4, [7, 9, 1]), rows(9));
        assert_eq!(layout(3, 4, [7, 1, 3]), columns(3));
        assert_eq!(layout(1, 4, [7, 0, 1]), rows(4));
        assert_eq!(layout(1, 4, [7, 1, 5]), columns(5));
        assert_eq!(layout(3, 1, [7, 5, 9]), rows(5));
        assert_eq!(layout(3, 4, [7, 8, 2]), None);
        assert_eq!(layout(3, 4, [7, 0, 1]), None);
    }
}
