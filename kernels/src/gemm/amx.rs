//! Products of bf16 by AMX's tiles, which do 16 times the arithmetic of vectors in a cycle (Intel's figures).
//!
//! A tile's instruction takes *lines* of one operand, whose steps are neighbours, and *pairs* of the other: of each two steps a place for every
//! line, as [`Panels`] packs them. Rows of A are lines and columns of B pairs. Of [`FEW_ROWS`] at most it is the other way round, so that weights
//! are read once and where they lie. A B in panels has pairs already (`amx_panels.rs`).
//!
//! ```text
//!  for each chunk of C: ROWS_MAX rows, COLS_MAX columns       threads take chunks in turns; sums wait in the L2 cache
//!    for each block of STEPS_MAX steps                         sums go on
//!      pack A's rows as lines                                  into the L2 cache
//!      for each 32 columns: pack them as pairs                 into the L1 cache
//!        for each 32 rows: four tiles of sums
//! ```
//!
//! The order of a sum is the instruction's ([`amx`](crate::simd::amx)), for every product, whatever its shape and strides: blocks of 32 steps, the
//! last filled up with products of -0 and 0, which change no bit.

#![allow(unsafe_code)]

use std::ops::Range;

use phalanx_tensor::{Pool, bf16};

use super::chunks::{far_apart, in_shares, in_turns};
use super::element::{GemmElem, PanelElem};
use super::mat::{MatMut, MatRef, SharedMut};
use super::pack::Panels;
use crate::scratch::with_scratch;
use crate::simd::amx::{BLOCK, LINES, Lines, STEPS, Sums, Tiles};
use crate::simd::{Isa, Kernel, LANES_MAX, Runner, Vector, pair};

/// Places of a tile's line.
const PLACES: usize = STEPS / 2;
/// So many rows are pairs, all of them together.
const FEW_ROWS: usize = BLOCK;
/// A chunk's rows, columns, and steps at a time.
const ROWS_MAX: usize = 512;
const COLS_MAX: usize = 256;
pub(super) const STEPS_MAX: usize = 512;
/// Columns at a time of few rows.
const FEW_COLS_MAX: usize = 2048;
/// Chunks, or pieces of columns, for each thread.
const PIECES: usize = 4;
/// A place of two steps that are -0.
const NOTHING: f32 = f32::from_bits(0x8000_8000);

/// Places of so many steps in whole tiles.
pub(super) fn places(steps: usize) -> usize {
    steps.div_ceil(STEPS) * PLACES
}

/// Takes sums, rows of so many elements, to or from these rows and columns of C.
type Take<'a> = &'a (dyn Fn(&mut [f32], usize, Range<usize>, Range<usize>) + Sync);

/// A product to carry out by tiles.
pub(super) struct TileProduct<'a> {
    /// Of [`Runner::for_tiles`].
    pub(super) packer: Runner,
    pub(super) a: MatRef<'a, bf16>,
    pub(super) b: MatRef<'a, bf16>,
    /// Makes what sums begin with, if it is not 0.
    pub(super) begin: Option<Take<'a>>,
    /// Is called once for each element of C.
    pub(super) finish: Take<'a>,
}

/// [`Write::Continue`](super::Write) of bf16: C's sums go on in the tiles' order. Steps cut at multiples of [`STEPS`] have the bits of the whole.
pub(super) fn continue_sums(
    packer: Runner,
    pool: Option<&Pool>,
    a: MatRef<'_, bf16>,
    b: MatRef<'_, bf16>,
    mut c: MatMut<'_, f32>,
) {
    let (row, col) = c.strides();
    assert!(
        a.cols() == b.rows() && (c.rows(), c.cols()) == (a.rows(), b.cols()) && col == 1,
        "shapes of a product"
    );
    let c = SharedMut::new(c.data());
    let each = |sums: &mut [f32],
                pitch,
                rows: Range<usize>,
                cols: Range<usize>,
                take: fn(&mut [f32], &mut [f32])| {
        for (i, sums) in rows.zip(sums.chunks_mut(pitch)) {
            let c = c.ptr().wrapping_add(i * row + cols.start);
            // SAFETY: part of a row of C, borrowed for us alone; no other call has these rows and columns.
            take(&mut sums[..cols.len()], unsafe { std::slice::from_raw_parts_mut(c, cols.len()) });
        }
    };
    let begin = |sums: &mut [f32], pitch, rows, cols| {
        each(sums, pitch, rows, cols, |sums, c| sums.copy_from_slice(c))
    };
    let finish = |sums: &mut [f32], pitch, rows, cols| {
        each(sums, pitch, rows, cols, |sums, c| c.copy_from_slice(sums))
    };
    TileProduct { packer, a, b, begin: Some(&begin), finish: &finish }.run(pool);
}

impl TileProduct<'_> {
    /// Carries it out on the pool's threads, or on this one.
    pub(super) fn run(&self, pool: Option<&Pool>) {
        let (m, n) = (self.a.rows(), self.b.cols());
        if self.b.is_in_panels() && m > 0 && n > 0 && self.a.cols() > 0 {
            return self.run_panels(pool);
        }
        if (1..=FEW_ROWS).contains(&m) && self.a.cols() > 0 && self.b.strides().0 == 1 && self.begin.is_none()
        {
            return with_scratch(m * places(self.a.cols()), |pairs: &mut [f32]| {
                pack_few(&self.a, pairs);
                let pairs: &[f32] = pairs;
                self.in_blocks(pool, FEW_COLS_MAX, &|cols| self.run_few(pairs, cols));
            });
        }
        self.in_chunks(pool, &|rows, cols| self.run_chunk(rows, cols));
    }

    /// Calls `run` with the columns of some [blocks](BLOCK) at a time, `most` columns at most.
    pub(super) fn in_blocks(&self, pool: Option<&Pool>, most: usize, run: &(dyn Fn(Range<usize>) + Sync)) {
        let (k, cols) = (self.b.rows(), self.b.cols());
        in_shares(pool, cols.div_ceil(BLOCK), k * BLOCK * size_of::<bf16>(), most / BLOCK, &|blocks| {
            run(blocks.start * BLOCK..(blocks.end * BLOCK).min(cols));
        });
    }

    /// Calls `run` with the rows and columns of each chunk of C.
    pub(super) fn in_chunks(&self, pool: Option<&Pool>, run: &(dyn Fn(Range<usize>, Range<usize>) + Sync)) {
        let (m, n, threads) = (self.a.rows(), self.b.cols(), pool.map_or(1, Pool::threads));
        let (mut rows_max, mut cols_max) = (ROWS_MAX, COLS_MAX);
        let chunks = |rows: usize, cols: usize| (m.div_ceil(rows), n.div_ceil(cols));
        let is_few = |(rows, cols): (usize, usize)| threads > 1 && rows * cols < PIECES * threads;
        while is_few(chunks(rows_max, cols_max)) && cols_max > 2 * BLOCK {
            cols_max /= 2;
        }
        while is_few(chunks(rows_max, cols_max)) && rows_max > 2 * BLOCK {
            rows_max /= 2;
        }
        let (down, across) = chunks(rows_max, cols_max);
        in_turns(pool, down * across, |chunk| {
            let (row, col) = (chunk / across * rows_max, chunk % across * cols_max);
            run(row..(row + rows_max).min(m), col..(col + cols_max).min(n));
        });
    }

    /// Computes these columns of C, of few rows that are packed as `pairs`.
    fn run_few(&self, pairs: &[f32], cols: Range<usize>) {
        let (m, k) = (self.a.rows(), self.a.cols());
        let (_, line) = self.b.strides();
        let (width, whole) = (cols.len().next_multiple_of(LANES_MAX), k / STEPS);
        with_scratch(m * width + BLOCK * m + BLOCK * places(k), |scratch: &mut [f32]| {
            let (sums, rest) = scratch.split_at_mut(m * width);
            let (block, copy) = rest.split_at_mut(BLOCK * m);
            let place = Sums { first: block.as_mut_ptr(), row: m };
            // SAFETY: the runner's instruction set has tiles.
            let mut tiles = unsafe { Tiles::new(m) };
            for (first, apart, count) in far_apart(cols.len(), BLOCK) {
                let (weights, line) = (&self.b.data()[(cols.start + first) * line..], apart * line);
                // Whole tiles where they lie; the rest, and lines that are fewer, from a copy.
                let in_place = if count == BLOCK { whole } else { 0 };
                if in_place > 0 {
                    let lines = lines_at(weights.as_ptr().cast(), 2 * line, 2 * STEPS, LINES * 2 * line);
                    // SAFETY: lines of B, pairs of as many steps, and a block of sums.
                    unsafe { tiles.multiply::<true>(lines, pairs.as_ptr(), in_place, place, false) }
                }
                if STEPS * in_place < k {
                    let steps = STEPS * in_place..k;
                    let pitch = places(steps.len());
                    for (row, copy) in copy[..count * pitch].chunks_exact_mut(pitch).enumerate() {
                        copy_line(&weights[row * line + steps.start..], 1, steps.len(), copy);
                    }
                    let lines = lines_at(copy.as_ptr().cast(), 4 * pitch, 2 * STEPS, LINES * 4 * pitch);
                    let pairs = pairs[in_place * PLACES * m..].as_ptr();
                    // SAFETY: as above, of the copy.
                    unsafe { tiles.multiply::<false>(lines, pairs, pitch / PLACES, place, in_place > 0) }
                }
                for (i, sums) in sums.chunks_exact_mut(width).enumerate() {
                    let sums = sums[first..].iter_mut().step_by(apart).take(count);
                    sums.zip(block.chunks_exact(m)).for_each(|(sum, row)| *sum = row[i]);
                }
            }
            drop(tiles);
            (self.finish)(sums, width, 0..m, cols);
        });
    }

    /// Computes these rows and columns of C.
    fn run_chunk(&self, rows: Range<usize>, cols: Range<usize>) {
        let (k, packer) = (self.a.cols(), self.packer);
        let ((a_row, a_step), (b_step, b_col)) = (self.a.strides(), self.b.strides());
        let (height, width) = (rows.len().next_multiple_of(BLOCK), cols.len().next_multiple_of(BLOCK));
        let most = places(k.min(STEPS_MAX));
        // Rows of lines are a few places longer, so that they do not fall into the same sets of the cache.
        let (a_len, b_len) = (height * (most + PLACES), BLOCK * most);
        with_scratch(height * width + a_len + b_len, |scratch: &mut [f32]| {
            let (sums, rest) = scratch.split_at_mut(height * width);
            let (packed_a, pairs) = rest.split_at_mut(a_len);
            match self.begin {
                Some(begin) => begin(sums, width, rows.clone(), cols.clone()),
                None if k == 0 => sums.fill(0.0),
                None => {}
            }
            // SAFETY: the runner's instruction set has tiles.
            let mut tiles = unsafe { Tiles::new(BLOCK) };
            for start in (0..k).step_by(STEPS_MAX) {
                let steps = (k - start).min(STEPS_MAX);
                let a = &self.a.data()[rows.start * a_row + start * a_step..];
                let (lines, next_block) = match a_step {
                    1 => pack_lines(packer, a, a_row, rows.len(), steps, packed_a),
                    _ => pack_tiles(packer, a, (a_row, a_step), rows.len(), steps, packed_a),
                };
                for col in (0..cols.len()).step_by(BLOCK) {
                    let b = &self.b.data()[(cols.start + col) * b_col + start * b_step..];
                    pack_pairs(packer, b, (b_col, b_step), (cols.len() - col).min(BLOCK), steps, pairs);
                    for row in (0..height).step_by(BLOCK) {
                        let lines = lines.skip(row / BLOCK * next_block);
                        let place = Sums { first: sums[row * width + col..].as_mut_ptr(), row: width };
                        let goes_on = start > 0 || self.begin.is_some();
                        // SAFETY: what was packed, of as many steps; a block of sums.
                        unsafe {
                            tiles.multiply::<false>(
                                lines,
                                pairs.as_ptr(),
                                places(steps) / PLACES,
                                place,
                                goes_on,
                            )
                        }
                    }
                }
            }
            drop(tiles);
            (self.finish)(sums, width, rows, cols);
        });
    }
}

pub(super) fn lines_at(first: *const u8, stride: usize, next: usize, second: usize) -> Lines {
    Lines { first, second: first.wrapping_add(second), stride, next }
}

/// Packs a matrix of few rows as pairs of all its steps, both as they lie in memory: the earlier one below.
fn pack_few(a: &MatRef<'_, bf16>, pairs: &mut [f32]) {
    let (k, (row, step)) = (a.cols(), a.strides());
    pairs.fill(0.0);
    for i in 0..a.rows() {
        let at = |l: usize| if l < k { a.data()[i * row + l * step] } else { bf16::ZERO };
        for (place, pairs) in pairs.chunks_exact_mut(a.rows()).take(k.div_ceil(2)).enumerate() {
            pairs[i] = pair(at(2 * place + 1), at(2 * place));
        }
    }
}

/// Copies steps of a line, `stride` apart, as they lie in memory one after the other, and -0 after them.
pub(super) fn copy_line(src: &[bf16], stride: usize, steps: usize, line: &mut [f32]) {
    let neighbours = if stride == 1 { &src[..steps / 2 * 2] } else { &[] };
    line.iter_mut().zip(neighbours.chunks_exact(2)).for_each(|(dst, two)| *dst = pair(two[1], two[0]));
    let at = |l: usize| if l < steps { src[l * stride] } else { -bf16::ZERO };
    for (place, dst) in line.iter_mut().enumerate().skip(neighbours.len() / 2) {
        *dst = pair(at(2 * place + 1), at(2 * place));
    }
}

/// Packs rows whose steps are neighbours, as lines; both steps of a place are exchanged, as [`Panels`] does. Returns the first block
/// of them, and the bytes from a block to the next.
fn pack_lines(
    packer: Runner,
    src: &[bf16],
    stride: usize,
    rows: usize,
    steps: usize,
    lines: &mut [f32],
) -> (Lines, usize) {
    let places = places(steps);
    let pitch = places + PLACES;
    let panels = Panels {
        src,
        line_stride: stride,
        step_stride: 1,
        lines: rows,
        steps,
        places,
        width: 1,
        line_pitch: pitch,
        beyond: -bf16::ZERO,
        near: false,
        dst: &mut lines[..rows * pitch],
    };
    <bf16 as GemmElem>::PanelElem::run(packer, panels);
    (lines_at(lines.as_ptr().cast(), 4 * pitch, 2 * STEPS, LINES * 4 * pitch), BLOCK * 4 * pitch)
}

/// The same of rows whose steps lie anywhere, as tiles one after another.
fn pack_tiles(
    packer: Runner,
    src: &[bf16],
    (row, step): (usize, usize),
    rows: usize,
    steps: usize,
    tiles: &mut [f32],
) -> (Lines, usize) {
    let len = LINES * places(steps);
    for (first, panel) in (0..rows).step_by(LINES).zip(tiles.chunks_exact_mut(len)) {
        let src = &src[first * row..];
        pack_panel(packer, src, (row, step), (rows - first).min(LINES), steps, (LINES, NOTHING), panel);
        packer.run(TransposeSquares(panel));
    }
    (lines_at(tiles.as_ptr().cast(), 2 * STEPS, LINES * 2 * STEPS, 4 * len), BLOCK / LINES * 4 * len)
}

/// Packs lines as pairs; both steps of a place are exchanged.
fn pack_pairs(
    packer: Runner,
    src: &[bf16],
    strides: (usize, usize),
    lines: usize,
    steps: usize,
    pairs: &mut [f32],
) {
    pack_panel(packer, src, strides, lines, steps, (BLOCK, 0.0), &mut pairs[..BLOCK * places(steps)]);
}

/// A panel of so many lines, and `after` its last step.
fn pack_panel(
    packer: Runner,
    src: &[bf16],
    (line_stride, step_stride): (usize, usize),
    lines: usize,
    steps: usize,
    (width, after): (usize, f32),
    panel: &mut [f32],
) {
    let places = steps.div_ceil(2);
    let (dst, rest) = panel.split_at_mut(width * places);
    rest.fill(after);
    let beyond = bf16::from_bits(after.to_bits() as u16);
    let panels = Panels {
        src,
        line_stride,
        step_stride,
        lines,
        steps,
        places,
        width,
        line_pitch: 1,
        beyond,
        near: false,
        dst,
    };
    <bf16 as GemmElem>::PanelElem::run(packer, panels);
}

/// Turns places of [`LINES`] lines each into lines of as many places, square by square.
struct TransposeSquares<'a>(&'a mut [f32]);

impl Kernel for TransposeSquares<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        assert!(S::F32::LANES == LINES && LINES == PLACES && LANES_MAX == LINES, "vectors of a tile's line");
        for square in self.0.chunks_exact_mut(LINES * PLACES) {
            let mut rows = [S::F32::zero(); LANES_MAX];
            for (row, src) in rows.iter_mut().zip(square.chunks_exact(LINES)) {
                *row = S::F32::load(src);
            }
            S::F32::transpose(&mut rows);
            for (row, dst) in rows.iter().zip(square.chunks_exact_mut(LINES)) {
                row.store(dst);
            }
        }
    }
}
