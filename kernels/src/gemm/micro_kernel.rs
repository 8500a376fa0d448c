//! The micro-kernel: a tile of C held in registers while k runs. [`run_tile`] is the only entry.
//!
//! ```text
//!  for each step:   load W vectors of B             b_row:  | b0 | b1 |
//!                   for each of H rows:             a[i] in every lane of a vector
//!                     sums[i] += a[i] * b_row       one fused multiply-add a vector
//! ```
//!
//! A tile is H rows by W vectors of columns. Each of its elements is one chain of fused multiply-adds over ascending k,
//! begun at zero (or at the sums of the blocks of k before, loaded from memory). The order is the same for every tile size and
//! instruction set, so an element's bits do not depend on its position.
//!
//! On AVX-512 a full tile takes 14 x 2 registers for sums, 2 for B and 1 for A's broadcast element; a step costs 28 FMAs and 16 loads. Where another
//! thread uses the core too, what counts is how many instructions that is: half of its cycles decode for the other one. So in the loop that
//! large products spend their time in, the FMAs of every second row read their element of A from memory themselves (37 instructions for 44); of
//! all rows the loads would be too many. Tiles of few rows are wider, so that B is read in longer runs and more independent chains hide the latency
//! of an FMA.
//!
//! A tile also reads a B that is not packed; its last vector may then be partly filled. If B's steps are neighbours and its columns are not, squares
//! of LANES x LANES elements are transposed in registers. A tile can pack a panel that other tiles read after it, by stores beside its
//! multiplications. [`super::loops`] has the loops of these squares, and of tiles that read an offset table or segments.

#![allow(unsafe_code)]

use std::sync::atomic::{Ordering, compiler_fence};

use super::element::PanelElem;
use super::loops::{add_planes, add_segments, add_wide_steps, transpose_and_add};
use super::tile::{
    FEW_ROWS, Tile, VECTORS, VECTORS_MAX, can_pack, has_full_height, reads_dense, reads_packed, reads_table,
    rows,
};
use crate::simd::{Float, Isa, Kernel, Runner, Vector, each};

/// The most rows a tile has on any instruction set.
pub(super) const ROWS_MAX: usize = 14;
/// How many steps ahead B is prefetched; and operands that a tile packs, whose steps often lie a page apart.
pub(super) const AHEAD: usize = 12;
const AHEAD_PACKING: usize = 28;
/// How many bytes ahead an unrolled loop prefetches A's panel.
const AHEAD_IN_PANEL: usize = 1 << 10;
/// So many steps are added before the next rows of the output are prefetched, in a loop that does nothing else: a core that decodes four
/// instructions at a time has room for five beside the 50 of a step.
const RUN: usize = 16;
/// Bytes that a prefetch brings.
const LINE: usize = 64;

/// Computes `tile.count` tiles of `rows` rows. `tile` is advanced past the last.
///
/// # Safety
///
/// For each tile that it counts, and for i < rows, j < `tile.cols` and k < steps, the places named at [`Tile`] are valid to
/// read, and to write for `out` (which no other thread touches), and the tile is no larger than the instruction set's
/// [`TileShape`](super::TileShape), or that one [widened](super::TileShape::widened); one column of B at least exists, and one vector of
/// columns at most where `b_col` is not 1.
/// A tile that packs A or B is one that [`can_pack`]; a tile whose B has a table is one that [`reads_table`]. Either has whole
/// vectors of columns, which are neighbours in B. A's rows are neighbours if A is packed or B has a table. Packed panels are
/// written to places that are valid to write, and that no other thread uses.
/// B's table has as many places as a plane has steps. Each place names the step of A, within the plane, that it is
/// multiplied with.
/// A tile whose rows of A have a table [`has_full_height`], with one or two whole vectors of columns.
pub(super) unsafe fn run_tile<P: PanelElem>(
    runner: Runner,
    lanes: usize,
    rows: usize,
    tile: &mut Tile<P::Acc>,
) {
    // Lanes are a power of two; a division would take as long as some steps.
    let vectors = (tile.cols + lanes - 1) >> lanes.trailing_zeros();
    macro_rules! by_rows {
        ($($n:literal)*) => {
            match rows {
                $($n => run_rows::<P, $n>(runner, vectors, tile),)*
                _ => unreachable!("a tile has 1 to {ROWS_MAX} rows, not {rows}"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

#[inline]
fn run_rows<P: PanelElem, const H: usize>(runner: Runner, vectors: usize, tile: &mut Tile<P::Acc>) {
    match vectors {
        1 => P::compute::<H, 1>(runner, SizedTile(tile)),
        2 => P::compute::<H, VECTORS>(runner, SizedTile(tile)),
        3 | 4 => P::compute::<H, 4>(runner, SizedTile(tile)),
        _ => P::compute::<H, VECTORS_MAX>(runner, SizedTile(tile)),
    }
}

/// A tile whose size, H rows by W vectors, is known to the compiler.
pub(crate) struct SizedTile<'a, P: PanelElem, const H: usize, const W: usize>(&'a mut Tile<P::Acc>);

impl<'a, P: PanelElem, const H: usize, const W: usize> SizedTile<'a, P, H, W> {
    /// The same tile, with panels of another type.
    pub(super) fn of<Q: PanelElem<Acc = P::Acc>>(self) -> SizedTile<'a, Q, H, W> {
        SizedTile(self.0)
    }
}

/// How a tile reads its operands. Packed: A's rows are neighbours, B has whole vectors.
const PACKED: u8 = 0;
/// A by a row stride, B by whole vectors.
const WHOLE: u8 = 1;
/// The last vector of B may lack lanes.
const RAGGED: u8 = 2;
/// B's steps are neighbours: squares are transposed.
const TRANSPOSED: u8 = 3;
/// B by whole vectors; A, B, or both are packed beside the multiplications.
const PACK_A: u8 = 4;
const PACK_B: u8 = 5;
const PACK_BOTH: u8 = 6;
/// B by an offset table.
const OFFSETS: u8 = 7;
/// B by whole vectors; A's rows by a table, its steps by segments.
const SEGMENTS: u8 = 8;
/// Packed, and the steps of both follow each other without a gap.
const DENSE: u8 = 9;

impl<P: PanelElem, const H: usize, const W: usize> Kernel for SizedTile<'_, P, H, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let tile = self.0;
        let (packed, width) = (tile.a_row == 1, W * <P::Acc as Float>::Vec::<S>::LANES);
        let whole = tile.cols == width;
        let dense = const { reads_dense(H, W, rows::<S>(), <P::Acc as Float>::Vec::<S>::SPLATS_MEMORY) }
            && packed
            && tile.a_step == H
            && tile.b_step == width;
        // Sizes that an instruction set has no registers for are never asked for, and only packed panels hold places of
        // several steps; this keeps the others uncompiled.
        if const { H <= rows::<S>() && H * W <= rows::<S>() * VECTORS && (W <= VECTORS || H <= FEW_ROWS) } {
            // SAFETY: `run_tile`'s contract; the type is made only there.
            unsafe {
                if const { reads_table(H, W, rows::<S>()) } && !tile.offsets.is_null() {
                    return compute_all::<P, S, _, H, W, OFFSETS>(tile);
                }
                if const { !P::IN_PANELS && can_pack(H, W, rows::<S>()) } {
                    match (tile.pack_a_to.is_null(), tile.pack_b_to.is_null()) {
                        (true, true) => {}
                        (false, true) => return compute_all::<P, S, _, H, W, PACK_A>(tile),
                        (true, false) => return compute_all::<P, S, _, H, W, PACK_B>(tile),
                        (false, false) => return compute_all::<P, S, _, H, W, PACK_BOTH>(tile),
                    }
                }
                if const { has_full_height(H, rows::<S>()) && W <= VECTORS } && !tile.segments.is_null() {
                    return compute_all::<P, S, _, H, W, SEGMENTS>(tile);
                }
                match (tile.b_col == 1, whole) {
                    (false, _) if const { !P::IN_PANELS && W == 1 } => {
                        compute_all::<P, S, _, H, W, TRANSPOSED>(tile)
                    }
                    (_, true) if dense => compute_all::<P, S, _, H, W, DENSE>(tile),
                    (_, true) if packed && const { reads_packed(H, W, rows::<S>()) } => {
                        compute_all::<P, S, _, H, W, PACKED>(tile)
                    }
                    (_, true) => compute_all::<P, S, _, H, W, WHOLE>(tile),
                    (_, false) => compute_all::<P, S, _, H, W, RAGGED>(tile),
                }
            }
        }
    }
}

/// Computes `tile.count` tiles, one after the other; `tile` is advanced to each.
///
/// # Safety
///
/// [`run_tile`]'s.
#[inline(always)]
unsafe fn compute_all<P, S, V, const H: usize, const W: usize, const READ: u8>(tile: &mut Tile<P::Acc>)
where
    P: PanelElem<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    for _ in 0..tile.count {
        // SAFETY: the caller's.
        unsafe { compute::<P, S, V, H, W, READ>(tile) };
        tile.a = tile.a.wrapping_add(tile.a_next);
        tile.b = tile.b.wrapping_add(tile.b_next);
        tile.out = tile.out.wrapping_add(tile.out_next);
        if !tile.prefetch.is_null() {
            tile.prefetch = tile.prefetch.wrapping_add(tile.out_next);
        }
        if !tile.far.is_null() {
            tile.far = tile.far.wrapping_add(tile.far_next);
        }
        if !tile.from.is_null() {
            tile.from = tile.from.wrapping_add(tile.from_next);
        }
        if !tile.bias.is_null() {
            tile.bias = tile.bias.wrapping_add(tile.bias_next);
        }
        tile.pack_b_to = tile.pack_b_to.wrapping_add(W * V::LANES * tile.steps);
    }
}

/// Computes one tile: loads the sums before, adds all steps, then the bias, and writes or adds the sums to the result.
///
/// # Safety
///
/// [`run_tile`]'s.
#[inline(always)]
unsafe fn compute<P, S, V, const H: usize, const W: usize, const READ: u8>(tile: &Tile<P::Acc>)
where
    P: PanelElem<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    // Elements of each vector of columns; constant where none lacks lanes, so that all loops below are unrolled.
    let lens: [usize; W] = each(|j| match READ {
        RAGGED | TRANSPOSED => tile.cols.saturating_sub(j * V::LANES).min(V::LANES),
        _ => V::LANES,
    });
    let mut sums = [[V::zero(); W]; H];
    if !tile.from.is_null() {
        for (i, row) in sums.iter_mut().enumerate() {
            for (j, sum) in row.iter_mut().enumerate() {
                // SAFETY: a place of the sums before.
                *sum = unsafe { load(tile.from.wrapping_add(i * tile.from_row + j * V::LANES), lens[j]) };
            }
        }
    }
    // SAFETY: the caller's.
    sums = unsafe {
        match READ {
            TRANSPOSED => transpose_and_add::<P, S, V, H, W>(tile, sums),
            OFFSETS => add_planes::<P, S, V, H, W>(tile, sums),
            SEGMENTS => add_segments::<P, S, V, H, W>(tile, sums),
            _ if const { W > VECTORS && H <= FEW_ROWS } => add_wide_steps::<P, S, V, H, W>(tile, sums, lens),
            _ => add_steps::<P, S, V, H, W, READ>(tile, sums, lens),
        }
    };
    // Short loops, so that they are unrolled and the sums stay in registers. Adding a bias of zero would turn -0 into 0.
    if !tile.bias.is_null() {
        for j in 0..W {
            // SAFETY: one of the bias's places.
            let bias: V = unsafe { load(tile.bias.wrapping_add(j * V::LANES), lens[j]) };
            for row in &mut sums {
                row[j] = row[j] + bias;
            }
        }
    }
    let out = |i: usize, j: usize| tile.out.wrapping_add(i * tile.out_row + j * V::LANES);
    if tile.add {
        for (i, row) in sums.iter_mut().enumerate() {
            for (j, sum) in row.iter_mut().enumerate() {
                // SAFETY: a place of the result, no other thread's.
                *sum = unsafe { load::<V>(out(i, j), lens[j]) } + *sum;
            }
        }
    }
    for (i, row) in sums.iter().enumerate() {
        for (j, &sum) in row.iter().enumerate() {
            // SAFETY: a place of the result, no other thread's.
            unsafe { store(sum, out(i, j), lens[j]) };
        }
    }
}

/// Adds all steps to the sums, B's columns being neighbours.
///
/// # Safety
///
/// [`run_tile`]'s.
#[inline(always)]
unsafe fn add_steps<P, S, V, const H: usize, const W: usize, const READ: u8>(
    tile: &Tile<P::Acc>,
    mut sums: [[V; W]; H],
    lens: [usize; W],
) -> [[V; W]; H]
where
    P: PanelElem<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    let mut at = Place { a: tile.a, b: tile.b, pack_a_to: tile.pack_a_to, pack_b_to: tile.pack_b_to };
    // Rows of the output, and how many a run.
    let (mut near, mut near_left) = (tile.prefetch, if tile.prefetch.is_null() { 0 } else { H });
    let rows_a_run = near_left.div_ceil(tile.steps.div_ceil(RUN).max(1));
    let mut far = tile.far;
    let mut left = tile.steps;
    while left > 0 {
        if matches!(READ, PACKED | DENSE) && !far.is_null() {
            V::prefetch_far(far.cast());
            far = far.wrapping_add(RUN * tile.far_step);
        }
        for _ in 0..rows_a_run.min(near_left) {
            for j in 0..W {
                V::prefetch(near.wrapping_add(j * V::LANES));
            }
            near = near.wrapping_add(tile.prefetch_row);
        }
        near_left = near_left.saturating_sub(rows_a_run);
        let run = left.min(RUN);
        left -= run;
        let mut single = run;
        if READ == DENSE {
            // Four in a row, as written: of a loop of four the compiler leaves the branches.
            for _ in 0..run / 4 {
                for line in 0..(4 * H * size_of::<P::Acc>()).div_ceil(LINE) {
                    V::prefetch(at.a.wrapping_byte_add(AHEAD_IN_PANEL + line * LINE));
                }
                // SAFETY: the caller's.
                unsafe {
                    add_step::<P, S, V, H, W, READ>(tile, &mut at, &mut sums, lens);
                    add_step::<P, S, V, H, W, READ>(tile, &mut at, &mut sums, lens);
                    add_step::<P, S, V, H, W, READ>(tile, &mut at, &mut sums, lens);
                    add_step::<P, S, V, H, W, READ>(tile, &mut at, &mut sums, lens);
                }
            }
            single %= 4;
        }
        for _ in 0..single {
            // SAFETY: the caller's.
            unsafe { add_step::<P, S, V, H, W, READ>(tile, &mut at, &mut sums, lens) }
        }
    }
    sums
}

/// Where a tile reads its operands, and where it packs them. After the last step the pointers lead beyond the matrices and are not used.
struct Place<T> {
    a: *const T,
    b: *const T,
    pack_a_to: *mut T,
    pack_b_to: *mut T,
}

/// Adds one step to the sums, and goes on to the next.
///
/// # Safety
///
/// [`run_tile`]'s.
#[inline(always)]
unsafe fn add_step<P, S, V, const H: usize, const W: usize, const READ: u8>(
    tile: &Tile<P::Acc>,
    at: &mut Place<P::Acc>,
    sums: &mut [[V; W]; H],
    lens: [usize; W],
) where
    P: PanelElem<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    let (a_step, b_step) = if READ == DENSE { (H, W * V::LANES) } else { (tile.a_step, tile.b_step) };
    let ahead = if matches!(READ, PACK_A | PACK_B | PACK_BOTH) { AHEAD_PACKING } else { AHEAD };
    let mut b_row = [V::zero(); W];
    for (j, lanes) in b_row.iter_mut().enumerate() {
        // SAFETY: B's places are valid.
        *lanes = unsafe { load(at.b.wrapping_add(j * V::LANES), lens[j]) };
        // Two vectors may lie in a line. Loads that FMAs wait for leave no time for it, and of whole lines none is needed.
        if READ != DENSE || !V::SPLATS_MEMORY && (j * V::LANES * size_of::<P::Acc>()).is_multiple_of(LINE) {
            V::prefetch(at.b.wrapping_add(ahead * b_step + j * V::LANES));
        }
    }
    if matches!(READ, PACK_B | PACK_BOTH) {
        for (j, &lanes) in b_row.iter().enumerate() {
            // SAFETY: a place of B's panel.
            unsafe { store(lanes, at.pack_b_to.wrapping_add(j * V::LANES), V::LANES) };
        }
        at.pack_b_to = at.pack_b_to.wrapping_add(W * V::LANES);
    }
    if matches!(READ, PACK_A | PACK_BOTH) {
        for first in (0..H).step_by(V::LANES) {
            let next = at.a.wrapping_add(ahead * a_step + first);
            V::prefetch(next);
            V::prefetch(next.wrapping_add(V::LANES.min(H - first) - 1));
            // SAFETY: A's rows are neighbours.
            let lanes: V = unsafe { load(at.a.wrapping_add(first), V::LANES.min(H - first)) };
            // SAFETY: places of A's panel, and what may be written behind it.
            unsafe { store(lanes, at.pack_a_to.wrapping_add(first), V::LANES) };
        }
        at.pack_a_to = at.pack_a_to.wrapping_add(H);
    }
    let a_row = if matches!(READ, PACKED | DENSE | PACK_A | PACK_BOTH) { 1 } else { tile.a_row };
    // One by one: of a loop the compiler would keep the sums in memory.
    macro_rules! rows {
        ($($i:literal)*) => {
            $(if const { $i < H } {
                let splats = match const { (READ == DENSE && V::SPLATS_MEMORY, $i % 2) } {
                    (true, 0) => Splats::InProducts,
                    (true, _) => Splats::OncePinned,
                    (false, _) => Splats::Once,
                };
                // SAFETY: A's places are valid.
                unsafe { add_row::<P, S, V, W>(at.a.add($i * a_row), b_row, &mut sums[$i], splats) }
            })*
        };
    }
    rows!(0 1 2 3 4 5 6 7 8 9 10 11 12 13);
    at.a = at.a.wrapping_add(a_step);
    at.b = at.b.wrapping_add(b_step);
    if READ == DENSE {
        // The next step's loads stay behind: all of four steps' factors at once would not fit the registers.
        compiler_fence(Ordering::SeqCst);
    }
}

/// How an element of A comes into every lane.
#[derive(Clone, Copy, PartialEq)]
enum Splats {
    /// By an instruction of its own, for all products of the row.
    Once,
    /// So, and the register is free before the next row's element is read.
    OncePinned,
    /// By each product, which reads it from memory.
    InProducts,
}

/// Adds an element of A times a step's vectors of B to a row's sums.
///
/// # Safety
///
/// The element must be valid to read.
#[inline(always)]
unsafe fn add_row<P, S, V, const W: usize>(a: *const P::Acc, b_row: [V; W], sums: &mut [V; W], splats: Splats)
where
    P: PanelElem<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    // SAFETY: the caller's.
    let mut x = V::splat(unsafe { *a });
    for (j, (sum, lanes)) in sums.iter_mut().zip(b_row).enumerate() {
        if splats == Splats::InProducts && j > 0 {
            compiler_fence(Ordering::SeqCst); // so that it is not read once for both
            // SAFETY: the caller's.
            x = V::splat(unsafe { *a });
        }
        *sum = P::add::<S>(x, lanes, *sum);
    }
    if splats == Splats::OncePinned {
        for sum in sums {
            *sum = sum.pinned();
        }
    }
}

/// Loads `len` elements, at most a vector's; the other lanes are zero.
///
/// # Safety
///
/// The elements from `src` on must be valid to read.
#[inline(always)]
pub(super) unsafe fn load<V: Vector>(src: *const V::Elem, len: usize) -> V {
    // SAFETY: the caller's.
    let lanes = unsafe { std::slice::from_raw_parts(src, len) };
    if len == V::LANES { V::load(lanes) } else { V::load_partial(lanes, V::Elem::ZERO) }
}

/// Writes the first `len` elements, at most a vector's.
///
/// # Safety
///
/// The elements from `dst` on must be valid to write, and no other thread's.
#[inline(always)]
unsafe fn store<V: Vector>(lanes: V, dst: *mut V::Elem, len: usize) {
    // SAFETY: the caller's.
    let dst = unsafe { std::slice::from_raw_parts_mut(dst, len) };
    if len == V::LANES { lanes.store(dst) } else { lanes.store_partial(dst) }
}
