//! Rows added to the rows that indices name.
//!
//! The positions are sorted by the row that they name, so that each destination row is owned by one thread and its
//! additions form a chain over ascending positions: the bits are the same for any number of threads. Rows of one element are
//! added position by position instead, to sums of all rows.

use std::ops::Range;

use phalanx_tensor::{DType, Error, Pool, Result, Tensor, bf16, f16};

use super::check_range;
use super::cuda::{self, Rows};
use super::summand::{End, Summand, bring};
use crate::dispatch::Kernels;
use crate::ops::full::fill_;
use crate::pointwise::PIECE;
use crate::real::for_real;
use crate::source::{BLOCK, Source};

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
    match source.dtype() {
        DType::F64 => add_rows::<f64>(op, index, source, sizes, out, end),
        DType::F32 => add_rows::<f32>(op, index, source, sizes, out, end),
        DType::BF16 => add_rows::<bf16>(op, index, source, sizes, out, end),
        DType::F16 => add_rows::<f16>(op, index, source, sizes, out, end),
        DType::I64 => add_rows::<i64>(op, index, source, sizes, out, end),
        DType::I32 => add_rows::<i32>(op, index, source, sizes, out, end),
        DType::U8 => add_rows::<u8>(op, index, source, sizes, out, end),
        DType::Bool => Err(Error::dtype(op, DType::Bool, "a number dtype")),
    }
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

/// So many positions ahead rows are brought near, and so many bytes of each.
const AHEAD: usize = 6;
const BROUGHT_MAX: usize = 512;

/// The positions that name each row.
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
        // A row's start moves up to the next one's while its positions are put down.
        for (position, &i) in indices.iter().enumerate() {
            let next = &mut starts[i as usize + 1];
            positions[*next] = position;
            *next += 1;
        }
        Owners { starts, positions }
    }

    /// Where in [`Owners::positions`] a row's are.
    fn of(&self, row: usize) -> Range<usize> {
        self.starts[row]..self.starts[row + 1]
    }
}

/// Sums for each row of `out`, seen as `[outer, rows, inner]` and contiguous, the rows of `source`, seen as
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
    let source = Source::<T>::open(op, source, source.shape())?;
    let (pool, mut target) = (device.pool()?, out.write::<T>(op)?);
    let target = &mut target[offset..][..numel];
    match inner {
        1 => add_elements(&pool, at, &source, rows, target, end),
        _ => add_owned(&pool, &Owners::new(at, rows), &source, [rows, at.len(), inner], target, end),
    }
    Ok(())
}

fn add_owned<T: Summand>(
    pool: &Pool,
    owners: &Owners,
    source: &Source<'_, T>,
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
                    // The order of positions is not that in memory.
                    let ahead = owners.positions.get(nth + AHEAD).and_then(|&p| source.address(start(p)));
                    ahead
                        .into_iter()
                        .for_each(|at| bring(at.cast(), (sums.len() * size_of::<T>()).min(BROUGHT_MAX)));
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

fn add_elements<T: Summand>(
    pool: &Pool,
    at: &[i64],
    source: &Source<'_, T>,
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
                // What nothing is added to keeps its bits.
                for ((to, &old), &named) in target.iter_mut().zip(&*old).zip(named) {
                    *to = if named { *to } else { old };
                }
            }
        }
    });
}
