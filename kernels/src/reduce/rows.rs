//! The reduced elements lie together: each output is a row's.

use phalanx_tensor::Result;

use super::{Combine, Finish, Frame, Reduction, Term};
use crate::gemm::with_scratch;
use crate::pointwise::piece_of;
use crate::real::Real;
use crate::simd::{Float, Isa, Kernel, Vector, each};
use crate::source::{BLOCK, Source};

/// Vectors that are filled side by side: enough to hide an addition's latency and to keep chains short.
const SIDE: usize = 8;
/// Rows that are handed to the vectors at once, at most.
const ROWS: usize = 128;
/// Blocks that are read at once where elements lie across memory: enough rows of a block each to be turned.
const ACROSS: usize = 16;

pub(super) fn fold<T: Real, U: Send, const K: usize>(
    op: &'static str,
    frame: &Frame,
    reduction: Reduction<'_, T::Wide, K>,
    out: &mut [U],
    finish: Finish<'_, U, K>,
) -> Result<()> {
    let source = Source::<T>::open(op, &frame.view, frame.view.shape())?;
    if frame.n > BLOCK {
        return fold_long(&source, frame, reduction, out, finish);
    }
    let (n, pool) = (frame.n, frame.view.device().pool()?);
    // What lies as it is computed with needs no room, so that many rows are one call.
    let room = if source.is_across() { ACROSS * BLOCK } else { BLOCK };
    let rows_a_block = if source.is_wide() { ROWS } else { (room / n.max(1)).clamp(1, ROWS) };
    let rows_a_piece = piece_of(out.len() * n).div_ceil(n.max(1)).next_multiple_of(rows_a_block);
    pool.for_each_chunk(out, rows_a_piece, |piece, out| {
        let mut parts = [[0.0; K]; ROWS];
        with_scratch(if source.is_wide() { 0 } else { rows_a_block * n }, |scratch| {
            for (i, out) in out.chunks_mut(rows_a_block).enumerate() {
                let row = piece * rows_a_piece + i * rows_a_block;
                let x = source.wide(row * n, out.len() * n, scratch);
                let parts = &mut parts[..out.len()];
                reduction.fold.rows(Rows { x, n, shifts: reduction.shifts_of(row..row + out.len()), parts });
                finish(row, parts, out);
            }
        });
    });
    Ok(())
}

/// Rows of several blocks: first each block, then each row's blocks.
fn fold_long<T: Real, U: Send, const K: usize>(
    source: &Source<'_, T>,
    frame: &Frame,
    reduction: Reduction<'_, T::Wide, K>,
    out: &mut [U],
    finish: Finish<'_, U, K>,
) -> Result<()> {
    let (n, device) = (frame.n, frame.view.device());
    let (blocks, pool) = (n.div_ceil(BLOCK), device.pool()?);
    let mut parts = vec![[0.0; K]; blocks * out.len()];
    let _use = device.ledger()?.scratch_of(size_of_val(&parts[..]));
    let blocks_a_piece = piece_of(parts.len() * BLOCK) / BLOCK;
    pool.for_each_chunk(&mut parts, blocks_a_piece, |piece, parts| {
        let at_once = (if source.is_across() { 4 * ACROSS } else { 4 }).min(parts.len());
        with_scratch(if source.is_wide() { 0 } else { at_once * BLOCK }, |scratch| {
            let mut known = 0;
            while known < parts.len() {
                let (row, start) = divide(piece * blocks_a_piece + known, blocks, BLOCK);
                let count = at_once.min(parts.len() - known).min(blocks - start / BLOCK);
                let x = source.wide(row * n + start, (count * BLOCK).min(n - start), scratch);
                let (shifts, parts) = (reduction.shifts_of(row..row + 1), &mut parts[known..][..count]);
                let whole = if shifts.is_empty() { x.len() / BLOCK } else { 0 };
                let (x, rest) = x.split_at(whole * BLOCK);
                let (parts, others) = parts.split_at_mut(whole);
                reduction.fold.rows(Rows { x, n: BLOCK, shifts, parts });
                for (x, part) in rest.chunks(BLOCK).zip(others) {
                    let parts = std::slice::from_mut(part);
                    reduction.fold.rows(Rows { x, n: x.len(), shifts, parts });
                }
                known += count;
            }
        });
    });
    pool.for_each_chunk(out, BLOCK.div_ceil(blocks), |piece, out| {
        for (i, to) in out.iter_mut().enumerate() {
            let row = piece * BLOCK.div_ceil(blocks) + i;
            let total = reduction.pairwise(&parts[row * blocks..][..blocks]);
            finish(row, &[total], std::slice::from_mut(to));
        }
    });
    Ok(())
}

/// The row of block number `block`, and its first element there.
fn divide(block: usize, blocks: usize, size: usize) -> (usize, usize) {
    (block / blocks, block % blocks * size)
}

/// Some rows of `n` elements each.
pub(super) struct Rows<'a, W, const K: usize> {
    x: &'a [W],
    n: usize,
    shifts: &'a [W],
    parts: &'a mut [[f64; K]],
}

/// What is done with them.
pub(super) struct Of<'a, W, C, F, const K: usize> {
    pub(super) combine: C,
    pub(super) term: F,
    pub(super) rows: Rows<'a, W, K>,
}

impl<W: Float, C: Combine, F: Term<K>, const K: usize> Kernel for Of<'_, W, C, F, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let Rows { x, n, shifts, parts } = self.rows;
        for (row, part) in parts.iter_mut().enumerate() {
            let shift = shifts.get(row).copied().unwrap_or(W::ZERO);
            *part = fold_row::<S, W, C, F, K>(self.combine, &x[row * n..][..n], self.term, shift);
        }
    }
}

#[inline(always)]
fn fold_row<S: Isa, W: Float, C: Combine, F: Term<K>, const K: usize>(
    _: C,
    x: &[W],
    term: F,
    shift: W,
) -> [f64; K] {
    let lanes = <W::Vec<S> as Vector>::LANES;
    let (fill, shift) = (term.neutral(shift), W::Vec::<S>::splat(shift));
    let mut sides = [[W::Vec::<S>::splat(W::from_f64(C::START)); K]; SIDE];
    let mut wide = x.chunks_exact(SIDE * lanes);
    for x in &mut wide {
        for (side, x) in sides.iter_mut().zip(x.chunks_exact(lanes)) {
            let terms = term.of(W::Vec::<S>::load(x), shift);
            *side = each(|k| C::merge(side[k], terms[k]));
        }
    }
    for (side, x) in sides.iter_mut().zip(wide.remainder().chunks(lanes)) {
        let x = if x.len() == lanes { W::Vec::<S>::load(x) } else { W::Vec::<S>::load_partial(x, fill) };
        let terms = term.of(x, shift);
        *side = each(|k| C::merge(side[k], terms[k]));
    }
    let mut half = SIDE / 2;
    while half > 0 {
        for i in 0..half {
            sides[i] = each(|k| C::merge(sides[i][k], sides[i + half][k]));
        }
        half /= 2;
    }
    each(|k| C::across(sides[0][k]).to_f64())
}
