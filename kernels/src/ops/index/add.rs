//! Rows and elements added by index.
//!
//! [`ADD_FLOATS`] and [`ADD_NUMBERS`] sort the positions by the row that they name, so that one thread owns each
//! destination row and adds to it over ascending positions: the bits are the same for any number of threads. Rows of
//! one element are added position by position instead, to sums of all rows.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_tensor::{DType, Dim, Dims, Error, Pool, Result, Scalar, Tensor};

use super::cuda::{self, Rows};
use super::select::{check_index, loops};
use super::summand::{End, Summand, prefetch_bytes};
use super::{all_in_range, check_range, indices};
use crate::block_reader::{BLOCK, BlockReader};
use crate::check;
use crate::dispatch::Kernels;
use crate::ops::creation::fill_;
use crate::pointwise::PIECE;
use crate::real::{for_number, for_real};

/// `x`, with `alpha` times part `i` of `source` added to its part `index[i]` along `dim`, for each `i`. Floats and
/// integers; what goes to one part is summed first, in ascending order.
///
/// # Errors
/// If there is no such dimension, shapes do not fit, dtypes or devices differ, or an index is out of range.
pub fn index_add(x: &Tensor, dim: impl Dim, index: &Tensor, source: &Tensor, alpha: f64) -> Result<Tensor> {
    add_along(x, dim.resolve(x.rank(), OP)?, index, source, alpha)
}

const OP: &str = "index_add";

fn add_along(x: &Tensor, dim: usize, index: &Tensor, source: &Tensor, alpha: f64) -> Result<Tensor> {
    check::same(OP, &[x, source])?;
    if x.dtype() != DType::Bool {
        Scalar::Float(alpha).fitting(OP, x.dtype())?;
    }
    let mut shape = Dims::from_slice(x.shape());
    shape[dim] = index.numel();
    check::shape(OP, "a source", source, &shape)?;
    if index.rank() > 1 {
        return Err(Error::shape(OP, format!("an index of shape {:?}", index.shape()), "one dimension"));
    }
    let index = indices(OP, index, x)?;
    let mut out = x.copy()?;
    let sizes = [out.shape()[dim], out.shape()[dim + 1..].iter().product()];
    let end = Rows::AddScaled(alpha);
    ADD_NUMBERS.run(out.device(), |add_rows| add_rows(OP, &index, source, sizes, &mut out, end))?;
    Ok(out)
}

/// The gradient of [`crate::index_select`] from a tensor of that shape, given that of its result: for each part the sum of
/// those of `dy` whose index names it, ascending, begun at 0.
///
/// # Errors
/// If shapes do not fit, the dtype is no floating-point one, or an index is out of range.
pub fn index_select_backward(dy: &Tensor, dim: usize, index: &Tensor, shape: &[usize]) -> Result<Tensor> {
    const OP: &str = "index_select_backward";
    let mut picked = Dims::from_slice(shape);
    picked[dim] = index.numel();
    check::shape(OP, "a gradient", dy, &picked)?;
    let index = indices(OP, index, dy)?;
    let sizes = [shape[dim], shape[dim + 1..].iter().product()];
    let mut out = Tensor::empty_for(OP, shape, dy.dtype(), dy.device())?;
    let end = Rows::Store { padding: None };
    ADD_FLOATS.run(out.device(), |add_rows| add_rows(OP, &index, dy, sizes, &mut out, end))?;
    Ok(out)
}

/// `x`, with `source[.., i, ..]` added at `[.., index[.., i, ..], ..]`, the index standing in place `dim`. Index and
/// source have one shape, no larger than `x`'s except along `dim`. Floats and integers; what goes to one place is
/// added in row-major order, the halves' in f32.
///
/// # Errors
/// If there is no such dimension, shapes do not fit, dtypes or devices differ, or an index is out of range.
pub fn scatter_add(x: &Tensor, dim: impl Dim, index: &Tensor, source: &Tensor) -> Result<Tensor> {
    scatter_along(x, dim.resolve(x.rank().max(1), SCATTER_OP)?, index, source)
}

const SCATTER_OP: &str = "scatter_add";

fn scatter_along(x: &Tensor, dim: usize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
    check::same(SCATTER_OP, &[x, source])?;
    check_index(SCATTER_OP, x, dim, index)?;
    check::shape(SCATTER_OP, "a source", source, index.shape())?;
    add_to(x.copy()?, dim, index, source)
}

/// The gradient of [`crate::gather`] from a tensor of that shape: zeros, with `dy` added at the indices.
///
/// # Errors
/// If shapes do not fit or an index is out of range.
pub fn gather_backward(dy: &Tensor, dim: usize, index: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let out = Tensor::zeros_for("gather_backward", shape, dy.dtype(), dy.device())?;
    check_index(SCATTER_OP, &out, dim, index)?;
    check::shape(SCATTER_OP, "a gradient", dy, index.shape())?;
    add_to(out, dim, index, dy)
}

/// `out` with the elements of `source` added, whose shape is the index's.
fn add_to(mut out: Tensor, dim: usize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
    let index = indices(SCATTER_OP, index, &out)?;
    SCATTER.run(out.device(), |add| add(SCATTER_OP, dim, &index, source, &mut out))?;
    Ok(out)
}

const SCATTER: Kernels<Scatter> = Kernels { cpu: scatter_on_cpu, cuda: scatter_on_gpu };

type Scatter = fn(&'static str, usize, &Tensor, &Tensor, &mut Tensor) -> Result<()>;

fn scatter_on_gpu(
    op: &'static str,
    dim: usize,
    index: &Tensor,
    source: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    match out.dtype() {
        DType::Bool => Err(Error::dtype(op, DType::Bool, "a number dtype")),
        _ => cuda::add_elements(op, dim, index, source, out),
    }
}

fn scatter_on_cpu(
    op: &'static str,
    dim: usize,
    index: &Tensor,
    source: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let read = index.read::<i64>(op)?;
    let at = &read[index.offset()..][..index.numel()];
    let fits = for_number!(op, out.dtype(), T => add::<T>(op, dim, at, index.shape(), source, out))?;
    if !fits {
        check_range(op, at, out.shape().get(dim).copied().unwrap_or(1))?;
    }
    Ok(())
}

/// Adds element by element. Slabs (the parts of `out` at each position of the dimensions before `dim`) are independent, and threads take whole
/// slabs. Returns whether all indices were in range; each slab checks its own.
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
    let source = BlockReader::<T>::open(op, source, source.shape())?;
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

/// Adds rows of floating-point elements.
pub(super) const ADD_FLOATS: Kernels<AddRows> = Kernels { cpu: add_floats, cuda: cuda::add_rows };
/// Adds rows of floating-point elements or integers.
pub(super) const ADD_NUMBERS: Kernels<AddRows> = Kernels { cpu: add_numbers, cuda: add_numbers_on_gpu };

/// Adds the rows of a source to those of the contiguous output, `[outer, rows, inner]`, that the index names.
type AddRows = fn(&'static str, &Tensor, &Tensor, [usize; 2], &mut Tensor, Rows) -> Result<()>;

fn add_floats(
    op: &'static str,
    index: &Tensor,
    source: &Tensor,
    sizes: [usize; 2],
    out: &mut Tensor,
    what: Rows,
) -> Result<()> {
    let (end, padding) = what.end();
    for_real!(op, source.dtype(), T => add_rows::<T>(op, index, source, sizes, out, end))?;
    padding.map_or(Ok(()), |padding| fill_(&mut out.narrow(0, padding, 1)?, 0))
}

fn add_numbers(
    op: &'static str,
    index: &Tensor,
    source: &Tensor,
    sizes: [usize; 2],
    out: &mut Tensor,
    what: Rows,
) -> Result<()> {
    let (end, _) = what.end();
    for_number!(op, source.dtype(), T => add_rows::<T>(op, index, source, sizes, out, end))
}

fn add_numbers_on_gpu(
    op: &'static str,
    index: &Tensor,
    source: &Tensor,
    sizes: [usize; 2],
    out: &mut Tensor,
    what: Rows,
) -> Result<()> {
    match source.dtype() {
        DType::Bool => Err(Error::dtype(op, DType::Bool, "a number dtype")),
        _ => cuda::add_rows(op, index, source, sizes, out, what),
    }
}

/// How many positions ahead rows are prefetched, and how many bytes of each.
const AHEAD: usize = 6;
const PREFETCHED_MAX: usize = 512;

/// The positions of an index, sorted by the row that they name (a counting sort).
struct Owners {
    /// Where each row's positions begin, and the end of the last.
    starts: Vec<usize>,
    /// Positions, by row, ascending.
    positions: Vec<usize>,
}

impl Owners {
    fn new(indices: &[i64], rows: usize) -> Owners {
        let (mut starts, mut positions) = (vec![0; rows + 2], vec![0; indices.len()]);
        indices.iter().for_each(|&i| starts[i as usize + 2] += 1);
        (0..rows).for_each(|row| starts[row + 2] += starts[row + 1]);
        // While a row's positions are written, its start moves to the start of the next row.
        for (position, &i) in indices.iter().enumerate() {
            let next = &mut starts[i as usize + 1];
            positions[*next] = position;
            *next += 1;
        }
        Owners { starts, positions }
    }

    /// The range of [`Owners::positions`] that a row has.
    fn of(&self, row: usize) -> Range<usize> {
        self.starts[row]..self.starts[row + 1]
    }
}

/// Adds to each row of `out`, contiguous and seen as `[outer, rows, inner]`, the rows of `source`, seen as
/// `[outer, positions, inner]`, whose position in `indices` names it.
fn add_rows<T: Summand>(
    op: &'static str,
    indices: &Tensor,
    source: &Tensor,
    [rows, inner]: [usize; 2],
    out: &mut Tensor,
    end: End,
) -> Result<()> {
    let (offset, numel, device) = (out.offset(), out.numel(), out.device());
    let indices_read = indices.read::<i64>(op)?;
    let at = &indices_read[indices.offset()..][..indices.numel()];
    check_range(op, at, rows)?;
    if numel == 0 {
        return Ok(());
    }
    let words = if inner == 1 { 2 * rows } else { rows + 2 + at.len() };
    let _use = device.ledger()?.scratch_of(words * size_of::<usize>());
    let source = BlockReader::<T>::open(op, source, source.shape())?;
    let (pool, mut target) = (device.pool()?, out.write::<T>(op)?);
    let target = &mut target[offset..][..numel];
    match inner {
        1 => add_elements(&pool, at, &source, rows, target, end),
        _ => add_owned(&pool, &Owners::new(at, rows), &source, [rows, at.len(), inner], target, end),
    }
    Ok(())
}

/// Adds rows of several elements: each destination row sums its own positions, ascending.
fn add_owned<T: Summand>(
    pool: &Pool,
    owners: &Owners,
    source: &BlockReader<'_, T>,
    [rows, count, inner]: [usize; 3],
    target: &mut [T],
    end: End,
) {
    let rows_a_piece = PIECE.div_ceil(inner);
    pool.for_each_chunk(target, rows_a_piece * inner, |piece, target| {
        let (mut scratch, mut sums) = ([T::zeroed(); BLOCK], [T::ZERO; BLOCK]);
        let (mut outer, mut row) = (piece * rows_a_piece / rows, piece * rows_a_piece % rows);
        for target in target.chunks_mut(inner) {
            let (line, own) = (outer * count, owners.of(row));
            (outer, row) = if row + 1 == rows { (outer + 1, 0) } else { (outer, row + 1) };
            if own.is_empty() {
                if let End::Store = end {
                    target.fill(T::zeroed());
                }
                continue;
            }
            for (part, target) in target.chunks_mut(BLOCK).enumerate() {
                let sums = &mut sums[..target.len()];
                if let End::Store = end {
                    sums.fill(T::ZERO);
                }
                let start = |position: usize| (line + position) * inner + part * BLOCK;
                for nth in own.clone() {
                    // Rows of the source are read in another order than memory's, so that the hardware does not prefetch them.
                    let ahead = owners.positions.get(nth + AHEAD).and_then(|&p| source.address(start(p)));
                    ahead.into_iter().for_each(|at| {
                        prefetch_bytes(at.cast(), (sums.len() * size_of::<T>()).min(PREFETCHED_MAX))
                    });
                    let x = source.block(start(owners.positions[nth]), sums.len(), &mut scratch);
                    match end {
                        End::Add | End::AddScaled(_) if nth == own.start => T::begin_all(sums, x),
                        _ => T::add_all(sums, x),
                    }
                }
                T::end_all(target, sums, end);
            }
        }
    });
}

/// Adds rows of one element: position by position into sums of all rows of a line.
fn add_elements<T: Summand>(
    pool: &Pool,
    at: &[i64],
    source: &BlockReader<'_, T>,
    rows: usize,
    target: &mut [T],
    end: End,
) {
    let stores = matches!(end, End::Store);
    let mut named = vec![stores; rows];
    if !stores {
        at.iter().for_each(|&i| named[i as usize] = true);
    }
    let lines_a_piece = PIECE.div_ceil(rows);
    pool.for_each_chunk(target, lines_a_piece * rows, |piece, target| {
        let (mut scratch, mut added) = ([T::zeroed(); BLOCK], [T::ZERO; BLOCK]);
        let mut sums = vec![T::ZERO; rows];
        for (i, target) in target.chunks_mut(rows).enumerate() {
            let line = piece * lines_a_piece + i;
            sums.fill(if stores { T::ZERO } else { T::NOTHING });
            for (part, at_part) in at.chunks(BLOCK).enumerate() {
                let x = source.block(line * at.len() + part * BLOCK, at_part.len(), &mut scratch);
                let added = &mut added[..x.len()];
                T::begin_all(added, x);
                for (&x, &i) in added.iter().zip(at_part) {
                    let sum = &mut sums[i as usize];
                    *sum = T::add(*sum, x);
                }
            }
            let parts = target.chunks_mut(BLOCK).zip(sums.chunks(BLOCK)).zip(named.chunks(BLOCK));
            for ((target, sums), named) in parts {
                let old = &mut scratch[..target.len()];
                old.copy_from_slice(target);
                T::end_all(target, sums, end);
                // A row that no index names keeps its bits.
                for ((to, &old), &named) in target.iter_mut().zip(&*old).zip(named) {
                    *to = if named { *to } else { old };
                }
            }
        }
    });
}
