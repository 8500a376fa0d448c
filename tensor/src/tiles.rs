//! Transposing copies, tile by tile.
//!
//! Where the source's neighbours lie along another dimension than the target's, a copy in either order touches a
//! cache line (and a page) for every single element. So square tiles are copied through a buffer that
//! stays in the first-level cache: read along the source's lines, written along the target's.
//!
//! ```text
//! target, contiguous: (outer.., rows, middle.., columns)     source: stride `down` along rows, the smallest,
//!                                                                    stride `across` along columns, larger
//! ```
//!
//! Without the buffer all lines of a tile would share one cache set where sizes are powers of two.

use bytemuck::Pod;

use crate::streaming::{StreamingStores, prefetch};
use crate::{Loops, Pool};

/// Rows and columns of a tile of elements of 1, 2 or 4 bytes: several cache lines either way, and the buffer fits.
const SIDE: usize = 64;
/// The same for elements of 8 bytes.
const SIDE_WIDE: usize = 32;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Elements that a thread copies at a time, at least.
pub(crate) const PIECE: usize = 1 << 14;

/// A nest of loops whose source is best read along an outer one.
pub(crate) struct Tiles<'a> {
    loops: &'a Loops<1>,
    /// The loop of rows.
    axis: usize,
}

impl Tiles<'_> {
    /// `None` where plain runs are as good.
    pub(crate) fn new(loops: &Loops<1>) -> Option<Tiles<'_>> {
        Some(Tiles { loops, axis: loops.transposed_axis()? })
    }

    /// Copies to the contiguous `target`.
    pub(crate) fn copy<T: Pod + Send + Sync>(&self, pool: &Pool, target: &mut [T], source: &[T]) {
        // Whole cache lines only.
        let lines =
            (self.row() * size_of::<T>()).is_multiple_of(LINE) && target.as_ptr().addr().is_multiple_of(LINE);
        let streams = lines && StreamingStores::pay(size_of_val(target));
        match size_of::<T>() {
            8.. => self.copy_by::<T, SIDE_WIDE>(pool, target, source, streams),
            _ => self.copy_by::<T, SIDE>(pool, target, source, streams),
        }
    }

    /// Copies with tiles of `N` x `N`.
    fn copy_by<T: Pod + Send + Sync, const N: usize>(
        &self,
        pool: &Pool,
        target: &mut [T],
        source: &[T],
        streams: bool,
    ) {
        let (rows, row) = (self.loops.sizes()[self.axis], self.row());
        let slab = rows * row;
        let outer = |i| position(self.loops, 0..self.axis, i);
        if slab <= PIECE {
            let slabs = PIECE / slab;
            return pool.for_each_chunk(target, slabs * slab, |piece, part| {
                for (i, part) in part.chunks_mut(slab).enumerate() {
                    self.copy_rows::<T, N>(part, &source[outer(piece * slabs + i)..], streams);
                }
            });
        }
        let [down] = self.loops.strides()[self.axis];
        let rows_a_piece = rows.div_ceil(pool.threads()).next_multiple_of(16).min(N);
        for (i, slab) in target.chunks_mut(slab).enumerate() {
            pool.for_each_chunk(slab, rows_a_piece * row, |piece, part| {
                self.copy_rows::<T, N>(part, &source[outer(i) + piece * rows_a_piece * down..], streams);
            });
        }
    }

    /// Elements from one row to the next in the target.
    fn row(&self) -> usize {
        self.loops.sizes()[self.axis + 1..].iter().product()
    }

    /// Copies whole rows, the first of which begins at the start of `source`.
    fn copy_rows<T: Pod, const N: usize>(&self, target: &mut [T], source: &[T], streams: bool) {
        let (row, columns) = (self.row(), self.loops.inner());
        let ([down], [across]) = (self.loops.strides()[self.axis], self.loops.inner_strides());
        let mut buffer = [[T::zeroed(); N]; N];
        for (block, target) in target.chunks_mut(N * row).enumerate() {
            for middle in 0..row / columns {
                let start = position(self.loops, self.axis + 1..self.loops.sizes().len() - 1, middle);
                let source = &source[start + block * N * down..];
                for column in (0..columns).step_by(N) {
                    let width = N.min(columns - column);
                    let tile = Tile { row, down, across, width, streams };
                    let target = &mut target[middle * columns + column..];
                    tile.copy(target, &source[column * across..], &mut buffer);
                }
            }
        }
    }
}

/// Up to `N` rows of `width` elements, one column of which is a line of the source.
struct Tile {
    row: usize,
    down: usize,
    across: usize,
    width: usize,
    /// Whether the target is written by streaming stores.
    streams: bool,
}

impl Tile {
    fn copy<T: Pod, const N: usize>(&self, target: &mut [T], source: &[T], lines: &mut [[T; N]; N]) {
        let rows = target.len().div_ceil(self.row);
        // Whole lines first, so that many loads are in flight at a time; the transposition then happens inside the cache.
        for (column, line) in lines[..self.width].iter_mut().enumerate() {
            let from = &source[column * self.across..];
            match self.down {
                // A known length is a few vector moves instead of a call.
                1 if rows == N => line.copy_from_slice(&from[..N]),
                1 => line[..rows].copy_from_slice(&from[..rows]),
                _ => line[..rows].iter_mut().zip(from.iter().step_by(self.down)).for_each(|(to, &x)| *to = x),
            }
        }
        // Prefetches the next tile's lines meanwhile.
        let next = |row: usize| source.as_ptr().wrapping_add((self.width + row) * self.across);
        let transposed = |row: usize| -> [T; N] { std::array::from_fn(|column| lines[column][row]) };
        let mut stores = self.streams.then(StreamingStores::default);
        for (row, target) in target.chunks_mut(self.row).enumerate() {
            if self.down == 1 {
                (0..rows).step_by(LINE / size_of::<T>()).for_each(|at| prefetch(next(row).wrapping_add(at)));
            }
            match (&mut stores, self.width) {
                (Some(stores), width) => stores.put(
                    bytemuck::cast_slice_mut(&mut target[..width]),
                    bytemuck::cast_slice(&transposed(row)[..width]),
                ),
                (None, width) if width == N => target[..N].copy_from_slice(&transposed(row)),
                (None, width) => target[..width].copy_from_slice(&transposed(row)[..width]),
            }
        }
    }
}

/// Where iteration `index` of the loops `axes` begins in the source.
fn position(loops: &Loops<1>, axes: std::ops::Range<usize>, mut index: usize) -> usize {
    let mut at = 0;
    for axis in axes.rev() {
        let size = loops.sizes()[axis];
        at += index % size * loops.strides()[axis][0];
        index /= size;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::{SIDE, Tiles};
    use crate::{Loops, Pool};

    #[test]
    fn tiles_past_the_caches_are_copies() {
        let source: Vec<u32> = (0..400_000).collect();
        let cases =
            [([1, 200, 300], [0, 1, 201]), ([3, 64, 77], [9000, 1, 70]), ([2, 130, 65], [40_000, 2, 300])];
        for (shape, strides) in cases {
            let loops = Loops::new(&shape, [&strides]);
            let tiles = Tiles::new(&loops).unwrap();
            let run = |streams: bool| {
                let mut target = vec![0; shape.iter().product()];
                tiles.copy_by::<u32, SIDE>(&Pool::new(2), &mut target, &source[5..], streams);
                target
            };
            let at = |i: usize| {
                let index = [i / shape[2] / shape[1], i / shape[2] % shape[1], i % shape[2]];
                source[5 + (0..3).map(|d| index[d] * strides[d]).sum::<usize>()]
            };
            let want: Vec<u32> = (0..shape.iter().product()).map(at).collect();
            assert!(run(true) == want && run(false) == want, "{shape:?}");
        }
    }
}
