//! Rows by index.

use phalanx_tensor::{Dim, Dims, Error, Result, Tensor};

use super::{check_range, cuda, indices};
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
    if out.device().is_meta() {
        return Ok(out);
    }
    if out.device().is_cuda() {
        cuda::rows(op, &x, dim, &index, &mut out)?;
        return Ok(out);
    }
    let read = index.read::<i64>(op)?;
    let at = &read[index.offset()..][..index.numel()];
    check_range(op, at, x.shape()[dim])?;
    match x.dtype().size() {
        1 => copy::<u8>(op, &x, dim, at, &mut out)?,
        2 => copy::<u16>(op, &x, dim, at, &mut out)?,
        4 => copy::<u32>(op, &x, dim, at, &mut out)?,
        _ => copy::<u64>(op, &x, dim, at, &mut out)?,
    }
    Ok(out)
}

fn copy<T: bytemuck::Pod + Send + Sync>(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    at: &[i64],
    out: &mut Tensor,
) -> Result<()> {
    let (n, numel, pool) = (x.shape()[dim], out.numel(), out.device().pool()?);
    let inner: usize = x.shape()[dim + 1..].iter().product();
    if numel == 0 {
        return Ok(());
    }
    let bytes = x.read_bytes(op)?;
    let source = &elements::<T>(&bytes)[x.offset()..];
    let mut target = out.write_bytes(op)?;
    let target = &mut bytemuck::cast_slice_mut::<u8, T>(&mut target)[..numel];
    let rows_a_piece = PIECE.div_ceil(inner);
    pool.for_each_chunk(target, rows_a_piece * inner, |piece, target| {
        let first = piece * rows_a_piece;
        let (mut start, mut position) = (first / at.len() * n, first % at.len());
        let mut next = || {
            let from = (start + at[position] as usize) * inner;
            position += 1;
            if position == at.len() {
                (start, position) = (start + n, 0);
            }
            from
        };
        match inner {
            1 => target.iter_mut().for_each(|to| *to = source[next()]),
            _ => target.chunks_mut(inner).for_each(|row| row.copy_from_slice(&source[next()..][..inner])),
        }
    });
    Ok(())
}
