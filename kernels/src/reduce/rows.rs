//! The reduced elements lie together: each output is a row's.

use std::marker::PhantomData;

use phalanx_tensor::Result;

use super::of_rows::{Lanes, Rows, SIDE};
use super::{Finish, Frame, Reduction, Stored};
use crate::gemm::with_scratch;
use crate::pointwise::piece_of;
use crate::real::Real;
use crate::simd::{Float, LANES_MAX, dispatch};
use crate::source::{BLOCK, Source};

/// Rows that are handed to the vectors at once, at most.
const ROWS: usize = 128;
/// Rows across memory that are handed to them: a few cache lines of each element of theirs.
const ACROSS: usize = 64;
/// Halves of shorter rows are widened first, many rows at a time, because each row's end costs more than that.
const SHORT: usize = 256;

pub(super) fn fold<T: Real, W: Float, U: Send, const K: usize>(
    op: &'static str,
    frame: &Frame,
    reduction: Reduction<'_, T::Wide, W, K>,
    out: &mut [U],
    finish: Finish<'_, U, K>,
) -> Result<()>
where
    T::Wide: Stored<W>,
{
    let source = Source::<T>::open(op, &frame.view, frame.view.shape())?;
    if frame.n > BLOCK {
        return fold_long(&source, frame, reduction, out, finish);
    }
    let (n, pool) = (frame.n, frame.view.device().pool()?);
    let across = source.across(n).filter(|_| n > 0);
    let halves = T::Wide::HALVES && (n >= SHORT || across.is_some());
    let in_place = source.is_input(halves);
    // What lies as it is computed with needs no room, so that many rows are one call.
    let room = if source.is_across() { LANES_MAX * BLOCK } else { 4 * BLOCK };
    let rows_a_block = match across {
        Some(_) => ACROSS,
        None if in_place => (8 * BLOCK / n.max(1)).clamp(1, ROWS),
        None => (room / n.max(1)).clamp(1, ROWS),
    };
    let rows_a_piece = piece_of(out.len() * n).div_ceil(n.max(1)).next_multiple_of(rows_a_block);
    pool.for_each_chunk(out, rows_a_piece, |piece, out| {
        let (mut parts, mut row) = ([[0.0; K]; ROWS], piece * rows_a_piece);
        with_scratch(if in_place || across.is_some() && halves { 0 } else { rows_a_block * n }, |scratch| {
            let mut out = out;
            while !out.is_empty() {
                let most = across.map_or(rows_a_block, |[side, _]| rows_a_block.min(side - row % side));
                let (block, rest) = out.split_at_mut(most.min(out.len()));
                let (rows, parts) = (block.len(), &mut parts[..block.len()]);
                let (x, across) = match across {
                    Some([_, stride]) => {
                        let (x, stride) = source.lines(row * n, [n, rows], stride, halves, scratch);
                        (x, Some(stride))
                    }
                    None => (source.input(row * n, rows * n, halves, scratch), None),
                };
                let shifts = reduction.shifts_of(row..row + rows);
                reduction.fold.rows(Rows { x, n, across, linked: 1, shifts, parts });
                finish(row, parts, block);
                (out, row) = (rest, row + rows);
            }
        });
    });
    Ok(())
}

/// Rows of several blocks: first each block, then each row's blocks.
fn fold_long<T: Real, W: Float, U: Send, const K: usize>(
    source: &Source<'_, T>,
    frame: &Frame,
    reduction: Reduction<'_, T::Wide, W, K>,
    out: &mut [U],
    finish: Finish<'_, U, K>,
) -> Result<()>
where
    T::Wide: Stored<W>,
{
    let (n, device) = (frame.n, frame.view.device());
    let (blocks, pool) = (n.div_ceil(BLOCK), device.pool()?);
    let (halves, in_place) = (T::Wide::HALVES, source.is_input(T::Wide::HALVES));
    let mut parts = vec![[0.0; K]; blocks * out.len()];
    let _use = device.ledger()?.scratch_of(size_of_val(&parts[..]));
    let linked = linked::<T, W>(source, n).filter(|_| reduction.shifts.is_empty());
    let at_least = linked.map_or(1, |[n, ..]| ACROSS * n / BLOCK);
    let blocks_a_piece = (piece_of(parts.len() * BLOCK) / BLOCK).next_multiple_of(at_least);
    pool.for_each_chunk(&mut parts, blocks_a_piece, |piece, parts| {
        let at_once = match source.is_across() {
            true => (LANES_MAX * source.run()).div_ceil(BLOCK).clamp(4, 64),
            false if in_place => ROWS,
            false => 4,
        };
        let room = match linked {
            Some(_) if halves => 0,
            Some([n, ..]) => ACROSS * n,
            None if in_place => 0,
            None => at_once * BLOCK,
        };
        with_scratch(room, |scratch| {
            let mut known = 0;
            while known < parts.len() {
                let block = piece * blocks_a_piece + known;
                if let Some([n, side, stride]) = linked {
                    let (linked, row) = (BLOCK / n, block * BLOCK / n);
                    let rows = ACROSS.min(side - row % side).min((parts.len() - known) * linked);
                    let (x, stride) = source.lines(block * BLOCK, [n, rows], stride, halves, scratch);
                    let parts = &mut parts[known..][..rows / linked];
                    reduction.fold.rows(Rows { x, n, across: Some(stride), linked, shifts: &[], parts });
                    known += rows / linked;
                    continue;
                }
                let (row, start) = divide(block, blocks, BLOCK);
                let mut count = at_once.min(parts.len() - known).min(blocks - start / BLOCK);
                let run = source.run();
                if run >= BLOCK && !source.is_across() {
                    // A run's blocks are read where they lie.
                    count = count.min((run - (row * n + start) % run) / BLOCK).max(1);
                }
                let len = (count * BLOCK).min(n - start);
                let x = source.input(row * n + start, len, halves, scratch);
                let (shifts, parts) = (reduction.shifts_of(row..row + 1), &mut parts[known..][..count]);
                let whole = if shifts.is_empty() { len / BLOCK } else { 0 };
                let (parts, others) = parts.split_at_mut(whole);
                reduction.fold.rows(Rows { x, n: BLOCK, across: None, linked: 1, shifts, parts });
                for (i, part) in others.iter_mut().enumerate() {
                    let at = (whole + i) * BLOCK;
                    let (x, n, parts) = (x.from(at), BLOCK.min(len - at), std::slice::from_mut(part));
                    reduction.fold.rows(Rows { x, n, across: None, linked: 1, shifts, parts });
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

/// If rows lie across memory and some of them, one after the other, are a block: how many elements a row has, how many rows lie
/// beside each other, and how far apart a row's elements are.
fn linked<T: Real, W: Float>(source: &Source<'_, T>, n: usize) -> Option<[usize; 3]> {
    let width = source.run();
    let [side, stride] =
        source.across(width).filter(|_| width > 0 && width.is_multiple_of(SIDE * LANES_MAX))?;
    let linked = BLOCK / width;
    let whole = n.is_multiple_of(BLOCK) && BLOCK.is_multiple_of(width) && side.is_multiple_of(linked);
    (whole && linked <= dispatch(Lanes::<W>(PhantomData))).then_some([width, side, stride])
}

/// The row of block number `block`, and its first element there.
fn divide(block: usize, blocks: usize, size: usize) -> (usize, usize) {
    (block / blocks, block % blocks * size)
}
