//! Elements added by index.

use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_tensor::{DType, Dim, Error, Result, Tensor, bf16, f16};

use super::gather::{check_index, loops};
use super::summand::{End, Summand};
use super::{all_in_range, check_range, cuda, indices};
use crate::check;
use crate::dispatch::Kernels;
use crate::pointwise::PIECE;
use crate::source::{BLOCK, Source};

/// `x`, with `source[.., i, ..]` added at `[.., index[.., i, ..], ..]`, the index standing in place `dim`. Index and
/// source have one shape, no larger than `x`'s except along `dim`. Floats and integers; what goes to one place is
/// added in row-major order, the halves' in f32.
///
/// # Errors
/// If there is no such dimension, shapes do not fit, dtypes or devices differ, or an index is out of range.
pub fn scatter_add(x: &Tensor, dim: impl Dim, index: &Tensor, source: &Tensor) -> Result<Tensor> {
    add_along(x, dim.resolve(x.rank().max(1), OP)?, index, source)
}

const OP: &str = "scatter_add";

fn add_along(x: &Tensor, dim: usize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
    check::same(OP, &[x, source])?;
    check_index(OP, x, dim, index)?;
    check::shape(OP, "a source", source, index.shape())?;
    add_to(x.copy()?, dim, index, source)
}

/// The gradient of [`crate::gather`] from a tensor of that shape: zeros, with `dy` added at the indices.
///
/// # Errors
/// If shapes do not fit or an index is out of range.
pub fn gather_backward(dy: &Tensor, dim: usize, index: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let out = Tensor::zeros_for("gather_backward", shape, dy.dtype(), dy.device())?;
    check_index(OP, &out, dim, index)?;
    check::shape(OP, "a gradient", dy, index.shape())?;
    add_to(out, dim, index, dy)
}

/// `out` with the elements of `source` added, whose shape is the index's.
fn add_to(mut out: Tensor, dim: usize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
    let index = indices(OP, index, &out)?;
    ADD.run(out.device(), |add| add(OP, dim, &index, source, &mut out))?;
    Ok(out)
}

const ADD: Kernels<Add> = Kernels { cpu: add_on_cpu, cuda: add_on_gpu };

type Add = fn(&'static str, usize, &Tensor, &Tensor, &mut Tensor) -> Result<()>;

fn add_on_gpu(op: &'static str, dim: usize, index: &Tensor, source: &Tensor, out: &mut Tensor) -> Result<()> {
    match out.dtype() {
        DType::Bool => Err(Error::dtype(op, DType::Bool, "a number dtype")),
        _ => cuda::add_elements(op, dim, index, source, out),
    }
}

fn add_on_cpu(op: &'static str, dim: usize, index: &Tensor, source: &Tensor, out: &mut Tensor) -> Result<()> {
    let read = index.read::<i64>(op)?;
    let at = &read[index.offset()..][..index.numel()];
    let fits = match out.dtype() {
        DType::F64 => add::<f64>(op, dim, at, index.shape(), source, out)?,
        DType::F32 => add::<f32>(op, dim, at, index.shape(), source, out)?,
        DType::BF16 => add::<bf16>(op, dim, at, index.shape(), source, out)?,
        DType::F16 => add::<f16>(op, dim, at, index.shape(), source, out)?,
        DType::I64 => add::<i64>(op, dim, at, index.shape(), source, out)?,
        DType::I32 => add::<i32>(op, dim, at, index.shape(), source, out)?,
        DType::U8 => add::<u8>(op, dim, at, index.shape(), source, out)?,
        DType::Bool => return Err(Error::dtype(op, DType::Bool, "a number dtype")),
    };
    if !fits {
        check_range(op, at, out.shape().get(dim).copied().unwrap_or(1))?;
    }
    Ok(())
}

/// Slabs, the parts of `out` at each place of the dimensions before `dim`, are independent. Whether all indices were in
/// range; each slab looks at its own.
fn add<T: Summand>(
    op: &'static str,
    dim: usize,
    at: &[i64],
    index: &[usize],
    source: &Tensor,
    out: &mut Tensor,
) -> Result<bool> {
    if at.is_empty() {
        return Ok(true);
    }
    // Leading dimensions along which the index is as large as the tensor.
    let apart = out.shape()[..dim].iter().zip(index).take_while(|(a, b)| a == b).count();
    let (loops, along) = loops(&out.shape()[apart..], dim - apart, &index[apart..]);
    let (slab, points) = (out.shape()[apart..].iter().product(), index[apart..].iter().product::<usize>());
    let size = out.shape().get(dim).copied().unwrap_or(1);
    let (numel, pool, fits) = (out.numel(), out.device().pool()?, AtomicBool::new(true));
    let source = Source::<T>::open(op, source, source.shape())?;
    let (inner, [stride]) = (loops.inner(), loops.inner_strides());
    let add_slab = |nth: usize, sums: &mut [T::Sum], scratch: &mut [T], added: &mut [T::Sum]| {
        for (run, start) in (0..loops.runs()).flat_map(|run| (0..inner).step_by(BLOCK).map(move |s| (run, s)))
        {
            let (first, count) = (nth * points + run * inner + start, BLOCK.min(inner - start));
            let (at, added) = (&at[first..][..count], &mut added[..count]);
            if !all_in_range(at, size) {
                return fits.store(false, Ordering::Relaxed);
            }
            T::begin_all(added, source.block(first, count, scratch));
            let sums = &mut sums[loops.start(run)[0] + start * stride..];
            match (stride, along) {
                (0, 1) => {
                    let sums = &mut sums[..size];
                    for (&x, &at) in added.iter().zip(at) {
                        let sum = &mut sums[at as usize];
                        *sum = T::add(*sum, x);
                    }
                }
                _ => {
                    for (j, (&x, &at)) in added.iter().zip(at).enumerate() {
                        let sum = &mut sums[j * stride + at as usize * along];
                        *sum = T::add(*sum, x);
                    }
                }
            }
        }
    };
    let slabs_a_piece = PIECE.div_ceil(slab);
    let mut target = out.write::<T>(op)?;
    pool.for_each_chunk(&mut target[..numel], slabs_a_piece * slab, |piece, target| {
        // Outside of the loop: to clear them takes longer than a short slab.
        let (mut wide, mut scratch, mut added) = (Vec::new(), [T::zeroed(); BLOCK], [T::ZERO; BLOCK]);
        for (i, target) in target.chunks_mut(slab).enumerate() {
            let nth = piece * slabs_a_piece + i;
            if let Some(sums) = T::as_sums(target) {
                add_slab(nth, sums, &mut scratch, &mut added);
                continue;
            }
            wide.resize(slab, T::ZERO);
            T::begin_all(&mut wide, target);
            add_slab(nth, &mut wide, &mut scratch, &mut added);
            T::end_all(target, &wide, End::Store);
        }
    });
    Ok(fits.into_inner())
}
