//! Rows by index.

use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_tensor::{Dim, Dims, Error, Result, Tensor};

use super::{all_in_range, check_range, cuda, indices};
use crate::dispatch::Kernels;
use crate::ops::copy::elements;
use crate::pointwise::PIECE;

/// The parts of `x` at the indices along `dim`, in their order; an index may come several times.
///
/// # Errors
/// If there is no such dimension, `index` has more than one dimension or is not i64 or i32, or an index is out of
/// range.
pub fn index_select(x: &Tensor, dim: impl Dim, index: &Tensor) -> Result<Tensor> {
    select_along(x, dim.resolve(x.rank(), OP)?, index)
}

const OP: &str = "index_select";

fn select_along(x: &Tensor, dim: usize, index: &Tensor) -> Result<Tensor> {
    if index.rank() > 1 {
        return Err(Error::shape(OP, format!("an index of shape {:?}", index.shape()), "one dimension"));
    }
    let mut shape = Dims::from_slice(x.shape());
    shape[dim] = index.numel();
    select(OP, x, dim, index, &shape)
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

const ROWS: Kernels<Rows> = Kernels { cpu: rows_on_cpu, cuda: cuda::rows };

type Rows = fn(&'static str, &Tensor, usize, &Tensor, &mut Tensor) -> Result<()>;

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
