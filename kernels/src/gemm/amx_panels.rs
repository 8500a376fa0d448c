//! Products by tiles and a B in panels ([`MatRef::in_panels`](super::MatRef::in_panels)), whose places are pairs as they lie. Rows of A are lines where
//! they lie, if they have whole tiles.

#![allow(unsafe_code)]

use std::ops::Range;

use phalanx_tensor::{Pool, bf16};

use super::amx::{STEPS_MAX, TileProduct, copy_line, lines_at, places};
use super::chunks::far_apart;
use crate::real::Real;
use crate::scratch::with_scratch;
use crate::simd::amx::{
    Apart, BLOCK, LINES, Lines, PANELS_OF_FEW, PANELS_OF_ONE, STEPS, Sums, Tiles, multiply_one,
};

/// Columns at a time of few rows.
const FEW_COLS_MAX: usize = 8192;

/// A's rows as lines: where they lie, and after the first so many, or all, from a copy.
struct RowLines {
    in_place: usize,
    lines: Lines,
    copies: Lines,
}

// SAFETY: they are only read while it lives.
unsafe impl Sync for RowLines {}

impl RowLines {
    /// [`BLOCK`] lines from a row on, which is a multiple of it, and from a step on.
    fn block(&self, row: usize, step: usize) -> Lines {
        match row + BLOCK <= self.in_place {
            true => self.lines.skip(row * self.lines.stride + 2 * step),
            false => self.copies.skip((row - self.in_place) * self.copies.stride + 2 * step),
        }
    }
}

impl TileProduct<'_> {
    /// [`TileProduct::run`] by a B in panels, of some rows, columns and steps.
    pub(super) fn run_panels(&self, pool: Option<&Pool>) {
        assert!(
            self.b.panel() == BLOCK && self.begin.is_none(),
            "panels of a block of pairs, from the start"
        );
        let ((m, k), (row, step)) = ((self.a.rows(), self.a.cols()), self.a.strides());
        let few = |run: &(dyn Fn(Range<usize>) + Sync)| self.in_blocks(pool, FEW_COLS_MAX, run);
        if m == 1 {
            return with_scratch(2 * places(k), |line: &mut [f32]| {
                let (steps, after) = line.split_at_mut(k);
                match step {
                    1 => bf16::widen_all(&self.a.data()[..k], steps),
                    _ => steps.iter_mut().enumerate().for_each(|(l, x)| *x = self.a.data()[l * step].widen()),
                }
                after.fill(-0.0);
                let line: &[f32] = line;
                few(&|cols| self.run_one(line, cols));
            });
        }
        let is_whole = step == 1 && k.is_multiple_of(STEPS);
        // Fewer rows than a tile's lines are read as such.
        let in_place = match is_whole {
            true if m <= LINES => m,
            true => m / BLOCK * BLOCK,
            false => 0,
        };
        // Rows of copies are a few places longer, so that they do not fall into the same sets of the cache.
        let pitch = places(k) + places(1);
        with_scratch((m - in_place).next_multiple_of(BLOCK) * pitch, |copies: &mut [f32]| {
            for (row, copy) in (in_place..m).map(|i| i * row).zip(copies.chunks_exact_mut(pitch)) {
                copy_line(&self.a.data()[row..], step, k, copy);
            }
            let lines = RowLines {
                in_place,
                lines: lines_at(self.a.data().as_ptr().cast(), 2 * row, 2 * STEPS, LINES * 2 * row),
                copies: lines_at(copies.as_ptr().cast(), 4 * pitch, 2 * STEPS, LINES * 4 * pitch),
            };
            if m <= LINES {
                return few(&|cols| self.run_few_by_panels(&lines, cols));
            }
            self.in_chunks(pool, &|rows, cols| self.run_chunk_by_panels(&lines, rows, cols));
        });
    }

    /// Computes these columns of C, of one row that is widened.
    fn run_one(&self, line: &[f32], cols: Range<usize>) {
        self.by_panels_apart(1, PANELS_OF_ONE, cols, |count, panels, steps, (sums, _)| {
            // SAFETY: an instruction set with tiles has AVX-512; the line, panels and sums of as many steps and columns.
            unsafe {
                match count {
                    PANELS_OF_ONE => multiply_one::<PANELS_OF_ONE>(line.as_ptr(), panels, steps, sums),
                    3 => multiply_one::<3>(line.as_ptr(), panels, steps, sums),
                    2 => multiply_one::<2>(line.as_ptr(), panels, steps, sums),
                    _ => multiply_one::<1>(line.as_ptr(), panels, steps, sums),
                }
            }
        });
    }

    /// Computes these columns of C, of [`LINES`] rows at most.
    fn run_few_by_panels(&self, lines: &RowLines, cols: Range<usize>) {
        let m = self.a.rows();
        let lines = if lines.in_place > 0 { lines.lines } else { lines.copies };
        let lines = (lines.first, lines.stride);
        // SAFETY: the runner's instruction set has tiles.
        let mut tiles = unsafe { Tiles::of_lines(m) };
        self.by_panels_apart(m, PANELS_OF_FEW, cols, move |count, panels, steps, sums| {
            // SAFETY: lines, panels and sums of as many steps and columns.
            unsafe {
                match count {
                    PANELS_OF_FEW => tiles.multiply_panels::<PANELS_OF_FEW>(lines, panels, steps, sums),
                    2 => tiles.multiply_panels::<2>(lines, panels, steps, sums),
                    _ => tiles.multiply_panels::<1>(lines, panels, steps, sums),
                }
            }
        });
    }

    /// Computes these columns of C: `multiply` makes the sums of a number of panels, `together` at most, of their pairs for a number of tiles' steps.
    fn by_panels_apart(
        &self,
        rows: usize,
        together: usize,
        cols: Range<usize>,
        mut multiply: impl FnMut(usize, Apart<*const f32>, usize, (Apart<*mut f32>, usize)),
    ) {
        let (width, steps) = (cols.len().next_multiple_of(BLOCK), places(self.a.cols()) * 2 / STEPS);
        let len = steps * STEPS * BLOCK;
        let panels = &self.b.data()[self.b.column(cols.start)..][..width / BLOCK * len];
        with_scratch(rows * width, |sums: &mut [f32]| {
            for (first, apart, count) in far_apart(width / BLOCK, together) {
                let last = first + (count - 1) * apart;
                let panels = panels[first * len..(last + 1) * len].as_ptr().cast();
                let place = sums[first * BLOCK..].as_mut_ptr();
                multiply(
                    count,
                    Apart { first: panels, apart: apart * len / 2 },
                    steps,
                    (Apart { first: place, apart: apart * BLOCK }, width),
                );
            }
            drop(multiply); // and the tiles with it
            (self.finish)(sums, width, 0..rows, cols);
        });
    }

    /// Computes these rows and columns of C.
    fn run_chunk_by_panels(&self, lines: &RowLines, rows: Range<usize>, cols: Range<usize>) {
        match rows.len().div_ceil(BLOCK) {
            16.. => self.run_chunk_ahead::<2>(lines, rows, cols),
            4.. => self.run_chunk_ahead::<8>(lines, rows, cols),
            _ => self.run_chunk_ahead::<32>(lines, rows, cols),
        }
    }

    /// [`TileProduct::run_chunk_by_panels`]. Each block of rows prefetches its part of the next panel, so many of its lines for each tile of steps.
    fn run_chunk_ahead<const AHEAD: usize>(&self, lines: &RowLines, rows: Range<usize>, cols: Range<usize>) {
        let all = 2 * places(self.a.cols());
        let (height, width) = (rows.len().next_multiple_of(BLOCK), cols.len().next_multiple_of(BLOCK));
        let first = cols.start;
        let panel = |col: usize, step: usize| -> *const f32 {
            let steps = &self.b.data()[self.b.column(first + col)..][..all * BLOCK][step * BLOCK..];
            steps.as_ptr().cast()
        };
        with_scratch(height * width, |sums: &mut [f32]| {
            // SAFETY: the runner's instruction set has tiles.
            let mut tiles = unsafe { Tiles::new(BLOCK) };
            for start in (0..all).step_by(STEPS_MAX) {
                let count = (all - start).min(STEPS_MAX) / STEPS;
                for col in (0..width).step_by(BLOCK) {
                    let next = match (col + BLOCK < width, start + STEPS_MAX < all) {
                        (true, _) => panel(col + BLOCK, start),
                        (_, true) => panel(0, start + STEPS_MAX),
                        _ => panel(col, start),
                    };
                    for (nth, row) in (0..height).step_by(BLOCK).enumerate() {
                        let ahead = next.cast::<u8>().wrapping_add(nth * AHEAD * 64 * count);
                        let place = Sums { first: sums[row * width + col..].as_mut_ptr(), row: width };
                        let lines = lines.block(rows.start + row, start);
                        // SAFETY: lines and pairs of as many steps; a block of sums.
                        unsafe {
                            tiles.multiply_ahead::<AHEAD>(
                                lines,
                                panel(col, start),
                                count,
                                place,
                                start > 0,
                                ahead,
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
