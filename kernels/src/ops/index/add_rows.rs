//! Rows added to the rows that indices name.
//!
//! The positions are sorted by the row that they name, so that each destination row is owned by one thread and its
//! additions form a chain over ascending positions: the bits are the same for any number of threads.

use phalanx_tensor::{Element, Result, Tensor};

use super::check_range;
use super::summand::Summand;
use crate::pointwise::PIECE;
use crate::source::{BLOCK, Source};

/// The positions that name each row.
struct Owners {
    /// Where each row's positions begin, and the end of the last.
    starts: Vec<usize>,
    /// Positions, by row, ascending.
    positions: Vec<usize>,
}

impl Owners {
    fn new(indices: &[i64], rows: usize) -> Owners {
        let mut starts = vec![0; rows + 1];
        indices.iter().for_each(|&i| starts[i as usize + 1] += 1);
        (0..rows).for_each(|row| starts[row + 1] += starts[row]);
        let (mut next, mut positions) = (starts.clone(), vec![0; indices.len()]);
        for (position, &i) in indices.iter().enumerate() {
            positions[next[i as usize]] = position;
            next[i as usize] += 1;
        }
        Owners { starts, positions }
    }

    fn of(&self, row: usize) -> &[usize] {
        &self.positions[self.starts[row]..self.starts[row + 1]]
    }
}

/// For each row of `out`, seen as `[outer, rows, inner]`, the sum of the rows of `source`, seen as
/// `[outer, positions, inner]`, whose position in `indices` names it. `put` stores a row's part, of which a sum came;
/// a row that nothing names goes to `rest`.
#[allow(clippy::too_many_arguments)] // a kernel: its shapes and its two ends
pub(super) fn add_rows<T: Summand, U: Element>(
    op: &'static str,
    indices: &Tensor,
    source: &Tensor,
    rows: usize,
    inner: usize,
    out: &mut Tensor,
    put: impl Fn(&mut [U], &[T::Sum]) + Sync,
    rest: impl Fn(&mut [U]) + Sync,
) -> Result<()> {
    let (offset, numel, device) = (out.offset(), out.numel(), out.device());
    let indices_read = indices.read::<i64>(op)?;
    let at = &indices_read[indices.offset()..][..indices.numel()];
    check_range(op, at, rows)?;
    if numel == 0 {
        return Ok(());
    }
    let owners = Owners::new(at, rows);
    let _use = device.ledger()?.scratch_of((2 * (rows + 1) + at.len()) * size_of::<usize>());
    let source = Source::<T>::open(op, source, source.shape())?;
    let mut target = out.write::<U>(op)?;
    let rows_a_piece = PIECE.div_ceil(inner);
    device.pool()?.for_each_chunk(&mut target[offset..][..numel], rows_a_piece * inner, |piece, target| {
        let (mut scratch, mut sums) = ([T::zeroed(); BLOCK], [T::ZERO; BLOCK]);
        for (i, target) in target.chunks_mut(inner).enumerate() {
            let row = piece * rows_a_piece + i;
            let (outer, positions) = (row / rows, owners.of(row % rows));
            if positions.is_empty() {
                rest(target);
                continue;
            }
            for (part, target) in target.chunks_mut(BLOCK).enumerate() {
                let sums = &mut sums[..target.len()];
                for (nth, position) in positions.iter().enumerate() {
                    let start = (outer * at.len() + position) * inner + part * BLOCK;
                    let x = source.block(start, sums.len(), &mut scratch);
                    match nth {
                        0 => sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum = x.widen()),
                        _ => sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum = T::add(*sum, x.widen())),
                    }
                }
                put(target, sums);
            }
        }
    });
    Ok(())
}
