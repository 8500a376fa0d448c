//! The outputs lie together: columns, reduced over rows without being transposed.
//!
//! ```text
//!     rows  0..64   -> f32, in the first-level cache --+
//!     rows 64..128  -> f32 ----------------------------+-> f64: a part --+
//!     ...                                                                +-> output
//!     the rows of another piece of work -----------------> f64: a part --+
//! ```

use std::ops::Range;

use phalanx_tensor::Result;

use super::{Combine, Finish, Frame, Reduction, Term};
use crate::gemm::with_scratch;
use crate::real::Real;
use crate::simd::{Float, Isa, Kernel, Vector, each};
use crate::source::{BLOCK, Source};

/// Rows brought together before f64.
const ROWS: usize = 64;
/// Rows read side by side: they are brought together in registers.
const SIDE: usize = 4;
/// Elements that make a piece of work.
const PIECE: usize = 4 * crate::pointwise::PIECE;
/// Outputs whose parts are read side by side: in f64 they fill a cache line.
const LINE: usize = 8;
/// Parts that the rows are split into, at most.
const PARTS_MAX: usize = 64;

pub(super) fn fold<T: Real, U: Send, const K: usize>(
    op: &'static str,
    frame: &Frame,
    reduction: Reduction<'_, T::Wide, K>,
    out: &mut [U],
    finish: Finish<'_, U, K>,
) -> Result<()> {
    let source = Source::<T>::open(op, &frame.view, frame.view.shape())?;
    let (device, outputs, rows) = (frame.view.device(), out.len(), rows_a_part(frame));
    let (pool, parts) = (device.pool()?, frame.n.div_ceil(rows).max(1));
    let whole = frame.inner.min(BLOCK);
    let width = PIECE.div_ceil(rows.min(frame.n).max(1)).next_multiple_of(whole);
    let run = |slot: usize, scratch: &mut Scratch<T::Wide, K>, totals: &mut [[f64; K]]| {
        let (part, output) = (slot / outputs, slot % outputs);
        let rows = part * rows..frame.n.min((part + 1) * rows);
        fold_columns(&source, frame, reduction, rows, output, scratch, totals);
    };
    if parts == 1 {
        pool.for_each_chunk(out, width, |piece, out| {
            let (start, mut scratch, mut totals) = (piece * width, Scratch::new(&source), [[0.0; K]; BLOCK]);
            for range in segments(start..start + out.len(), frame.inner) {
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
            let (start, mut scratch) = (piece * width, Scratch::new(&source));
            for range in segments(start..start + slots.len(), frame.inner) {
                run(range.start, &mut scratch, &mut slots[range.start - start..range.end - start]);
            }
        });
        pool.for_each_chunk(out, 8 * LINE, |piece, out| {
            for (i, out) in out.chunks_mut(LINE).enumerate() {
                let first = piece * 8 * LINE + i * LINE;
                let part = |part: usize| -> Line<K> {
                    let mut line = [[0.0; K]; LINE];
                    line[..out.len()].copy_from_slice(&slots[part * outputs + first..][..out.len()]);
                    line
                };
                let line = join_parts(reduction, &part, 0..parts);
                finish(first, &line[..out.len()], out);
            }
        });
    });
    Ok(())
}

/// Outputs side by side.
type Line<const K: usize> = [[f64; K]; LINE];

/// [`Reduction::pairwise`] of several outputs at a time, of which there is a part at least.
fn join_parts<W: Float, const K: usize>(
    reduction: Reduction<'_, W, K>,
    part: &dyn Fn(usize) -> Line<K>,
    parts: Range<usize>,
) -> Line<K> {
    if parts.len() == 1 {
        return part(parts.start);
    }
    let middle = parts.start + parts.len().next_power_of_two() / 2;
    let mut left = join_parts(reduction, part, parts.start..middle);
    let right = join_parts(reduction, part, middle..parts.end);
    reduction.fold.join(&mut left, &right);
    left
}

/// What one thread needs at a time.
struct Scratch<W, const K: usize> {
    /// Rows that are gathered.
    rows: Vec<W>,
    /// Columns that are being brought together.
    sums: [[W; BLOCK]; K],
}

impl<W: Float, const K: usize> Scratch<W, K> {
    fn new<T: Real<Wide = W>>(source: &Source<'_, T>) -> Self {
        let rows = match source.is_wide() {
            true => 0,
            false if source.is_across() => 16,
            false => SIDE,
        };
        Scratch { rows: vec![W::ZERO; rows * BLOCK], sums: [[W::ZERO; BLOCK]; K] }
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

/// A range of outputs cut where a row ends and after each block.
fn segments(range: Range<usize>, inner: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let len = (inner - start % inner).min(range.end - start).min(BLOCK);
        start += len;
        (len > 0).then(|| start - len..start)
    })
}

/// Reduces the columns from `output` on, which lie in one row, over `rows`.
fn fold_columns<T: Real, const K: usize>(
    source: &Source<'_, T>,
    frame: &Frame,
    reduction: Reduction<'_, T::Wide, K>,
    rows: Range<usize>,
    output: usize,
    scratch: &mut Scratch<T::Wide, K>,
    totals: &mut [[f64; K]],
) {
    let (width, inner) = (totals.len(), frame.inner);
    let first = output / inner * frame.n * inner + output % inner;
    let (shifts, neutral) = (reduction.shifts_of(output..output + width), reduction.fold.start());
    let Scratch { rows: gathered, sums } = scratch;
    // Blocks and units begin at multiples of `SIDE` rows, so that the same rows meet whatever the layout.
    let unit =
        if source.all_wide().is_some() { ROWS } else { (gathered.len() / width / SIDE * SIDE).min(ROWS) };
    totals.fill([neutral; K]);
    for block in rows.clone().step_by(ROWS) {
        sums.iter_mut().for_each(|sums| sums[..width].fill(T::Wide::from_f64(neutral)));
        let end = rows.end.min(block + ROWS);
        for row in (block..end).step_by(unit) {
            let rows = unit.min(end - row);
            let start = first + row * inner;
            let (x, stride) = match source.all_wide() {
                Some(x) => (&x[start..][..(rows - 1) * inner + width], inner),
                None => {
                    source.copy_rows(start, [rows, width], inner, gathered);
                    (&gathered[..rows * width], width)
                }
            };
            reduction.fold.columns(Columns { x, stride, rows, width, shifts, sums: &mut *sums });
        }
        reduction.fold.join_columns(totals, sums);
    }
}

/// Some columns of some rows, brought together with what `sums` holds.
pub(super) struct Columns<'a, W, const K: usize> {
    x: &'a [W],
    stride: usize,
    rows: usize,
    width: usize,
    shifts: &'a [W],
    sums: &'a mut [[W; BLOCK]; K],
}

/// What is done with them.
pub(super) struct Of<'a, W, C, F, const K: usize> {
    pub(super) combine: C,
    pub(super) term: F,
    pub(super) columns: Columns<'a, W, K>,
}

impl<W: Float, C: Combine, F: Term<K>, const K: usize> Kernel for Of<'_, W, C, F, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (mut columns, lanes) = (self.columns, <W::Vec<S> as Vector>::LANES);
        for row in (0..columns.rows).step_by(SIDE) {
            for column in (0..columns.width).step_by(lanes) {
                let part = column + lanes > columns.width;
                let (c, t) = (self.combine, self.term);
                match (row + SIDE <= columns.rows, part) {
                    (true, false) => columns.add::<S, C, F, SIDE, false>(c, t, row, column),
                    (true, true) => columns.add::<S, C, F, SIDE, true>(c, t, row, column),
                    (false, _) => {
                        for row in row..columns.rows {
                            columns.add::<S, C, F, 1, true>(c, t, row, column);
                        }
                    }
                }
            }
        }
    }
}

impl<W: Float, const K: usize> Columns<'_, W, K> {
    /// One vector of columns of `N` rows, a power of two.
    #[inline(always)]
    fn add<S: Isa, C: Combine, F: Term<K>, const N: usize, const PART: bool>(
        &mut self,
        _: C,
        term: F,
        row: usize,
        column: usize,
    ) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        let end = if PART { self.width.min(column + lanes) } else { column + lanes };
        let load = |x: &[W]| if PART { W::Vec::<S>::load_partial(x, W::ZERO) } else { W::Vec::<S>::load(x) };
        let shift = match self.shifts {
            [] => W::Vec::<S>::zero(),
            shifts => load(&shifts[column..end]),
        };
        let mut terms: [[W::Vec<S>; K]; N] = each(|i| {
            let start = (row + i) * self.stride;
            if !PART {
                // The next rows, which are far from these, come near meanwhile. The first-level cache has no room for
                // them where all rows share its places.
                W::Vec::<S>::prefetch_far(self.x.as_ptr().wrapping_add(start + N * self.stride + column));
            }
            term.of(load(&self.x[start + column..start + end]), shift)
        });
        let mut half = N / 2;
        while half > 0 {
            for i in 0..half {
                terms[i] = each(|k| C::merge(terms[i][k], terms[i + half][k]));
            }
            half /= 2;
        }
        for (sums, &term) in self.sums.iter_mut().zip(&terms[0]) {
            let to = &mut sums[column..end];
            let sum = C::merge(load(to), term);
            if PART { sum.store_partial(to) } else { sum.store(to) }
        }
    }
}
