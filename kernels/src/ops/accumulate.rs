//! Adding to a tensor in place.

use phalanx_tensor::{Result, Tensor};

use crate::ops::cast::cast;
use crate::real::{Real, for_real};
use crate::source::Source;
use crate::{check, strided};

/// `to += x`, in place: `to` may be any view into a buffer, and `x` of another floating-point dtype, which is
/// converted first. The bits are those of the sum computed apart.
///
/// # Errors
/// If shapes or devices differ, a dtype is no floating-point one, or `x` overlaps `to` otherwise than exactly.
pub fn accumulate_(to: &mut Tensor, x: &Tensor) -> Result<()> {
    const OP: &str = "accumulate";
    check::same_device(OP, &[to, x])?;
    check::float(OP, to)?;
    check::float(OP, x)?;
    check::shape(OP, "a tensor", x, &to.shape().to_vec())?;
    let x = if to.shares_storage(x) { x.copy()? } else { cast(x, to.dtype())? };
    if to.device().is_meta() {
        to.bump_version();
        return Ok(());
    }
    for_real!(OP, to.dtype(), T => accumulate::<T>(OP, to, &x))
}

fn accumulate<T: Real>(op: &'static str, to: &mut Tensor, x: &Tensor) -> Result<()> {
    let source = Source::<T>::open(op, x, x.shape())?;
    let (layout, pool) = (to.layout().clone(), to.device().pool()?);
    let mut target = to.write::<T>(op)?;
    let add = |to: &mut T, x: T| *to = T::narrow(to.widen() + x.widen());
    if layout.is_contiguous() {
        let target = &mut target[layout.offset()..][..layout.numel()];
        pool.for_each_chunk(target, crate::pointwise::PIECE, |piece, target| {
            let mut scratch = [T::zeroed(); crate::source::BLOCK];
            for (i, target) in target.chunks_mut(crate::source::BLOCK).enumerate() {
                let start = piece * crate::pointwise::PIECE + i * crate::source::BLOCK;
                let block = source.block(start, target.len(), &mut scratch);
                target.iter_mut().zip(block).for_each(|(to, &x)| add(to, x));
            }
        });
        return Ok(());
    }
    let mut start = 0;
    strided::for_each_run_mut(&mut target, &layout, |run| {
        run.for_each(|_, to| {
            let mut one = [T::zeroed()];
            add(to, source.block(start, 1, &mut one)[0]);
            start += 1;
        });
    });
    Ok(())
}
