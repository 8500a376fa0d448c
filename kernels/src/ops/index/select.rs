//! Rows and elements picked by index: [`index_select`], [`gather`] and [`embedding`].

use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_tensor::{Dim, Dims, Error, Loops, Result, Tensor};

use super::add::ADD_FLOATS;
use super::cuda::{self, Rows};
use super::{all_in_range, check_range, indices};
use crate::check;
use crate::dispatch::Kernels;
use crate::ops::in_place::elements;
use crate::pointwise::PIECE;

/// The parts of `x` at the indices along `dim`, in their order; an index may come several times.
///
/// # Errors
/// If there is no such dimension, `index` has more than one dimension or is not i64 or i32, or an index is out of
/// range.
pub fn index_select(x: &Tensor, dim: impl Dim, index: &Tensor) -> Result<Tensor> {
    select_along(x, dim.resolve(x.rank(), SELECT_OP)?, index)
}

const SELECT_OP: &str = "index_select";

fn select_along(x: &Tensor, dim: usize, index: &Tensor) -> Result<Tensor> {
    if index.rank() > 1 {
        return Err(Error::shape(
            SELECT_OP,
            format!("an index of shape {:?}", index.shape()),
            "one dimension",
        ));
    }
    let mut shape = Dims::from_slice(x.shape());
    shape[dim] = index.numel();
    select(SELECT_OP, x, dim, index, &shape)
}

/// [`index_select`] by indices of any shape into any shape with that many elements.
pub(super) fn select(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    index: &Tensor,
    shape: &[usize],
) -> Result<Tensor> {
    let (index, x) = (indices(op, index, x)?, x.contiguous()?);
    let mut out = Tensor::empty_for(op, shape, x.dtype(), x.device())?;
    ROWS.run(out.device(), |rows| rows(op, &x, dim, &index, &mut out))?;
    Ok(out)
}

const ROWS: Kernels<SelectRows> = Kernels { cpu: rows_on_cpu, cuda: cuda::rows };

type SelectRows = fn(&'static str, &Tensor, usize, &Tensor, &mut Tensor) -> Result<()>;

/// `x` is contiguous.
fn rows_on_cpu(op: &'static str, x: &Tensor, dim: usize, index: &Tensor, out: &mut Tensor) -> Result<()> {
    let read = index.read::<i64>(op)?;
    let at = &read[index.offset()..][..index.numel()];
    let fits = match x.dtype().size() {
        1 => copy::<u8>(op, x, dim, at, out)?,
        2 => copy::<u16>(op, x, dim, at, out)?,
        4 => copy::<u32>(op, x, dim, at, out)?,
        _ => copy::<u64>(op, x, dim, at, out)?,
    };
    if !fits || out.numel() == 0 {
        check_range(op, at, x.shape()[dim])?;
    }
    Ok(())
}

/// Whether all indices were in range; each piece looks at its own.
fn copy<T: bytemuck::Pod + Send + Sync>(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    at: &[i64],
    out: &mut Tensor,
) -> Result<bool> {
    let (n, numel, pool) = (x.shape()[dim], out.numel(), out.device().pool()?);
    let inner: usize = x.shape()[dim + 1..].iter().product();
    if numel == 0 {
        return Ok(true);
    }
    let bytes = x.read_bytes(op)?;
    let source = &elements::<T>(&bytes)[x.offset()..];
    let mut target = out.write_bytes(op)?;
    let target = &mut bytemuck::cast_slice_mut::<u8, T>(&mut target)[..numel];
    let (rows_a_piece, fits) = (PIECE.div_ceil(inner), AtomicBool::new(true));
    pool.for_each_chunk(target, rows_a_piece * inner, |piece, mut target| {
        let first = piece * rows_a_piece;
        let (mut outer, mut position) = (first / at.len(), first % at.len());
        while !target.is_empty() {
            let at = &at[position..at.len().min(position + target.len() / inner)];
            if !all_in_range(at, n) {
                return fits.store(false, Ordering::Relaxed);
            }
            let (rows, rest) = target.split_at_mut(at.len() * inner);
            let source = &source[outer * n * inner..][..n * inner];
            match inner {
                1 => rows.iter_mut().zip(at).for_each(|(to, &at)| *to = source[at as usize]),
                _ => rows.chunks_mut(inner).zip(at).for_each(|(row, &at)| {
                    row.copy_from_slice(&source[at as usize * inner..][..inner]);
                }),
            }
            (target, outer, position) = (rest, outer + 1, 0);
        }
    });
    Ok(fits.into_inner())
}

/// `y[.., i, ..] = x[.., index[.., i, ..], ..]`, the index standing in place `dim`. The index is no larger than `x`
/// except along `dim`.
///
/// # Errors
/// If there is no such dimension, the index has another rank, is too large or not i64 or i32, or is out of range.
pub fn gather(x: &Tensor, dim: impl Dim, index: &Tensor) -> Result<Tensor> {
    gather_along(x, dim.resolve(x.rank().max(1), GATHER_OP)?, index)
}

const GATHER_OP: &str = "gather";

fn gather_along(x: &Tensor, dim: usize, index: &Tensor) -> Result<Tensor> {
    check_index(GATHER_OP, x, dim, index)?;
    let index = indices(GATHER_OP, index, x)?;
    let mut out = Tensor::empty_for(GATHER_OP, index.shape(), x.dtype(), x.device())?;
    GATHER.run(out.device(), |gather| gather(GATHER_OP, x, dim, &index, &mut out))?;
    Ok(out)
}

const GATHER: Kernels<Gather> = Kernels { cpu: gather_on_cpu, cuda: cuda::elements };

type Gather = fn(&'static str, &Tensor, usize, &Tensor, &mut Tensor) -> Result<()>;

fn gather_on_cpu(op: &'static str, x: &Tensor, dim: usize, index: &Tensor, out: &mut Tensor) -> Result<()> {
    let x = x.contiguous()?;
    let read = index.read::<i64>(op)?;
    let at = &read[index.offset()..][..index.numel()];
    let fits = match x.dtype().size() {
        1 => pick::<u8>(op, &x, dim, at, out)?,
        2 => pick::<u16>(op, &x, dim, at, out)?,
        4 => pick::<u32>(op, &x, dim, at, out)?,
        _ => pick::<u64>(op, &x, dim, at, out)?,
    };
    if !fits {
        check_range(op, at, x.shape().get(dim).copied().unwrap_or(1))?;
    }
    Ok(())
}

/// The index has the rank of `x` and is no larger except along `dim`.
pub(super) fn check_index(op: &'static str, x: &Tensor, dim: usize, index: &Tensor) -> Result<()> {
    let fits = |(d, (&i, &n)): (usize, (&usize, &usize))| d == dim || i <= n;
    if index.rank() == x.rank() && index.shape().iter().zip(x.shape()).enumerate().all(fits) {
        return Ok(());
    }
    let wanted = format!("the rank of {:?}, and no larger except in dimension {dim}", x.shape());
    Err(Error::shape(op, format!("an index of shape {:?}", index.shape()), wanted))
}

/// Loops over an index's elements, whose stride is that in the contiguous tensor it points into, 0 along `dim`; and
/// the stride along `dim`.
pub(super) fn loops(shape: &[usize], dim: usize, index: &[usize]) -> (Loops<1>, usize) {
    let mut strides: Dims = phalanx_tensor::contiguous_strides(shape);
    let along = strides.get_mut(dim).map_or(1, std::mem::take);
    (Loops::new(index, [&strides]), along)
}

/// Whether all indices were in range; each piece looks at its own.
fn pick<T: bytemuck::Pod + Send + Sync>(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    at: &[i64],
    out: &mut Tensor,
) -> Result<bool> {
    let (numel, pool, (loops, along)) =
        (out.numel(), out.device().pool()?, loops(x.shape(), dim, out.shape()));
    if numel == 0 {
        return Ok(true);
    }
    let bytes = x.read_bytes(op)?;
    let source = &elements::<T>(&bytes)[x.offset()..];
    let mut target = out.write_bytes(op)?;
    let target = &mut bytemuck::cast_slice_mut::<u8, T>(&mut target)[..numel];
    let (size, fits) = (x.shape().get(dim).copied().unwrap_or(1), AtomicBool::new(true));
    let (inner, [stride]) = (loops.inner(), loops.inner_strides());
    let length = PIECE.div_ceil(inner) * inner;
    pool.for_each_chunk(target, length, |piece, target| {
        let at = &at[piece * length..][..target.len()];
        if !all_in_range(at, size) {
            return fits.store(false, Ordering::Relaxed);
        }
        for (i, (run, at)) in target.chunks_mut(inner).zip(at.chunks(inner)).enumerate() {
            let source = &source[loops.start(piece * (length / inner) + i)[0]..];
            match (stride, along) {
                (0, 1) => {
                    let source = &source[..size];
                    run.iter_mut().zip(at).for_each(|(to, &at)| *to = source[at as usize]);
                }
                _ => {
                    for (j, (to, &at)) in run.iter_mut().zip(at).enumerate() {
                        *to = source[j * stride + at as usize * along];
                    }
                }
            }
        }
    });
    Ok(fits.into_inner())
}

/// The rows of `weight [rows, ..]` at the indices, of any shape: `[index's shape, ..]`.
///
/// # Errors
/// If `weight` has no dimension, the indices are not i64 or i32, or one is out of range.
pub fn embedding(weight: &Tensor, index: &Tensor) -> Result<Tensor> {
    const OP: &str = "embedding";
    let [_, row @ ..] = weight.shape() else {
        return Err(Error::shape(OP, "a weight without dimensions", "at least one dimension"));
    };
    let shape: Dims = index.shape().iter().chain(row).copied().collect();
    select(OP, weight, 0, index, &shape)
}

/// The gradient of a table of `rows` rows, given that of [`embedding`]'s result: for each row the sum of `dy` where
/// the index names it, positions ascending; the row `padding` stays zero.
///
/// # Errors
/// If shapes do not fit, dtypes are wrong, or an index is out of range.
pub fn embedding_backward(
    dy: &Tensor,
    index: &Tensor,
    rows: usize,
    padding: Option<usize>,
) -> Result<Tensor> {
    const OP: &str = "embedding_backward";
    let row = row_shape(OP, dy, index)?;
    let shape: Dims = std::iter::once(&rows).chain(row).copied().collect();
    let inner = row.iter().product();
    let index = indices(OP, index, dy)?;
    let mut out = Tensor::empty_for(OP, &shape, dy.dtype(), dy.device())?;
    let end = Rows::Store { padding };
    ADD_FLOATS.run(out.device(), |add_rows| add_rows(OP, &index, dy, [rows, inner], &mut out, end))?;
    Ok(out)
}

/// Adds [`embedding_backward`]'s result to `to [rows, ..]`, with the bits of adding it at the end. False if `to` has
/// a form that this is not made for, and nothing was done.
///
/// # Errors
/// As [`embedding_backward`].
pub fn embedding_backward_accumulate_(
    to: &mut Tensor,
    dy: &Tensor,
    index: &Tensor,
    padding: Option<usize>,
) -> Result<bool> {
    const OP: &str = "embedding_backward";
    let row = row_shape(OP, dy, index)?;
    if padding.is_some() || to.dtype() != dy.dtype() || !to.is_contiguous() || to.shares_storage(dy) {
        return Ok(false);
    }
    let [rows, to_row @ ..] = to.shape() else { return Ok(false) };
    if to_row != row {
        return Err(Error::shape(OP, format!("rows of shape {row:?}"), format!("{to_row:?}")));
    }
    let (rows, inner, index) = (*rows, row.iter().product(), indices(OP, index, dy)?);
    if to.device().is_meta() {
        to.bump_version();
        return Ok(true);
    }
    ADD_FLOATS.run(to.device(), |add_rows| add_rows(OP, &index, dy, [rows, inner], to, Rows::Add))?;
    Ok(true)
}

/// The shape of one row of `dy [index's shape, row]`.
fn row_shape<'a>(op: &'static str, dy: &'a Tensor, index: &Tensor) -> Result<&'a [usize]> {
    check::float(op, dy)?;
    let wrong = || {
        let got = format!("a gradient of shape {:?}", dy.shape());
        Error::shape(op, got, format!("{:?} and a row's shape", index.shape()))
    };
    dy.shape().strip_prefix(index.shape()).ok_or_else(wrong)
}
