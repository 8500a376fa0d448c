//! Copies between layouts: the only elements that this crate moves.

use bytemuck::Pod;

use crate::layout::contiguous_strides;
use crate::streaming::StreamingStores;
use crate::tiles::{PIECE, Tiles};
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
            copy_loops(&pool, target, source, &Loops::new(layout.shape(), [&rows, layout.strides()]));
        }
        None => copy_runs(&pool, target, source, &loops, StreamingStores::pay(size_of_val(target))),
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
    copy_loops(&pool, target, &source[from.offset()..], &loops);
    Ok(())
}

/// Elements of a run from which on it is copied by itself, as far as it lies together.
const LONG: usize = 32;

/// Elements that a thread copies at a time at most, and how many pieces there are at least if they are larger than [`PIECE`].
const PIECE_MAX: usize = 1 << 18;
const PIECES: usize = 64;
/// Elements of a run from which on streaming stores pay: few of its cache lines are written in part.
const STREAMED_RUN_MIN: usize = 256;

/// Copies run by run; with `streams`, long runs by streaming stores. A piece may begin and end inside a run. Pieces of a large tensor are
/// larger, because the processor prefetches memory that is read in order.
fn copy_runs<T: Pod + Send + Sync>(
    pool: &Pool,
    target: &mut [T],
    source: &[T],
    loops: &Loops<1>,
    streams: bool,
) {
    let (inner, [stride]) = (loops.inner(), loops.inner_strides());
    let streams = streams && stride == 1 && inner >= STREAMED_RUN_MIN;
    let size = (target.len() / PIECES).clamp(PIECE, PIECE_MAX).next_multiple_of(PIECE);
    pool.for_each_chunk(target, size, |piece, mut rest| {
        let mut runs = Runs::new(loops, piece * size / inner);
        let mut skip = piece * size % inner;
        let mut stores = streams.then(StreamingStores::default);
        while !rest.is_empty() {
            let (run, after) = rest.split_at_mut(rest.len().min(inner - skip));
            let from = &source[runs.start + skip * stride..];
            match &mut stores {
                Some(stores) => {
                    let from = bytemuck::cast_slice(&from[..run.len()]);
                    stores.put(bytemuck::cast_slice_mut(run), from);
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

/// Copies `from` into `to` loop by loop. Both begin at the first element. The loops' first strides are those of `to`, larger outside than
/// inside; the second are those of `from`.
///
/// The two innermost loops are one function ([`copy_plane`]), with forms for what is common: runs that lie together, runs of a few
/// elements, and every second, third or fourth element. So a run of three elements costs no call and no search for its place.
fn copy_loops<T: Pod + Send + Sync>(pool: &Pool, to: &mut [T], from: &[T], loops: &Loops<2>) {
    split(pool, to, from, loops.sizes(), loops.strides());
}

/// Splits the outermost loop over the pool. If one step of it is a large piece already, splits the loop inside, step by step.
fn split<T: Pod + Send + Sync>(
    pool: &Pool,
    to: &mut [T],
    from: &[T],
    sizes: &[usize],
    strides: &[[usize; 2]],
) {
    let inside: usize = sizes[1..].iter().product();
    let [to_stride, from_stride] = strides[0];
    if inside > PIECE {
        for i in 0..sizes[0] {
            split(pool, &mut to[i * to_stride..], &from[i * from_stride..], &sizes[1..], &strides[1..]);
        }
        return;
    }
    let steps = (PIECE / inside).max(1);
    let reach: usize = sizes[1..].iter().zip(&strides[1..]).map(|(n, stride)| (n - 1) * stride[0]).sum();
    let to = &mut to[..(sizes[0] - 1) * to_stride + reach + 1];
    pool.for_each_chunk(to, steps * to_stride, |piece, to| {
        let first = piece * steps;
        let mut sizes = crate::Dims::from_slice(sizes);
        sizes[0] = steps.min(sizes[0] - first);
        copy_nest(to, &from[first * from_stride..], &sizes, strides);
    });
}

fn copy_nest<T: Pod>(to: &mut [T], from: &[T], sizes: &[usize], strides: &[[usize; 2]]) {
    match (sizes, strides) {
        (&[n], &[stride]) => copy_plane(to, from, [1, n], [[1, 1], stride]),
        (&[m, n], &[outer, inner]) => copy_plane(to, from, [m, n], [outer, inner]),
        _ => {
            for i in 0..sizes[0] {
                let [to_stride, from_stride] = strides[0];
                copy_nest(&mut to[i * to_stride..], &from[i * from_stride..], &sizes[1..], &strides[1..]);
            }
        }
    }
}

/// `m` runs of `n` elements.
fn copy_plane<T: Pod>(to: &mut [T], from: &[T], [m, n]: [usize; 2], [down, across]: [[usize; 2]; 2]) {
    match (n, across) {
        (2, [1, _]) => copy_short_runs::<T, 2>(to, from, m, down, across[1]),
        (3, [1, _]) => copy_short_runs::<T, 3>(to, from, m, down, across[1]),
        (4, [1, _]) => copy_short_runs::<T, 4>(to, from, m, down, across[1]),
        _ => {
            for i in 0..m {
                copy_run_to(&mut to[i * down[0]..], &from[i * down[1]..], n, across);
            }
        }
    }
}

/// `m` runs of `N` elements that are written side by side.
fn copy_short_runs<T: Pod, const N: usize>(
    to: &mut [T],
    from: &[T],
    m: usize,
    down: [usize; 2],
    across: usize,
) {
    let whole = (m - 1) * down[1] + 1;
    let columns: [&[T]; N] = std::array::from_fn(|j| &from[j * across..][..whole]);
    match down {
        [to_stride, 1] if to_stride == N => {
            for (i, to) in to.chunks_exact_mut(N).take(m).enumerate() {
                to.iter_mut().zip(&columns).for_each(|(to, column)| *to = column[i]);
            }
        }
        [to_stride, from_stride] => {
            for i in 0..m {
                let to = &mut to[i * to_stride..][..N];
                to.iter_mut().zip(&columns).for_each(|(to, column)| *to = column[i * from_stride]);
            }
        }
    }
}

fn copy_run_to<T: Pod>(to: &mut [T], from: &[T], n: usize, across: [usize; 2]) {
    match across {
        [1, 0] => to[..n].fill(from[0]),
        [1, 1] if n < 8 => to[..n].iter_mut().zip(&from[..n]).for_each(|(to, &from)| *to = from),
        [1, 1] => to[..n].copy_from_slice(&from[..n]),
        [1, 2] => copy_every::<T, 2>(&mut to[..n], from),
        [1, 3] => copy_every::<T, 3>(&mut to[..n], from),
        [1, 4] => copy_every::<T, 4>(&mut to[..n], from),
        [to_stride, 0] => to.iter_mut().step_by(to_stride).take(n).for_each(|to| *to = from[0]),
        [to_stride, from_stride] => {
            let from = from.iter().step_by(from_stride).take(n);
            to.iter_mut().step_by(to_stride).zip(from).for_each(|(to, &from)| *to = from);
        }
    }
}

/// Every `N`-th element.
fn copy_every<T: Pod, const N: usize>(to: &mut [T], from: &[T]) {
    let Some((last, to)) = to.split_last_mut() else { return };
    *last = from[to.len() * N];
    to.iter_mut().zip(from.chunks_exact(N)).for_each(|(to, from)| *to = from[0]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_past_the_caches_are_copies() {
        let source: Vec<u32> = (0..200_000).collect();
        for (shape, strides) in
            [([1, 99_999], [0, 1]), ([7, 300], [301, 1]), ([300, 300], [1, 301]), ([9, 999], [0, 1])]
        {
            let loops = Loops::new(&shape, [&strides]);
            let run = |streams: bool| {
                let mut target = vec![0; shape[0] * shape[1]];
                copy_runs(&Pool::new(2), &mut target, &source[3..], &loops, streams);
                target
            };
            assert_eq!(run(true), run(false), "{shape:?}");
        }
    }

    #[test]
    fn elements_of_every_size_go_where_the_strides_say() {
        check(|i| i as u8);
        check(|i| i as u16);
        check(|i| i as u32);
        check(|i| i as u64);
    }

    /// Every form of the inner loops, one and several pieces, and gaps that stay as they are.
    fn check<T: bytemuck::Pod + Send + Sync + PartialEq>(number: fn(usize) -> T) {
        let pool = Pool::new(2);
        let source: Vec<T> = (0..300_000).map(number).collect();
        for sizes in [[1, 1, 1], [1, 1, 7], [33, 5, 2], [3, 129, 3], [129, 7, 4], [2, 3, 5], [2, 700, 33]] {
            for gaps in [[0, 0, 1], [1, 0, 1], [0, 3, 1], [2, 5, 2], [0, 0, 3]] {
                for from in [[1, 1, 1], [0, 3, 1], [50, 1, 700], [7, 0, 2], [2, 1, 3], [9, 40, 4], [1, 20, 0]]
                {
                    let inner = gaps[2];
                    let middle = (sizes[2] - 1) * inner + 1 + gaps[1];
                    let outer = (sizes[1] - 1) * middle + (sizes[2] - 1) * inner + 1 + gaps[0];
                    let strides = [outer, middle, inner];
                    let length =
                        (sizes[0] - 1) * outer + (sizes[1] - 1) * middle + (sizes[2] - 1) * inner + 1;
                    let (mut to, mut wanted) = (vec![number(99); length + 3], vec![number(99); length + 3]);
                    for i in 0..sizes[0] {
                        for j in 0..sizes[1] {
                            for k in 0..sizes[2] {
                                let place = |s: [usize; 3]| i * s[0] + j * s[1] + k * s[2];
                                wanted[place(strides)] = source[place(from)];
                            }
                        }
                    }
                    copy_loops(&pool, &mut to, &source, &Loops::new(&sizes, [&strides, &from]));
                    assert!(to == wanted, "{sizes:?} to {strides:?} from {from:?}");
                }
            }
        }
    }
}
