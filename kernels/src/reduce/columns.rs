//! The outputs lie together: columns, reduced over rows without being transposed.
//!
//! ```text
//!     rows  0..64   -> f32, in the first-level cache --+
//!     rows 64..128  -> f32 ----------------------------+-> f64: a part --+
//!     ...                                                                +-> output
//!     the rows of another piece of work -----------------> f64: a part --+
//! ```

use std::ops::Range;

use phalanx_tensor::{Element, Result};

use super::of_columns::{Columns, SIDE};
use super::{Finish, Frame, Reduction, Stored};
use crate::gemm::with_scratch;
use crate::pointwise::Input;
use crate::real::Real;
use crate::simd::Float;
use crate::source::{BLOCK, Source};

/// Rows brought together before f64.
const ROWS: usize = 64;
/// Columns along memory that are read at a time.
const ALONG: usize = 64;
/// Elements that make a piece of work.
const PIECE: usize = 4 * crate::pointwise::PIECE;
/// Outputs whose parts are joined side by side: in f64 they fill a few cache lines.
const LINE: usize = 64;
/// Parts that the rows are split into, at most.
const PARTS_MAX: usize = 64;

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
    let (device, outputs, rows) = (frame.view.device(), out.len(), rows_a_part(frame));
    let (pool, parts) = (device.pool()?, frame.n.div_ceil(rows).max(1));
    let whole = frame.inner.min(BLOCK);
    let width = PIECE.div_ceil(rows.min(frame.n).max(1)).next_multiple_of(whole);
    let run = |slot: usize, scratch: &mut Scratch<T::Wide, W, K>, totals: &mut [[f64; K]]| {
        let (part, output) = (slot / outputs, slot % outputs);
        let rows = part * rows..frame.n.min((part + 1) * rows);
        fold_columns(&source, frame, reduction, rows, output, scratch, totals);
    };
    if parts == 1 {
        pool.for_each_chunk(out, width, |piece, out| {
            let (start, mut scratch, mut totals) =
                (piece * width, Scratch::new(&source, frame.inner), [[0.0; K]; BLOCK]);
            for range in segments(start..start + out.len(), frame.inner, scratch.width()) {
                let totals = &mut totals[..range.len()];
                run(range.start, &mut scratch, totals);
                finish(range.start, totals, &mut out[range.start - start..range.end - start]);
            }
        });
        return Ok(());
    }
    let _use = device.ledger()?.scratch_of(parts * outputs * size_of::<[f64; K]>());
    with_scratch(parts * outputs * K, |slots: &mut [f64]| {
        let slots = slots.as_chunks_mut::<K>().0;
        pool.for_each_chunk(slots, width, |piece, slots| {
            let (start, mut scratch) = (piece * width, Scratch::new(&source, frame.inner));
            for range in segments(start..start + slots.len(), frame.inner, scratch.width()) {
                run(range.start, &mut scratch, &mut slots[range.start - start..range.end - start]);
            }
        });
        pool.for_each_chunk(out, 8 * LINE, |piece, out| {
            for (i, out) in out.chunks_mut(LINE).enumerate() {
                let first = piece * 8 * LINE + i * LINE;
                let mut line = [[0.0; K]; LINE];
                let line = &mut line[..out.len()];
                join_parts(reduction, &slots[first..], outputs, 0..parts, line);
                finish(first, line, out);
            }
        });
    });
    Ok(())
}

/// [`Reduction::pairwise`] of several outputs at a time, of which there is a part at least. Parts begin `apart` from each other.
fn join_parts<E, W: Float, const K: usize>(
    reduction: Reduction<'_, E, W, K>,
    slots: &[[f64; K]],
    apart: usize,
    parts: Range<usize>,
    line: &mut [[f64; K]],
) {
    let part = |part: usize| &slots[part * apart..][..line.len()];
    let middle = parts.start + parts.len().next_power_of_two() / 2;
    match parts.len() {
        1 => return line.copy_from_slice(part(parts.start)),
        2 => {
            let right = part(middle);
            line.copy_from_slice(part(parts.start));
            return reduction.fold.join(line, right);
        }
        _ => {}
    }
    let mut right = [[0.0; K]; LINE];
    let right = &mut right[..line.len()];
    join_parts(reduction, slots, apart, parts.start..middle, line);
    join_parts(reduction, slots, apart, middle..parts.end, right);
    reduction.fold.join(line, right);
}

/// What one thread needs at a time.
struct Scratch<E, W, const K: usize> {
    /// Rows that are gathered, and how many elements there is room for once some are.
    rows: Vec<E>,
    room: usize,
    /// Columns that are being brought together.
    sums: [[W; BLOCK]; K],
    /// See [`Source::across`].
    along: Option<[usize; 2]>,
}

impl<E: Element, W: Float, const K: usize> Scratch<E, W, K> {
    fn new<T: Real<Wide = E>>(source: &Source<'_, T>, inner: usize) -> Self {
        let along = source.across(inner);
        let rows = match source.is_across() && along.is_none() {
            true => 16,
            false => SIDE.max(ALONG * ROWS / BLOCK),
        };
        Scratch { rows: Vec::new(), room: rows * BLOCK, sums: [[W::ZERO; BLOCK]; K], along }
    }

    /// How many columns are brought together at a time.
    fn width(&self) -> usize {
        if self.along.is_some() { ALONG } else { BLOCK }
    }
}

/// How many rows make a part: all of them, unless that leaves too few pieces of work.
fn rows_a_part(frame: &Frame) -> usize {
    if frame.outputs() >= PARTS_MAX * BLOCK {
        return frame.n.max(1);
    }
    let enough = (PIECE / 2).div_ceil(frame.inner.min(BLOCK));
    frame.n.div_ceil(PARTS_MAX).max(enough).next_multiple_of(ROWS)
}

/// A range of outputs cut where a row ends and after `most`.
fn segments(range: Range<usize>, inner: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let len = (inner - start % inner).min(range.end - start).min(most);
        start += len;
        (len > 0).then(|| start - len..start)
    })
}

/// Reduces the columns from `output` on, which lie in one row, over `rows`.
fn fold_columns<T: Real, W: Float, const K: usize>(
    source: &Source<'_, T>,
    frame: &Frame,
    reduction: Reduction<'_, T::Wide, W, K>,
    rows: Range<usize>,
    output: usize,
    scratch: &mut Scratch<T::Wide, W, K>,
    totals: &mut [[f64; K]],
) where
    T::Wide: Stored<W>,
{
    let (width, inner) = (totals.len(), frame.inner);
    let first = output / inner * frame.n * inner + output % inner;
    let (shifts, neutral) = (reduction.shifts_of(output..output + width), reduction.fold.start());
    let Scratch { rows: gathered, room, sums, along } = scratch;
    let halves = T::Wide::HALVES;
    // Blocks and units begin at multiples of `SIDE` rows, so that the same rows meet whatever the layout.
    let unit = if source.is_input(halves) { ROWS } else { (*room / width / SIDE * SIDE).min(ROWS) };
    totals.fill([neutral; K]);
    for block in rows.clone().step_by(ROWS) {
        sums.iter_mut().for_each(|sums| sums[..width].fill(W::from_f64(neutral)));
        let end = rows.end.min(block + ROWS);
        for row in (block..end).step_by(unit) {
            let (rows, start) = (unit.min(end - row), first + row * inner);
            let along = along.filter(|[side, _]| start / inner % side + rows <= *side);
            if !(source.is_input(halves) || along.is_some() && (halves || T::as_wide(&[]).is_some())) {
                gathered.resize(*room, T::Wide::ZERO);
            }
            let (x, stride) = match along {
                Some([_, stride]) => source.lines(start, [width, rows], stride, halves, gathered),
                None if source.is_contiguous() => source.lines(start, [rows, width], inner, halves, gathered),
                None => {
                    source.copy_rows(start, [rows, width], inner, gathered);
                    (Input::Wide(&gathered[..rows * width]), width)
                }
            };
            let along = along.is_some();
            reduction.fold.columns(Columns { x, stride, along, rows, width, shifts, sums: &mut *sums });
        }
        reduction.fold.join_columns(totals, sums);
    }
}
