//! Copies between layouts: the only elements that this crate moves.

use bytemuck::Pod;

use crate::layout::Loops;
use crate::{Error, Result, Tensor};

/// Copies `from`'s elements into the contiguous `to`, of one shape and dtype, on any two devices with elements.
pub(crate) fn copy_strided(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    debug_assert!(to.is_contiguous() && to.shape() == from.shape() && to.dtype() == from.dtype());
    if from.numel() == 0 {
        return Ok(());
    }
    match from.dtype().size() {
        1 => copy::<u8>(op, to, from),
        2 => copy::<u16>(op, to, from),
        4 => copy::<u32>(op, to, from),
        _ => copy::<u64>(op, to, from),
    }
}

/// Elements that a thread copies at least.
const PIECE: usize = 1 << 14;

fn copy<T: Pod + Send + Sync>(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let pool = from.device().pool()?;
    let (offset, numel) = (to.offset(), to.numel());
    let layout = from.layout().clone();
    let source = from.read_bytes(op)?;
    let source: &[T] = bytemuck::cast_slice(&source[..source.len() / size_of::<T>() * size_of::<T>()]);
    let source = source
        .get(layout.offset()..layout.end())
        .ok_or(Error::Invalid { op, why: "the layout reaches beyond its storage".into() })?;
    let mut target = to.write_bytes(op)?;
    let target: &mut [T] = &mut bytemuck::cast_slice_mut(&mut target)[offset..offset + numel];
    let loops = Loops::new(layout.shape(), [layout.strides()]);
    let runs_a_piece = (PIECE / loops.inner().max(1)).max(1);
    let length = runs_a_piece * loops.inner();
    let pieces: Vec<_> = target.chunks_mut(length).map(std::sync::Mutex::new).collect();
    pool.for_each(pieces.len(), |piece| {
        let mut target = pieces[piece].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (i, run) in target.chunks_mut(loops.inner()).enumerate() {
            let start = loops.start(piece * runs_a_piece + i)[0];
            copy_run(run, &source[start..], loops.inner_strides()[0]);
        }
    });
    Ok(())
}

fn copy_run<T: Pod>(to: &mut [T], from: &[T], stride: usize) {
    match stride {
        0 => to.fill(from[0]),
        1 => to.copy_from_slice(&from[..to.len()]),
        _ => to.iter_mut().zip(from.iter().step_by(stride)).for_each(|(to, &from)| *to = from),
    }
}
