//! Elements added by index.

use phalanx_tensor::{DType, Dim, Error, Result, Tensor, bf16, f16};

use super::gather::{check_index, loops};
use super::summand::Summand;
use super::{check_range, cuda, indices};
use crate::check;
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
    let index = indices(OP, index, x)?;
    let mut out = x.copy()?;
    if out.device().is_meta() {
        return Ok(out);
    }
    if out.device().is_cuda() && x.dtype() != DType::Bool {
        cuda::add_elements(OP, dim, &index, source, &mut out)?;
        return Ok(out);
    }
    match x.dtype() {
        DType::F64 => add::<f64>(OP, dim, &index, source, &mut out)?,
        DType::F32 => add::<f32>(OP, dim, &index, source, &mut out)?,
        DType::BF16 => add::<bf16>(OP, dim, &index, source, &mut out)?,
        DType::F16 => add::<f16>(OP, dim, &index, source, &mut out)?,
        DType::I64 => add::<i64>(OP, dim, &index, source, &mut out)?,
        DType::I32 => add::<i32>(OP, dim, &index, source, &mut out)?,
        DType::U8 => add::<u8>(OP, dim, &index, source, &mut out)?,
        DType::Bool => return Err(Error::dtype(OP, DType::Bool, "a number dtype")),
    }
    Ok(out)
}

/// Slabs, the parts of `out` at each place of the dimensions before `dim`, are independent.
fn add<T: Summand>(
    op: &'static str,
    dim: usize,
    index: &Tensor,
    source: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let read = index.read::<i64>(op)?;
    let at = &read[index.offset()..][..index.numel()];
    check_range(op, at, out.shape().get(dim).copied().unwrap_or(1))?;
    if at.is_empty() {
        return Ok(());
    }
    // Leading dimensions along which the index is as large as the tensor.
    let apart = out.shape()[..dim].iter().zip(index.shape()).take_while(|(a, b)| a == b).count();
    let (loops, along) = loops(&out.shape()[apart..], dim - apart, &index.shape()[apart..]);
    let (slab, points) =
        (out.shape()[apart..].iter().product(), index.shape()[apart..].iter().product::<usize>());
    let (numel, pool) = (out.numel(), out.device().pool()?);
    let source = Source::<T>::open(op, source, source.shape())?;
    let (inner, [stride]) = (loops.inner(), loops.inner_strides());
    let add_slab = |nth: usize, sums: &mut [T::Sum], scratch: &mut [T]| {
        for (run, start) in (0..loops.runs()).flat_map(|run| (0..inner).step_by(BLOCK).map(move |s| (run, s)))
        {
            let first = nth * points + run * inner + start;
            let x = source.block(first, BLOCK.min(inner - start), scratch);
            let place = loops.start(run)[0] + start * stride;
            for (j, (&x, &at)) in x.iter().zip(&at[first..]).enumerate() {
                let sum = &mut sums[place + j * stride + at as usize * along];
                *sum = T::add(*sum, x.widen());
            }
        }
    };
    let slabs_a_piece = PIECE.div_ceil(slab);
    let mut target = out.write::<T>(op)?;
    pool.for_each_chunk(&mut target[..numel], slabs_a_piece * slab, |piece, target| {
        let mut scratch = [T::zeroed(); BLOCK];
        for (i, target) in target.chunks_mut(slab).enumerate() {
            let nth = piece * slabs_a_piece + i;
            if let Some(sums) = T::as_sums(target) {
                add_slab(nth, sums, &mut scratch);
                continue;
            }
            let mut sums: Vec<T::Sum> = target.iter().map(|x| x.widen()).collect();
            add_slab(nth, &mut sums, &mut scratch);
            target.iter_mut().zip(sums).for_each(|(to, sum)| *to = T::narrow(sum));
        }
    });
    Ok(())
}
