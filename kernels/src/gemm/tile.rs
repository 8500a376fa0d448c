//! [`TileShape`]: the size of a tile on an instruction set. [`Tile`]: the operands of a call of the micro-kernel, as pointers and strides.

use crate::simd::{Float, Isa, Kernel, Runner, Vector};

/// Columns of a full tile in vectors (nr over the lanes).
pub(super) const VECTORS: usize = 2;
/// Tiles of at most so many rows may be wider.
pub(super) const FEW_ROWS: usize = 3;
/// Columns of a wide tile in vectors, at most.
pub(super) const VECTORS_MAX: usize = 8;

/// A full tile's size on an instruction set.
#[derive(Clone, Copy)]
pub(crate) struct TileShape {
    pub(crate) rows: usize,
    pub(crate) lanes: usize,
    /// Columns in vectors.
    pub(super) vectors: usize,
}

impl TileShape {
    pub(super) fn of<T: Float>(runner: Runner) -> TileShape {
        struct Ask<T>(std::marker::PhantomData<T>);
        impl<T: Float> Kernel for Ask<T> {
            type Output = TileShape;

            #[inline(always)]
            fn run<S: Isa>(self) -> TileShape {
                TileShape { rows: rows::<S>(), lanes: T::Vec::<S>::LANES, vectors: VECTORS }
            }
        }
        runner.run(Ask::<T>(std::marker::PhantomData))
    }

    pub(crate) fn cols(self) -> usize {
        self.vectors * self.lanes
    }

    /// As wide as tiles of so many rows may be: wider than others if there are few.
    pub(super) fn widened(self, rows: usize) -> TileShape {
        let fitting = self.rows * VECTORS / rows.max(1);
        let vectors = if rows > FEW_ROWS { VECTORS } else { VECTORS_MAX.min(1 << fitting.ilog2()) };
        TileShape { vectors, ..self }
    }

    /// Whether a tile of so many rows may read B by a table, see `gemm_by_offsets`.
    pub(crate) fn reads_offsets(self, rows: usize) -> bool {
        reads_table(rows, self.vectors, self.rows)
    }

    /// One vector wide.
    pub(super) fn narrow(self) -> TileShape {
        TileShape { vectors: 1, ..self }
    }
}

/// Rows of a full tile (mr): all registers but a few hold sums.
pub(super) const fn rows<S: Isa>() -> usize {
    let rows = (S::REGISTERS - S::FACTORS) / VECTORS;
    assert!(rows >= FEW_ROWS, "plans take tiles of few rows for granted");
    rows
}

/// Whether a tile of so many rows and vectors can read B by an offset table: a tile of at least half the full height.
pub(super) const fn reads_table(rows: usize, vectors: usize, rows_max: usize) -> bool {
    vectors == VECTORS && 2 * rows >= rows_max
}

/// Whether a tile of so many rows and vectors can pack the panels that it reads: a tile of about full size.
pub(super) const fn can_pack(rows: usize, vectors: usize, rows_max: usize) -> bool {
    vectors == VECTORS && has_full_height(rows, rows_max)
}

/// Whether a tile has about as many rows as a full one.
pub(super) const fn has_full_height(rows: usize, rows_max: usize) -> bool {
    rows + 2 >= rows_max
}

/// Whether a tile of so many rows and vectors has a loop of its own for rows of A that are neighbours. Tiles of usual sizes have; others lie at
/// an edge, where reading A by a row stride costs little.
pub(super) const fn reads_packed(rows: usize, vectors: usize, rows_max: usize) -> bool {
    let least = if vectors == VECTORS { rows_max / 2 } else { rows_max - 2 };
    vectors <= VECTORS && (rows >= least || rows <= FEW_ROWS)
}

/// Whether a tile of so many rows and vectors has an unrolled loop for panels of just so many: a size that most tiles of a large product have.
/// `splats` is [`Vector::SPLATS_MEMORY`]. Without it the factors of 14 rows take registers that the next step's need.
pub(super) const fn reads_dense(rows: usize, vectors: usize, rows_max: usize, splats: bool) -> bool {
    vectors == VECTORS && has_full_height(rows, rows_max) && (splats || rows_max < 14)
}

/// One tile, or several side by side or below each other. A's places: `a[i * a_row + k * a_step]`; B's:
/// `b[k * b_step + j * b_col]`.
#[derive(Clone, Copy)]
pub(crate) struct Tile<T> {
    /// How many tiles. If several, each has `cols` columns, whole vectors if they lie side by side. From one tile to the next the pointers to A,
    /// B, the sums before, the bias, the result and what is prefetched advance by the `_next` fields.
    pub(super) count: usize,
    pub(super) a_next: usize,
    pub(super) b_next: usize,
    pub(super) bias_next: usize,
    pub(super) from_next: usize,
    pub(super) out_next: usize,
    /// How many places of a panel k takes: steps, or pairs of steps.
    pub(super) steps: usize,
    pub(super) a: *const T,
    pub(super) a_row: usize,
    pub(super) a_step: usize,
    pub(super) b: *const T,
    pub(super) b_step: usize,
    /// 1, or anything where `b_step` is 1.
    pub(super) b_col: usize,
    /// Where B's steps lie in each of so many planes, `b_step` apart from `b` on. Null: the steps themselves are `b_step` apart.
    pub(super) offsets: *const OffsetStep,
    pub(super) planes: usize,
    /// What A's steps for a plane add to its place.
    pub(super) a_plane: usize,
    /// Where each of A's rows begins, if its steps lie in `segment_count` segments. Null: the rows are `a_row` elements
    /// apart.
    pub(super) rows: *const usize,
    pub(super) segments: *const StepSegment,
    pub(super) segment_count: usize,
    /// Columns that exist; the others of the last vector are neither read nor written.
    pub(super) cols: usize,
    /// The sums of the steps before: `from[i * from_row + j]`. Null: there are none.
    pub(super) from: *const T,
    pub(super) from_row: usize,
    /// Added to each row at the end. Null: nothing.
    pub(super) bias: *const T,
    /// Where the sums go: `out[i * out_row + j]`.
    pub(super) out: *mut T,
    pub(super) out_row: usize,
    /// What is prefetched meanwhile, as many rows as the tile has: where the next sums go. Null: nothing.
    pub(super) prefetch: *const T,
    pub(super) prefetch_row: usize,
    /// A line of B that will be packed into the next panel. Each step of a tile of packed panels prefetches the next `far_step` bytes of it. The
    /// next tile prefetches another line, which begins `far_next` bytes after this one. Null: nothing.
    pub(super) far: *const u8,
    pub(super) far_step: usize,
    pub(super) far_next: usize,
    /// Whether the sums are added to what `out` holds.
    pub(super) add: bool,
    /// Where the tile packs A's panel, of as many rows as the tile has; up to a vector less one element is written behind it. Null: nowhere.
    pub(super) pack_a_to: *mut T,
    /// Where the tile packs B's panel. Null: nowhere.
    pub(super) pack_b_to: *mut T,
}

impl<T> Default for Tile<T> {
    /// One tile of nothing, its sums begun at zero.
    fn default() -> Tile<T> {
        let (read, write) = (std::ptr::null(), std::ptr::null_mut());
        Tile {
            count: 1,
            a_next: 0,
            b_next: 0,
            bias_next: 0,
            from_next: 0,
            out_next: 0,
            steps: 0,
            a: read,
            a_row: 1,
            a_step: 0,
            b: read,
            b_step: 0,
            b_col: 1,
            offsets: std::ptr::null(),
            planes: 0,
            a_plane: 0,
            rows: std::ptr::null(),
            segments: std::ptr::null(),
            segment_count: 0,
            cols: 0,
            from: read,
            from_row: 0,
            bias: read,
            out: write,
            out_row: 0,
            prefetch: read,
            prefetch_row: 0,
            far: std::ptr::null(),
            far_step: 0,
            far_next: 0,
            add: false,
            pack_a_to: write,
            pack_b_to: write,
        }
    }
}

/// An entry of an offset table: where one step of B lies in a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OffsetStep {
    /// The first column's element, counted from the plane's first; it may lie outside.
    pub(crate) at: isize,
    /// For each vector of columns, which lanes are there. The others are zero.
    pub(crate) lanes: [u32; VECTORS],
    /// The index of the step of A, within the plane, that it is multiplied with.
    pub(crate) nth: usize,
}

impl OffsetStep {
    /// An entry whose vectors have all of their lanes.
    pub(crate) fn whole(at: isize, lanes: usize, nth: usize) -> OffsetStep {
        OffsetStep { at, lanes: [u32::MAX >> (u32::BITS as usize - lanes); VECTORS], nth }
    }
}

/// Steps of A that lie side by side, for each of its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepSegment {
    /// The number of B's steps before this segment that have no counterpart in A.
    pub(crate) skip: usize,
    /// The first step, counted from a row's beginning.
    pub(crate) from: usize,
    pub(crate) len: usize,
}
