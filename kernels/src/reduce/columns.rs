//! Reductions whose outputs are neighbours ([`ReduceView`] with a large `inner`): columns, reduced over rows without being transposed.
//!
//! ```text
//!     rows  0..64   -> f32, in the L1 cache -----------+
//!     rows 64..128  -> f32 ----------------------------+-> f64: a part --+
//!     ...                                                                +-> output
//!     the rows of another part --------------------------> f64: a part --+
//! ```
//!
//! [`fold`] is called by [`super::fold`]. Columns that lie along memory (of a transposed input) are read as lines and transposed in registers.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use std::ops::Range;

use phalanx_tensor::{Element, Result};

use super::term::{Elements, Half, halves};
use super::{Combine, Finish, ReduceView, Reduction, Stored, Term};
use crate::block_reader::{BLOCK, BlockReader};
use crate::real::{Input, Real};
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, PARTS_MAX, Vector, each};

/// Rows that are merged in the type that is computed in, before f64.
const ROWS: usize = 64;
/// Columns along memory that are reduced at a time.
const ALONG: usize = 64;
/// Elements of a task.
const PIECE: usize = 4 * crate::pointwise::PIECE;
/// Outputs whose parts are merged together: in f64 they fill a few cache lines.
const LINE: usize = 64;
/// Parts that the rows are split into, at most.
const CUTS_MAX: usize = 64;

pub(super) fn fold<T: Real, W: Float, U: Send, const K: usize>(
    op: &'static str,
    view: &ReduceView,
    reduction: Reduction<'_, T::Wide, W, K>,
    out: &mut [U],
    finish: Finish<'_, U, K>,
) -> Result<()>
where
    T::Wide: Stored<W>,
{
    let source = BlockReader::<T>::open(op, &view.input, view.input.shape())?;
    let (device, outputs, rows) = (view.input.device(), out.len(), rows_a_part(view));
    let (pool, parts) = (device.pool()?, view.n.div_ceil(rows).max(1));
    let whole = view.inner.min(BLOCK);
    let width = PIECE.div_ceil(rows.min(view.n).max(1)).next_multiple_of(whole);
    let run = |slot: usize, scratch: &mut ColumnBuffers<T::Wide, W, K>, totals: &mut [[f64; K]]| {
        let (part, output) = (slot / outputs, slot % outputs);
        let rows = part * rows..view.n.min((part + 1) * rows);
        fold_columns(&source, view, reduction, rows, output, scratch, totals);
    };
    if parts == 1 {
        pool.for_each_chunk(out, width, |piece, out| {
            let (start, mut scratch, mut totals) =
                (piece * width, ColumnBuffers::new(&source, view.inner), [[0.0; K]; BLOCK]);
            for range in segments(start..start + out.len(), view.inner, scratch.width()) {
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
            let (start, mut scratch) = (piece * width, ColumnBuffers::new(&source, view.inner));
            for range in segments(start..start + slots.len(), view.inner, scratch.width()) {
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

/// [`Reduction::pairwise`] for several outputs together. There is one part at least; parts begin `apart` from each other.
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

/// Buffers of one thread.
struct ColumnBuffers<E, W, const K: usize> {
    /// The buffer for gathered rows, empty until some are gathered, and the length that it then gets.
    rows: Vec<E>,
    room: usize,
    /// The sums of a block of columns.
    sums: [[W; BLOCK]; K],
    /// See [`BlockReader::across`].
    along: Option<[usize; 2]>,
}

impl<E: Element, W: Float, const K: usize> ColumnBuffers<E, W, K> {
    fn new<T: Real<Wide = E>>(source: &BlockReader<'_, T>, inner: usize) -> Self {
        let along = source.across(inner);
        let rows = match source.is_across() && along.is_none() {
            true => 16,
            false => SIDE.max(ALONG * ROWS / BLOCK),
        };
        ColumnBuffers { rows: Vec::new(), room: rows * BLOCK, sums: [[W::ZERO; BLOCK]; K], along }
    }

    /// How many columns are reduced at a time.
    fn width(&self) -> usize {
        if self.along.is_some() { ALONG } else { BLOCK }
    }
}

/// How many rows a part has: all of them, unless there would be too few tasks.
fn rows_a_part(view: &ReduceView) -> usize {
    if view.outputs() >= CUTS_MAX * BLOCK {
        return view.n.max(1);
    }
    let enough = (PIECE / 2).div_ceil(view.inner.min(BLOCK));
    view.n.div_ceil(CUTS_MAX).max(enough).next_multiple_of(ROWS)
}

/// A range of outputs, cut where a row of `inner` ends and after `most` outputs.
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
    source: &BlockReader<'_, T>,
    view: &ReduceView,
    reduction: Reduction<'_, T::Wide, W, K>,
    rows: Range<usize>,
    output: usize,
    scratch: &mut ColumnBuffers<T::Wide, W, K>,
    totals: &mut [[f64; K]],
) where
    T::Wide: Stored<W>,
{
    let (width, inner) = (totals.len(), view.inner);
    let first = output / inner * view.n * inner + output % inner;
    let (shifts, neutral) = (reduction.shifts_of(output..output + width), reduction.fold.start());
    let ColumnBuffers { rows: gathered, room, sums, along } = scratch;
    let halves = T::Wide::HALVES;
    // Blocks and units begin at multiples of `SIDE` rows, so that the same rows are merged whatever the layout.
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

/// Rows that are merged in registers before they are added to the sums.
pub(super) const SIDE: usize = 4;
/// With at most so many columns, each vector of columns is reduced over all rows of a block before the next.
const NARROW: usize = 128;

/// A block of columns of some rows, to be merged into `sums`.
pub(super) struct Columns<'a, E, W, const K: usize> {
    pub(super) x: Input<'a, E>,
    /// The stride of rows; of columns, if these lie along memory.
    pub(super) stride: usize,
    pub(super) along: bool,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) shifts: &'a [W],
    pub(super) sums: &'a mut [[W; BLOCK]; K],
}

/// The kernel that reduces a block of columns.
pub(super) struct OfColumns<'a, E, W, C, F, const K: usize> {
    pub(super) combine: C,
    pub(super) term: F,
    pub(super) columns: Columns<'a, E, W, K>,
}

impl<E: Stored<W>, W: Float, C: Combine, F: Term<K>, const K: usize> Kernel for OfColumns<'_, E, W, C, F, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (c, term, mut columns) = (self.combine, self.term, self.columns);
        let half = match columns.x {
            Input::Wide(x) => return columns.add_all::<S, C, F, _>(c, term, x),
            Input::Bf16(x) => Half::Bf16(x),
            Input::F16(x) => Half::F16(x),
            Input::Same(_) | Input::Each(_) => unreachable!("a tensor's elements are none of these"),
        };
        // Not compiled for types that are never widened from halves.
        if E::HALVES {
            columns.add_all::<S, C, F, _>(c, term, half);
        }
    }
}

impl<E: Stored<W>, W: Float, const K: usize> Columns<'_, E, W, K> {
    /// All columns of all rows.
    #[inline(always)]
    fn add_all<S: Isa, C: Combine, F: Term<K>, X: Elements<W>>(&mut self, c: C, term: F, x: X) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        if self.along {
            for column in (0..self.width).step_by(lanes) {
                self.add_transposed::<S, C, F, X>(c, term, x, column);
            }
            return;
        }
        // Few columns stay in the L1 cache while all rows are read; many are read row by row.
        let at_once = if self.width <= NARROW { self.rows } else { SIDE };
        for row in (0..self.rows).step_by(at_once.max(1)) {
            let rows = row..self.rows.min(row + at_once);
            for column in (0..self.width).step_by(lanes) {
                match column + lanes > self.width {
                    false => self.add::<S, C, F, X, false>(c, term, x, rows.clone(), column),
                    true => self.add::<S, C, F, X, true>(c, term, x, rows.clone(), column),
                }
            }
        }
    }

    /// Merges one vector of columns of some rows; `PART` if it lacks lanes.
    #[inline(always)]
    fn add<S: Isa, C: Combine, F: Term<K>, X: Elements<W>, const PART: bool>(
        &mut self,
        c: C,
        term: F,
        x: X,
        rows: Range<usize>,
        column: usize,
    ) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        let end = if PART { self.width.min(column + lanes) } else { column + lanes };
        let shift = match self.shifts {
            [] => W::Vec::<S>::zero(),
            shifts => W::load::<S>(&shifts[column..end], W::ZERO),
        };
        let mut totals: [W::Vec<S>; K] = each(|k| W::load::<S>(&self.sums[k][column..end], W::ZERO));
        let mut row = rows.start;
        while row < rows.end {
            let at = row * self.stride + column;
            let (terms, count) = if row + SIDE <= rows.end {
                let terms = each::<_, SIDE>(|i| {
                    // The next rows, which are far from these, are prefetched meanwhile. The L1 cache has no room for
                    // them where all rows share its places.
                    W::Vec::<S>::prefetch_far(x.address(at + (SIDE + i) * self.stride));
                    term.of(x.load::<S>(at + i * self.stride, end - column, W::ZERO), shift)
                });
                (halves(c, terms, SIDE), SIDE)
            } else {
                (term.of(x.load::<S>(at, end - column, W::ZERO), shift), 1)
            };
            totals = each(|k| C::merge(totals[k], terms[k]));
            row += count;
        }
        for (sums, total) in self.sums.iter_mut().zip(totals) {
            total.store_partial(&mut sums[column..end]);
        }
    }

    /// Merges a vector of columns that lie along memory, over all rows.
    #[inline(always)]
    fn add_transposed<S: Isa, C: Combine, F: Term<K>, X: Elements<W>>(
        &mut self,
        c: C,
        term: F,
        x: X,
        column: usize,
    ) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        let end = self.width.min(column + lanes);
        let shift = match self.shifts {
            [] => W::Vec::<S>::zero(),
            shifts => W::load::<S>(&shifts[column..end], W::ZERO),
        };
        let mut totals: [W::Vec<S>; K] = each(|k| W::load::<S>(&self.sums[k][column..end], W::ZERO));
        let mut row = 0;
        // A square whose size is known stays in registers.
        while lanes >= SIDE && row + lanes <= self.rows && end == column + lanes {
            if lanes == SIDE * W::Vec::<S>::PARTS {
                let terms = self.fours::<S, C, F, X>(c, term, x, row, column);
                for i in 0..W::Vec::<S>::PARTS {
                    totals = each(|k| C::merge(totals[k], terms[k][i]));
                }
            } else {
                let square = self.transposed::<S, X>(x, [row, lanes], [column, lanes]);
                for first in (0..lanes).step_by(SIDE) {
                    let terms = each::<_, SIDE>(|i| term.of(square[first + i], shift));
                    let terms = halves(c, terms, SIDE);
                    totals = each(|k| C::merge(totals[k], terms[k]));
                }
            }
            row += lanes;
        }
        while row < self.rows {
            let rows = if row + SIDE <= self.rows { SIDE } else { 1 };
            let (mut terms, mut square) = ([totals; SIDE], [W::Vec::<S>::zero(); LANES_MAX]);
            for i in 0..rows {
                if i % lanes == 0 {
                    square =
                        self.transposed::<S, X>(x, [row + i, lanes.min(rows - i)], [column, end - column]);
                }
                terms[i] = term.of(square[i % lanes], shift);
            }
            let terms = halves(c, terms, rows);
            totals = each(|k| C::merge(totals[k], terms[k]));
            row += rows;
        }
        for (sums, total) in self.sums.iter_mut().zip(totals) {
            total.store_partial(&mut sums[column..end]);
        }
    }

    /// For as many rows and columns (along memory) as there are lanes: merges each four rows as [`Columns::add`] does, before transposing. A
    /// vector holds rows of one column, and each of its parts four rows; only the merged vectors are transposed.
    #[inline(always)]
    fn fours<S: Isa, C: Combine, F: Term<K>, X: Elements<W>>(
        &self,
        _: C,
        term: F,
        x: X,
        row: usize,
        column: usize,
    ) -> [[W::Vec<S>; PARTS_MAX]; K] {
        let mut fours = [[W::Vec::<S>::zero(); PARTS_MAX]; K];
        for part in 0..W::Vec::<S>::PARTS {
            let first = column + part * SIDE;
            let mut terms = [[W::Vec::<S>::zero(); K]; SIDE];
            for i in 0..SIDE {
                let shift = if self.shifts.is_empty() { W::ZERO } else { self.shifts[first + i] };
                let x = x.load::<S>((first + i) * self.stride + row, <W::Vec<S> as Vector>::LANES, W::ZERO);
                terms[i] = term.of(x, W::Vec::<S>::splat(shift));
            }
            for k in 0..K {
                let (low, high) = terms[0][k].zip_parts(terms[2][k]);
                let even = C::merge(low, high);
                let (low, high) = terms[1][k].zip_parts(terms[3][k]);
                let (low, high) = even.zip_parts(C::merge(low, high));
                fours[k][part] = C::merge(low, high);
            }
        }
        for k in 0..K {
            fours[k] = W::Vec::<S>::transpose_parts(fours[k]);
        }
        fours
    }

    /// Vectors that each hold a row of some columns along memory, at most as many rows and columns as there are lanes.
    #[inline(always)]
    fn transposed<S: Isa, X: Elements<W>>(
        &self,
        x: X,
        [row, rows]: [usize; 2],
        [column, columns]: [usize; 2],
    ) -> [W::Vec<S>; LANES_MAX] {
        let mut square = [W::Vec::<S>::zero(); LANES_MAX];
        for i in 0..columns {
            square[i] = x.load::<S>((column + i) * self.stride + row, rows, W::ZERO);
        }
        W::Vec::<S>::transpose(&mut square);
        square
    }
}
