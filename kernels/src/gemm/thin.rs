//! Products of up to [`THIN_ROWS`] rows, as in decoding token by token: by a B in panels, of halves, and by a large B of f32 or f64 whose columns have
//! their steps side by side. Each element of B is used so few times that packing does not pay: B is read in place, and widened or paired in registers.
//! The sums have the bits of the micro-kernel's.

#![allow(unsafe_code)]

use std::ops::Range;

use phalanx_tensor::Pool;

use super::chunks::{far_apart, in_shares};
use super::element::{GemmElem, PanelElem, steps_on};
use super::epilogue::FinishTile;
use super::pack::Panels;
use super::product::{Product, is_acc};
use super::tile::VECTORS;
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, PARTS_MAX, Vector, follows_few_streams};

/// Rows of A at most.
pub(super) const THIN_ROWS: usize = 4;
/// Columns that a thread takes at a time, and sums that it keeps for them.
const COLS_MAX: usize = 512;
/// The same of a B in panels.
const PANELLED_COLS_MAX: usize = 8192;
/// How many places ahead rows of B are prefetched.
const AHEAD: usize = 8;
/// How many bytes ahead columns are whose steps are neighbours.
const AHEAD_BYTES: usize = 256;
/// The same where they are prefetched [into the second-level cache](Columns::prefetch).
const FAR_AHEAD_BYTES: usize = 1024;
pub(super) const LINE_BYTES: usize = 64;
/// Vectors of columns that have sums in registers at most.
const VECTORS_MAX: usize = 8;

/// How many vectors of columns have registers for the sums of so many rows.
const fn vectors<S: Isa>(rows: usize) -> usize {
    let fitting = (S::REGISTERS - S::FACTORS) / rows;
    if fitting >= VECTORS_MAX { VECTORS_MAX } else { 1 << fitting.ilog2() }
}

/// How many vectors of columns have squares at a time: of short vectors several, as each has one chain of sums for each row, which has more steps
/// for each byte of halves.
const fn squares<T: GemmElem, V: Vector>(rows: usize) -> usize {
    match V::LANES < LANES_MAX {
        true if rows == 1 && size_of::<T>() < size_of::<T::Acc>() => 3,
        true => 2,
        false => 1,
    }
}

impl<T: GemmElem> Product<'_, T> {
    /// [`Product::run`] for [`THIN_ROWS`] at most, and a B in panels or whose columns, or the steps of each, are neighbours; of f32 and f64 the steps.
    ///
    /// # Safety
    ///
    /// [`Product::run`]'s.
    pub(super) unsafe fn run_thin(&self, pool: Option<&Pool>) {
        let ((k, n), width) = ((self.b.rows(), self.b.cols()), self.width());
        let most = if self.b.is_in_panels() { PANELLED_COLS_MAX } else { COLS_MAX };
        in_shares(pool, n.div_ceil(width), k * width * size_of::<T>(), most / width, &|widths| {
            let cols = widths.start * width..(widths.end * width).min(n);
            // SAFETY: the caller's; pieces have different columns.
            unsafe {
                match self.a.rows() {
                    1 => self.run_columns::<1>(cols.start, cols.len()),
                    _ => self.run_columns::<THIN_ROWS>(cols.start, cols.len()),
                }
            }
        });
    }

    /// So many columns, or a multiple of them, a piece has.
    fn width(&self) -> usize {
        self.b.panel().max(LANES_MAX)
    }

    /// Computes C's columns `first .. first + cols`, with sums for H rows (A is filled up to H).
    ///
    /// # Safety
    ///
    /// [`Product::run`]'s.
    unsafe fn run_columns<const H: usize>(&self, first: usize, cols: usize) {
        let ((m, k), (a_row, a_step), (b_step, b_col)) =
            ((self.a.rows(), self.a.cols()), self.a.strides(), self.b.strides());
        let per_place = steps_on::<T::PanelElem>(self.runner);
        let in_panels = self.b.is_in_panels();
        let places = k.div_ceil(per_place);
        // A group of steps that B's panels hold may lack its last. A's -0 times B's 0 leaves every sum as it is.
        let filled = if in_panels { k.next_multiple_of(T::GROUP) / per_place } else { places };
        let width = cols.next_multiple_of(self.width());
        with_scratch(H * (width + filled) + LANES_MAX, |scratch: &mut [T::Acc]| {
            let (sums, a) = scratch.split_at_mut(H * width);
            // A panel of one row is the row, in whole vectors.
            let row = places.next_multiple_of(LANES_MAX);
            let (line_pitch, len) = if H == 1 && a_step == 1 { (row, row) } else { (1, H * places) };
            let panels = Panels {
                src: self.a.data(),
                line_stride: a_row,
                step_stride: a_step,
                lines: m,
                steps: k,
                places,
                width: H,
                line_pitch,
                beyond: T::narrow(-T::Acc::ZERO),
                near: false,
                dst: &mut a[..len],
            };
            T::PanelElem::run(self.runner, panels);
            a[H * places..H * filled].fill(-T::Acc::ZERO);
            let (a, b) = (&a[..H * filled], self.b.data().get(self.b.column(first)..).unwrap_or_default());
            let b_col = if self.b.cols() == 1 { 1 } else { b_col };
            let thin = ThinProduct::<T, H> { a, b, b_step, b_col, in_panels, steps: k, cols, sums, width };
            T::PanelElem::run(self.runner, thin);
            let (c_row, c_col) = self.c_strides;
            let tile = FinishTile {
                sums,
                sums_row: width,
                bias: self.epilogue.bias.map(|bias| &bias[first..first + cols]),
                activation: self.epilogue.activation,
                write: self.write,
                rows: m,
                cols,
                c: self.c.ptr().wrapping_add(self.c_start + first * c_col),
                c_strides: (c_row, c_col),
            };
            // SAFETY: the caller's.
            unsafe { tile.run_on(self.runner) }
        });
    }
}

/// Sums over all steps of some columns of B: H rows of sums, `width` apart.
pub(super) struct ThinProduct<'a, T: GemmElem, const H: usize> {
    /// A, packed: H rows for each place, and whole groups of B's panels.
    pub(super) a: &'a [T::Acc],
    /// B from the first column on.
    pub(super) b: &'a [T],
    pub(super) b_step: usize,
    /// 1, or anything where `b_step` is 1.
    b_col: usize,
    /// Whether B lies [in panels](super::MatRef::in_panels), of `b_step` columns.
    in_panels: bool,
    pub(super) steps: usize,
    pub(super) cols: usize,
    pub(super) sums: &'a mut [T::Acc],
    pub(super) width: usize,
}

impl<T: GemmElem, const H: usize> Kernel for ThinProduct<'_, T, H> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        if self.in_panels {
            return match const { vectors::<S>(H) } {
                8 => self.panels::<S, <T::Acc as Float>::Vec<S>, 8>(),
                4 => self.panels::<S, <T::Acc as Float>::Vec<S>, 4>(),
                _ => self.panels::<S, <T::Acc as Float>::Vec<S>, VECTORS>(),
            };
        }
        if is_acc::<T>() || self.b_col != 1 {
            return self.transposed::<S, <T::Acc as Float>::Vec<S>>();
        }
        match const { vectors::<S>(H) } {
            8 => self.rows::<S, <T::Acc as Float>::Vec<S>, 8>(),
            4 => self.rows::<S, <T::Acc as Float>::Vec<S>, 4>(),
            _ => self.rows::<S, <T::Acc as Float>::Vec<S>, 2>(),
        }
    }
}

impl<T: GemmElem, const H: usize> ThinProduct<'_, T, H> {
    /// The columns of B are neighbours: W vectors of columns at a time.
    #[inline(always)]
    fn rows<S: Isa, V: Vector<Elem = T::Acc>, const W: usize>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let mut col = 0;
        while col + W * V::LANES <= self.cols {
            self.block::<S, V, W>(col, V::LANES);
            col += W * V::LANES;
        }
        while col < self.cols {
            self.block::<S, V, 1>(col, V::LANES.min(self.cols - col));
            col += V::LANES;
        }
    }

    /// W vectors of columns from `col` on, of which the last has `len` columns.
    #[inline(always)]
    fn block<S: Isa, V: Vector<Elem = T::Acc>, const W: usize>(&mut self, col: usize, len: usize)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        let per_place = T::PanelElem::steps::<S>();
        let cols = (W - 1) * V::LANES + len;
        let beyond = [T::narrow(T::Acc::ZERO); VECTORS_MAX * LANES_MAX];
        let mut sums = [[V::zero(); W]; H];
        for (place, a) in self.a.chunks_exact(H).enumerate() {
            let step = place * per_place;
            let row = &self.b[step * self.b_step + col..][..cols];
            let next = match per_place == 2 && step + 1 < self.steps {
                true => &self.b[(step + 1) * self.b_step + col..][..cols],
                false => &beyond[..cols],
            };
            #[allow(clippy::needless_range_loop)] // vectors stay out of closures; see `rows/lanes.rs`
            for j in 0..W {
                let lanes = j * V::LANES..if j + 1 == W { cols } else { (j + 1) * V::LANES };
                for step in 0..per_place {
                    let ahead = (AHEAD * per_place + step) * self.b_step;
                    V::prefetch(row[lanes.clone()].as_ptr().wrapping_add(ahead).cast());
                }
                let b = T::load_lines::<S>(&row[lanes.clone()], &next[lanes]);
                for i in 0..H {
                    sums[i][j] = T::PanelElem::add::<S>(V::splat(a[i]), b, sums[i][j]);
                }
            }
        }
        for (i, row) in sums.iter().enumerate() {
            for (j, sum) in row.iter().enumerate() {
                // `sums` has room for whole vectors; what lies beyond the last column is not read.
                sum.store(&mut self.sums[i * self.width + col + j * V::LANES..]);
            }
        }
    }

    /// The steps of each column of B are neighbours.
    #[inline(always)]
    fn transposed<S: Isa, V: Vector<Elem = T::Acc>>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        match const { squares::<T, V>(H) } {
            // Three vectors of eight columns read 24 streams.
            3 if !follows_few_streams() => self.transposed_blocks::<S, V, 3>(),
            3 | 2 => self.transposed_blocks::<S, V, 2>(),
            _ => self.transposed_blocks::<S, V, 1>(),
        }
    }

    /// W vectors of columns at a time, then one.
    #[inline(always)]
    fn transposed_blocks<S: Isa, V: Vector<Elem = T::Acc>, const W: usize>(&mut self)
    where
        T::Acc: Float<Vec<S> = V>,
    {
        for (first, apart, count) in far_apart(self.cols, W * V::LANES) {
            if count == W * V::LANES {
                self.transposed_block::<S, V, W>(first, apart, V::LANES);
                continue;
            }
            for first in (first..first + count).step_by(V::LANES) {
                self.transposed_block::<S, V, 1>(first, apart, V::LANES.min(self.cols - first));
            }
        }
    }

    /// These steps of so many columns from `first` on, `apart` from each other.
    #[inline(always)]
    fn columns(&self, first: usize, apart: usize, count: usize, steps: Range<usize>) -> Columns<'_, T> {
        let next = apart * self.b_col;
        let b = &self.b[first * self.b_col + steps.start..][..(count - 1) * next + steps.len()];
        Columns { b, next, count, steps }
    }

    /// W vectors of `lanes` columns each, `apart` from each other: squares of LANES columns x LANES places are transposed in registers. Fewer lanes
    /// than LANES only where W is 1.
    #[inline(always)]
    fn transposed_block<S: Isa, V: Vector<Elem = T::Acc>, const W: usize>(
        &mut self,
        col: usize,
        apart: usize,
        lanes: usize,
    ) where
        T::Acc: Float<Vec<S> = V>,
    {
        let (per_place, beyond) = (T::PanelElem::steps::<S>(), T::narrow(T::Acc::ZERO));
        let places = self.a.len() / H;
        let mut sums = [[V::zero(); W]; H];
        let mut start = 0;
        // Twice as many steps at a time, two in a lane: half of the transposing.
        while T::reads_neighbours::<S>() && lanes == V::LANES && start + 2 * V::LANES <= places {
            let columns = self.columns(col, apart, W * V::LANES, start..start + 2 * V::LANES);
            let a = &self.a[start * H..][..2 * V::LANES * H];
            sums = add_neighbours::<T, S, V, H, W>(a, &columns, sums);
            start += 2 * V::LANES;
        }
        // What a square has beyond `lanes` columns is of sums that are not stored.
        let mut squares = [[V::zero(); LANES_MAX]; W];
        for place in (start..places).step_by(V::LANES) {
            let count = V::LANES.min(places - place);
            let (first, last) = (place * per_place, ((place + count) * per_place).min(self.steps));
            let columns = self.columns(col, apart, (W - 1) * V::LANES + lanes, first..last);
            // Loops and loads whose lengths the compiler knows, for all squares but the last.
            let is_whole = lanes == V::LANES && last - first == V::LANES * per_place;
            for (j, square) in squares.iter_mut().enumerate() {
                if is_whole {
                    for (i, row) in square[..V::LANES].iter_mut().enumerate() {
                        let steps = columns.get(j * V::LANES + i, V::LANES * per_place);
                        *row = T::load_steps::<S>(steps, beyond);
                    }
                } else {
                    for (i, row) in square[..lanes].iter_mut().enumerate() {
                        *row = T::load_steps::<S>(columns.get(j * V::LANES + i, last - first), beyond);
                    }
                }
                V::transpose(square);
            }
            let a = &self.a[place * H..];
            // The first call has a count that the compiler knows.
            sums = match is_whole {
                true => {
                    let is_far = H == 1 && is_acc::<T>() && V::LANES == LANES_MAX && follows_few_streams();
                    columns.prefetch::<V, W>(V::LANES * per_place, is_far);
                    add_squares::<T, S, V, H, W>(a, &squares, V::LANES, sums)
                }
                false => add_squares::<T, S, V, H, W>(a, &squares, count, sums),
            };
        }
        for (i, row) in sums.iter().enumerate() {
            for (j, sum) in row.iter().enumerate() {
                let mut of_columns = [T::Acc::ZERO; LANES_MAX];
                sum.store(&mut of_columns);
                let places =
                    self.sums[i * self.width + col + j * V::LANES * apart..].iter_mut().step_by(apart);
                places.zip(&of_columns[..lanes]).for_each(|(place, sum)| *place = *sum);
            }
        }
    }
}

/// Some steps of some columns of B, whose steps are neighbours.
struct Columns<'a, T> {
    /// From the first step of the first column to the last one of the last column.
    b: &'a [T],
    next: usize,
    count: usize,
    steps: Range<usize>,
}

impl<T> Columns<'_, T> {
    /// These steps of a column, of which there are `len`.
    #[inline(always)]
    fn get(&self, column: usize, len: usize) -> &[T] {
        // Numbers that the compiler knows.
        assert!(column < self.count && len == self.steps.len(), "one of the columns, and its steps");
        // SAFETY: the slice goes on from the first column to the last one's last step.
        unsafe { self.b.get_unchecked(column * self.next..column * self.next + len) }
    }

    /// Prefetches what follows these steps of the W vectors' columns. If a line of memory holds the steps of several squares, vectors take turns, so
    /// that each line is asked for once; the last of an odd number of vectors is left out (all three were slower, `benches/NOTES.md`).
    ///
    /// `is_far` says to do so earlier, and into the second-level cache: for one row by as many columns as a CPU [can follow](follows_few_streams).
    #[inline(always)]
    fn prefetch<V: Vector, const W: usize>(&self, len: usize, is_far: bool) {
        let sharing = (LINE_BYTES / (len * size_of::<T>())).clamp(1, W);
        let ahead = self.b.as_ptr().wrapping_byte_add(if is_far { FAR_AHEAD_BYTES } else { AHEAD_BYTES });
        for turn in 0..sharing {
            if self.steps.start / len % sharing == turn {
                for j in (turn..W / sharing * sharing).step_by(sharing) {
                    for column in j * V::LANES..(j + 1) * V::LANES {
                        let line = ahead.wrapping_add(column * self.next).cast();
                        if is_far { V::prefetch_far(line) } else { V::prefetch(line) }
                    }
                }
            }
        }
    }
}

/// Adds the products of these steps of W vectors of columns, two steps for each lane, to the sums.
#[inline(always)]
fn add_neighbours<T: GemmElem, S: Isa, V: Vector<Elem = T::Acc>, const H: usize, const W: usize>(
    a: &[T::Acc],
    columns: &Columns<'_, T>,
    mut sums: [[V; W]; H],
) -> [[V; W]; H]
where
    T::Acc: Float<Vec<S> = V>,
{
    let (steps, part) = (2 * V::LANES, V::LANES / V::PARTS);
    let mut squares = [[V::zero(); LANES_MAX]; W];
    for (j, square) in squares.iter_mut().enumerate() {
        for i in 0..part {
            let mut lines = [columns.get(j * V::LANES + i, steps); PARTS_MAX];
            for (p, line) in lines[..V::PARTS].iter_mut().enumerate() {
                *line = columns.get(j * V::LANES + p * part + i, steps);
            }
            let rows = T::load_neighbours::<S>(lines);
            for (p, row) in rows[..V::PARTS].iter().enumerate() {
                square[p * part + i] = *row;
            }
        }
        V::transpose_in_parts(square);
    }
    columns.prefetch::<V, W>(steps, false);
    for pair in 0..V::LANES {
        for (j, square) in squares.iter().enumerate() {
            let [first, second] = T::split::<S>(square[pair]);
            for (i, row) in sums.iter_mut().enumerate() {
                let sum = T::PanelElem::add::<S>(V::splat(a[2 * pair * H + i]), first, row[j]);
                row[j] = T::PanelElem::add::<S>(V::splat(a[(2 * pair + 1) * H + i]), second, sum);
            }
        }
    }
    sums
}

/// Adds the products of the first `count` places of transposed squares to the sums.
#[inline(always)]
fn add_squares<T: GemmElem, S: Isa, V: Vector<Elem = T::Acc>, const H: usize, const W: usize>(
    a: &[T::Acc],
    squares: &[[V; LANES_MAX]; W],
    count: usize,
    mut sums: [[V; W]; H],
) -> [[V; W]; H]
where
    T::Acc: Float<Vec<S> = V>,
{
    for place in 0..V::LANES {
        if place == count {
            break;
        }
        for (i, row) in sums.iter_mut().enumerate() {
            let x = V::splat(a[place * H + i]);
            for (sum, square) in row.iter_mut().zip(squares) {
                *sum = T::PanelElem::add::<S>(x, square[place], *sum);
            }
        }
    }
    sums
}
