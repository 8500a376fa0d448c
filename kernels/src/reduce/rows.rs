//! Reductions whose elements of an output are a row ([`ReduceView`] with `inner` 1).
//!
//! ```text
//!  a row of up to BLOCK elements:                                 a longer row:
//!    8 vectors (SIDE) take the row's elements in turns,             each block as on the left, in f32; then the blocks' results
//!    and are merged by halves, then their lanes                     are merged pairwise in f64
//! ```
//!
//! Rows that lie across memory are read several at a time, a lane for each row, and have the bits of rows along memory. [`fold`] is called by
//! [`super::fold`].

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use std::marker::PhantomData;

use phalanx_tensor::Result;

use super::term::{Elements, Half, halves};
use super::{Combine, Finish, ReduceView, Reduction, Stored, Term};
use crate::block_reader::{BLOCK, BlockReader};
use crate::pointwise::piece_of;
use crate::real::{Input, Real};
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector, dispatch, each};

/// Rows that a call of the kernel reduces, at most.
const ROWS: usize = 128;
/// Rows across memory that a call reduces: a few cache lines of neighbouring rows.
const ACROSS: usize = 64;
/// Shorter rows of halves are widened to memory first, many rows at a time: in registers each row's partial vector would cost more.
const SHORT: usize = 256;

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
    if view.n > BLOCK {
        return fold_long(&source, view, reduction, out, finish);
    }
    let (n, pool) = (view.n, view.input.device().pool()?);
    let across = source.across(n).filter(|_| n > 0);
    let halves = T::Wide::HALVES && (n >= SHORT || across.is_some());
    let in_place = source.is_input(halves);
    // Rows that are read in place need no room, so that many of them are one call.
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

/// Rows longer than a block: reduces each block, then merges each row's blocks.
fn fold_long<T: Real, W: Float, U: Send, const K: usize>(
    source: &BlockReader<'_, T>,
    view: &ReduceView,
    reduction: Reduction<'_, T::Wide, W, K>,
    out: &mut [U],
    finish: Finish<'_, U, K>,
) -> Result<()>
where
    T::Wide: Stored<W>,
{
    let (n, device) = (view.n, view.input.device());
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
                    // A run's blocks are read in place.
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

/// If the rows of the input lie across memory and a block is several of them, one after the other: the elements of such a row, how many rows lie
/// beside each other, and the stride of a row's elements.
fn linked<T: Real, W: Float>(source: &BlockReader<'_, T>, n: usize) -> Option<[usize; 3]> {
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

/// Vectors that take the elements of a row in turns: enough to hide an addition's latency and to keep chains short.
pub(super) const SIDE: usize = 8;
/// Vectors of rows across memory that are reduced together, so that memory is read in runs. Twice as many where vectors are narrow.
const RUN: usize = 4;

/// A block of rows of `n` elements each, one after the other.
pub(super) struct Rows<'a, E, W, const K: usize> {
    pub(super) x: Input<'a, E>,
    pub(super) n: usize,
    /// If the rows lie across memory: the stride of a row's elements. The elements of the next rows are their neighbours.
    pub(super) across: Option<usize>,
    /// How many rows across memory, one after the other, make one part: a power of two, at most a vector's lanes. Their
    /// elements are a multiple of the number of chains.
    pub(super) linked: usize,
    pub(super) shifts: &'a [W],
    pub(super) parts: &'a mut [[f64; K]],
}

/// How many lanes a vector of `W` has.
pub(super) struct Lanes<W>(pub(super) PhantomData<W>);

impl<W: Float> Kernel for Lanes<W> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Isa>(self) -> usize {
        <W::Vec<S> as Vector>::LANES
    }
}

/// The kernel that reduces a block of rows.
pub(super) struct OfRows<'a, E, W, C, F, const K: usize> {
    pub(super) combine: C,
    pub(super) term: F,
    pub(super) rows: Rows<'a, E, W, K>,
}

impl<E: Stored<W>, W: Float, C: Combine, F: Term<K>, const K: usize> Kernel for OfRows<'_, E, W, C, F, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        let (c, term, mut rows) = (self.combine, self.term, self.rows);
        let half = match rows.x {
            Input::Wide(x) if rows.across.is_some() => return rows.fold_all_across::<S, C, F, _>(c, term, x),
            Input::Wide(x) => {
                let count = rows.parts.len();
                let transposed = if rows.n <= 2 * lanes { count - count % lanes } else { 0 };
                for row in (0..transposed).step_by(lanes) {
                    match rows.n {
                        2 if lanes >= 2 => rows.fold_dealt::<S, C, F, 2>(c, term, x, row),
                        3 if lanes >= 4 => rows.fold_dealt::<S, C, F, 3>(c, term, x, row),
                        4 if lanes >= 4 => rows.fold_dealt::<S, C, F, 4>(c, term, x, row),
                        _ => rows.fold_transposed::<S, C, F>(c, term, x, row),
                    }
                }
                return rows.fold_rows::<S, C, F, _>(c, term, x, transposed);
            }
            Input::Bf16(x) => Half::Bf16(x),
            Input::F16(x) => Half::F16(x),
            Input::Same(_) | Input::Each(_) => unreachable!("a tensor's elements are none of these"),
        };
        // Not compiled for types that are never widened from halves.
        if E::HALVES {
            match rows.across {
                Some(_) => rows.fold_all_across::<S, C, F, _>(c, term, half),
                None => rows.fold_rows::<S, C, F, _>(c, term, half, 0),
            }
        }
    }
}

impl<E: Stored<W>, W: Float, const K: usize> Rows<'_, E, W, K> {
    /// Reduces the rows from number `first` on, one by one.
    #[inline(always)]
    fn fold_rows<S: Isa, C: Combine, F: Term<K>, X: Elements<W>>(
        &mut self,
        c: C,
        term: F,
        x: X,
        first: usize,
    ) {
        for row in first..self.parts.len() {
            let total = self.fold::<S, C, F, X, SIDE>(c, term, x, row);
            self.parts[row] = each(|k| total[k].reduce(C::merge).to_f64());
        }
    }

    /// Reduces a row, in `N` vectors that take its elements in turns.
    #[inline(always)]
    fn fold<S: Isa, C: Combine, F: Term<K>, X: Elements<W>, const N: usize>(
        &self,
        c: C,
        term: F,
        x: X,
        row: usize,
    ) -> [W::Vec<S>; K] {
        let lanes = <W::Vec<S> as Vector>::LANES;
        let shift = self.shifts.get(row).copied().unwrap_or(W::ZERO);
        let (fill, shift) = (term.neutral(shift), W::Vec::<S>::splat(shift));
        let mut sides = [[W::Vec::<S>::splat(W::from_f64(C::START)); K]; N];
        let (x, whole) = (x.part(row * self.n, self.n), self.n / (N * lanes) * (N * lanes));
        for at in (0..whole).step_by(N * lanes) {
            let x = x.part(at, N * lanes);
            for i in 0..N {
                let terms = term.of(x.load::<S>(i * lanes, lanes, fill), shift);
                sides[i] = each(|k| C::merge(sides[i][k], terms[k]));
            }
        }
        for (side, at) in sides.iter_mut().zip((whole..self.n).step_by(lanes)) {
            let terms = term.of(x.load::<S>(at, lanes.min(self.n - at), fill), shift);
            *side = each(|k| C::merge(side[k], terms[k]));
        }
        halves(c, sides, N)
    }

    /// Reduces as many short rows from number `first` on as there are lanes: a vector a row, then all are transposed.
    #[inline(always)]
    fn fold_transposed<S: Isa, C: Combine, F: Term<K>>(&mut self, c: C, term: F, x: &[E], first: usize) {
        let mut square = [[W::Vec::<S>::zero(); LANES_MAX]; K];
        for i in 0..<W::Vec<S> as Vector>::LANES {
            let row = self.fold::<S, C, F, _, 2>(c, term, x, first + i);
            for (square, row) in square.iter_mut().zip(row) {
                square[i] = row;
            }
        }
        for square in &mut square {
            W::Vec::<S>::transpose(square);
        }
        self.store::<S, C>(c, first, each(|i| each(|k| square[k][i])));
    }

    /// [`Rows::fold_transposed`] for rows of `N` elements, which are read with that stride.
    #[inline(always)]
    fn fold_dealt<S: Isa, C: Combine, F: Term<K>, const N: usize>(
        &mut self,
        c: C,
        term: F,
        x: &[E],
        first: usize,
    ) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        let start = W::Vec::<S>::splat(W::from_f64(C::START));
        let shift = match self.shifts {
            [] => W::Vec::<S>::zero(),
            shifts => W::load::<S>(&shifts[first..], W::ZERO),
        };
        let mut elements = [[start; K]; 4];
        let x = &x[first * N..][..lanes * N];
        for j in 0..N {
            let mut dealt = [x[j]; LANES_MAX];
            for i in 0..lanes {
                dealt[i] = x[i * N + j];
            }
            let terms = term.of(E::load::<S>(&dealt, W::ZERO), shift);
            elements[j] = each(|k| C::merge(start, terms[k]));
        }
        self.store::<S, C>(c, first, each(|i| if i < 4 { elements[i] } else { [start; K] }));
    }

    /// Reduces all rows, which lie across memory: a vector holds one element of several rows.
    #[inline(always)]
    fn fold_all_across<S: Isa, C: Combine, F: Term<K>, X: Elements<W>>(&mut self, c: C, term: F, x: X) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        match (self.n <= lanes, lanes < LANES_MAX) {
            (true, _) => self.fold_across::<S, C, F, X, 1, RUN>(c, term, x),
            (false, false) => self.fold_across::<S, C, F, X, SIDE, RUN>(c, term, x),
            (false, true) => self.fold_across::<S, C, F, X, SIDE, { 2 * RUN }>(c, term, x),
        }
    }

    /// With `N` vectors' worth of chains for a row, `R` vectors of rows at a time.
    #[inline(always)]
    fn fold_across<S: Isa, C: Combine, F: Term<K>, X: Elements<W>, const N: usize, const R: usize>(
        &mut self,
        c: C,
        term: F,
        x: X,
    ) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        let (stride, count) = (self.across.unwrap_or(1), self.parts.len() * self.linked);
        for first in (0..count).step_by(R * lanes) {
            let rows = (count - first).min(R * lanes);
            let shift: [W::Vec<S>; R] = each(|i| match self.shifts {
                [] => W::Vec::<S>::zero(),
                shifts => W::load::<S>(&shifts[first..][(i * lanes).min(rows)..rows], W::ZERO),
            });
            let mut chains = [[[[W::Vec::<S>::zero(); K]; R]; LANES_MAX]; N];
            for chain in 0..N * lanes {
                let elements = (chain..self.n).step_by(N * lanes);
                let at = |j: usize| x.part(j * stride + first, rows);
                chains[chain / lanes][chain % lanes] = match rows == R * lanes {
                    true => {
                        chain_across::<S, W, C, F, K, R>(c, term, shift, elements, self.linked, |j, i| {
                            at(j).load::<S>(i * lanes, lanes, W::ZERO)
                        })
                    }
                    false => {
                        chain_across::<S, W, C, F, K, R>(c, term, shift, elements, self.linked, |j, i| {
                            let from = rows.min(i * lanes);
                            at(j).load::<S>(from, rows.min((i + 1) * lanes) - from, W::ZERO)
                        })
                    }
                };
            }
            for (i, start) in (first..first + rows).step_by(lanes).enumerate() {
                let mut square = [[W::Vec::<S>::zero(); K]; LANES_MAX];
                for lane in 0..lanes {
                    square[lane] = halves(c, each::<_, N>(|side| chains[side][lane][i]), N);
                }
                self.store::<S, C>(c, start, square);
            }
        }
    }

    /// Stores the results of as many rows as there are lanes. `vectors` has a vector of rows for each lane of [`Rows::fold`]'s vector.
    #[inline(always)]
    fn store<S: Isa, C: Combine>(&mut self, c: C, first: usize, vectors: [[W::Vec<S>; K]; LANES_MAX]) {
        let lanes = <W::Vec<S> as Vector>::LANES;
        let mut totals = [[W::ZERO; LANES_MAX]; K];
        let total = halves(c, vectors, lanes);
        for (to, x) in totals.iter_mut().zip(total) {
            x.store(to);
        }
        let parts = self.parts[first / self.linked..].iter_mut().enumerate();
        for (i, part) in parts.take(lanes / self.linked) {
            *part = each(|k| totals[k][(i + 1) * self.linked - 1].to_f64());
        }
    }
}

/// One chain of each of `R` vectors of rows across memory; `load(j, i)` gives element j of vector i.
#[inline(always)]
fn chain_across<S: Isa, W: Float, C: Combine, F: Term<K>, const K: usize, const R: usize>(
    _: C,
    term: F,
    shift: [W::Vec<S>; R],
    elements: impl Iterator<Item = usize> + Clone,
    linked: usize,
    load: impl Fn(usize, usize) -> W::Vec<S>,
) -> [[W::Vec<S>; K]; R] {
    let mut so_far = [[W::Vec::<S>::splat(W::from_f64(C::START)); K]; R];
    for link in 0..linked {
        if link > 0 {
            so_far = each(|i| each(|k| so_far[i][k].one_on()));
        }
        for j in elements.clone() {
            for i in 0..R {
                let terms = term.of(load(j, i), shift[i]);
                so_far[i] = each(|k| C::merge(so_far[i][k], terms[k]));
            }
        }
    }
    so_far
}
