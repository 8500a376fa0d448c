//! Elements by index.

use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_tensor::{Dim, Dims, Error, Loops, Result, Tensor};

use super::{all_in_range, check_range, cuda, indices};
use crate::dispatch::Kernels;
use crate::ops::copy::elements;
use crate::pointwise::PIECE;

/// `y[.., i, ..] = x[.., index[.., i, ..], ..]`, the index standing in place `dim`. The index is no larger than `x`
/// except along `dim`.
///
/// # Errors
/// If there is no such dimension, the index has another rank, is too large or not i64 or i32, or is out of range.
pub fn gather(x: &Tensor, dim: impl Dim, index: &Tensor) -> Result<Tensor> {
    gather_along(x, dim.resolve(x.rank().max(1), OP)?, index)
}

const OP: &str = "gather";

fn gather_along(x: &Tensor, dim: usize, index: &Tensor) -> Result<Tensor> {
    check_index(OP, x, dim, index)?;
    let index = indices(OP, index, x)?;
    let mut out = Tensor::empty_for(OP, index.shape(), x.dtype(), x.device())?;
    GATHER.run(out.device(), |gather| gather(OP, x, dim, &index, &mut out))?;
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
