//! Copies between layouts: the only elements that this crate moves.

use bytemuck::Pod;

use crate::layout::contiguous_strides;
use crate::nest;
use crate::past::PastCaches;
use crate::tiles::Tiles;
use crate::{Dims, Error, Loops, Pool, Result, Tensor};

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
    match Tiles::new(&loops) {
        Some(tiles) => tiles.copy(&pool, target, source),
        None if loops.inner() < LONG || loops.inner_strides() != [1] => {
            let rows = contiguous_strides(layout.shape());
            nest::copy(&pool, target, source, &Loops::new(layout.shape(), [&rows, layout.strides()]));
        }
        None => copy_runs(&pool, target, source, &loops, PastCaches::pays(size_of_val(target))),
    }
    Ok(())
}

/// Copies `from`'s elements into `to`, of one shape and dtype, which may lie in any order without overlapping itself; both have
/// elements, on a CPU, and storages of their own.
pub(crate) fn copy_over(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    if to.is_contiguous() {
        return copy_strided(op, to, from);
    }
    match from.dtype().size() {
        1 => copy_any::<u8>(op, to, from),
        2 => copy_any::<u16>(op, to, from),
        4 => copy_any::<u32>(op, to, from),
        _ => copy_any::<u64>(op, to, from),
    }
}

fn copy_any<T: Pod + Send + Sync>(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let (pool, layout) = (to.device().pool()?, to.layout().clone());
    let source = from.read_bytes(op)?;
    let source: &[T] = bytemuck::cast_slice(&source[..source.len() / size_of::<T>() * size_of::<T>()]);
    let mut target = to.write_bytes(op)?;
    let whole = target.len() / size_of::<T>() * size_of::<T>();
    let target = &mut bytemuck::cast_slice_mut::<u8, T>(&mut target[..whole])[layout.offset()..layout.end()];
    let loops = Loops::new(layout.shape(), [layout.strides(), from.strides()]);
    nest::copy(&pool, target, &source[from.offset()..], &loops);
    Ok(())
}

/// Elements of a run from which on it is copied by itself, as far as it lies together.
const LONG: usize = 32;

/// Elements that a thread copies at a time, at least.
pub(crate) const PIECE: usize = 1 << 14;
/// The same at most, and how many pieces there are at least if they are larger than that.
const PIECE_MAX: usize = 1 << 18;
const PIECES: usize = 64;
/// Elements of a run that is worth writing past the caches: few of its lines are not whole.
const RUN_PAST_MIN: usize = 256;

/// Copies run by run, long ones past the caches if told to. A piece may begin and end inside a run; those of a large tensor
/// are larger, as what is read in one go comes near by itself.
fn copy_runs<T: Pod + Send + Sync>(
    pool: &Pool,
    target: &mut [T],
    source: &[T],
    loops: &Loops<1>,
    past: bool,
) {
    let (inner, [stride]) = (loops.inner(), loops.inner_strides());
    let past = past && stride == 1 && inner >= RUN_PAST_MIN;
    let size = (target.len() / PIECES).clamp(PIECE, PIECE_MAX).next_multiple_of(PIECE);
    pool.for_each_chunk(target, size, |piece, mut rest| {
        let mut runs = Runs::new(loops, piece * size / inner);
        let mut skip = piece * size % inner;
        let mut past = past.then(PastCaches::default);
        while !rest.is_empty() {
            let (run, after) = rest.split_at_mut(rest.len().min(inner - skip));
            let from = &source[runs.start + skip * stride..];
            match &mut past {
                Some(past) => {
                    let from = bytemuck::cast_slice(&from[..run.len()]);
                    past.put(bytemuck::cast_slice_mut(run), from);
                }
                None => copy_run(run, from, stride),
            }
            (rest, skip) = (after, 0);
            runs.advance();
        }
    });
}

fn copy_run<T: Pod>(to: &mut [T], from: &[T], stride: usize) {
    match stride {
        0 => to.fill(from[0]),
        1 => to.copy_from_slice(&from[..to.len()]),
        _ => to.iter_mut().zip(from.iter().step_by(stride)).for_each(|(to, &from)| *to = from),
    }
}

/// The runs of a nest of loops, one after the other: [`Loops::start`] without its divisions.
struct Runs<'a> {
    loops: &'a Loops<1>,
    index: Dims,
    start: usize,
}

impl Runs<'_> {
    fn new(loops: &Loops<1>, mut run: usize) -> Runs<'_> {
        let start = loops.start(run)[0];
        let mut index = Dims::from_elem(0, loops.sizes().len() - 1);
        for (index, size) in index.iter_mut().zip(loops.sizes()).rev() {
            *index = run % size;
            run /= size;
        }
        Runs { loops, index, start }
    }

    /// To the next run; from the last one to the first.
    fn advance(&mut self) {
        for axis in (0..self.index.len()).rev() {
            let (size, [stride]) = (self.loops.sizes()[axis], self.loops.strides()[axis]);
            self.index[axis] += 1;
            self.start += stride;
            if self.index[axis] < size {
                return;
            }
            self.index[axis] = 0;
            self.start -= stride * size;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::copy_runs;
    use crate::{Loops, Pool};

    #[test]
    fn copies_past_the_caches_are_copies() {
        let source: Vec<u32> = (0..200_000).collect();
        for (shape, strides) in
            [([1, 99_999], [0, 1]), ([7, 300], [301, 1]), ([300, 300], [1, 301]), ([9, 999], [0, 1])]
        {
            let loops = Loops::new(&shape, [&strides]);
            let run = |past: bool| {
                let mut target = vec![0; shape[0] * shape[1]];
                copy_runs(&Pool::new(2), &mut target, &source[3..], &loops, past);
                target
            };
            assert_eq!(run(true), run(false), "{shape:?}");
        }
    }
}
