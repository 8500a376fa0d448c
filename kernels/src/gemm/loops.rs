//! The micro-kernel's loops for tiles of few rows ([`add_wide_steps`]), for a B whose columns have their steps side by side
//! ([`transpose_and_add`]: squares are transposed in registers), and for operands that are no matrices: B by an offset table ([`add_planes`], for `offsets.rs`), A by segments ([`add_segments`], for `segments.rs`).

#![allow(unsafe_code)]

use super::element::PanelElem;
use super::micro_kernel::{AHEAD, load};
use super::tile::Tile;
use crate::simd::{Float, Isa, LANES_MAX, Vector, each};

/// Adds all steps to the sums of a wide tile: its few elements of A are in registers and B's vectors are loaded one by one, as all of them would
/// not fit.
///
/// # Safety
///
/// [`run_tile`](super::micro_kernel::run_tile)'s.
#[inline(always)]
pub(super) unsafe fn add_wide_steps<P, S, V, const H: usize, const W: usize>(
    tile: &Tile<P::Acc>,
    mut sums: [[V; W]; H],
    lens: [usize; W],
) -> [[V; W]; H]
where
    P: PanelElem<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    let (mut a, mut b) = (tile.a, tile.b);
    let near_rows = if tile.prefetch.is_null() { 0 } else { H };
    for step in 0..tile.steps {
        if step < near_rows {
            prefetch_output::<V, W>(tile, step);
        }
        let mut a_column = [V::zero(); H];
        for (i, x) in a_column.iter_mut().enumerate() {
            // SAFETY: A's places are valid.
            *x = V::splat(unsafe { *a.add(i * tile.a_row) });
        }
        for (j, &len) in lens.iter().enumerate() {
            // SAFETY: B's places are valid.
            let lanes: V = unsafe { load(b.wrapping_add(j * V::LANES), len) };
            V::prefetch(b.wrapping_add(AHEAD * tile.b_step + j * V::LANES));
            for (row, x) in sums.iter_mut().zip(a_column) {
                row[j] = P::add::<S>(x, lanes, row[j]);
            }
        }
        // Wrapping: after the last step they point beyond the matrices and are not used.
        a = a.wrapping_add(tile.a_step);
        b = b.wrapping_add(tile.b_step);
    }
    sums
}

/// Adds all steps to the sums. B's steps are those of the offset table in each of `tile.planes` planes.
///
/// # Safety
///
/// [`run_tile`](super::micro_kernel::run_tile)'s.
#[inline(always)]
pub(super) unsafe fn add_planes<P, S, V, const H: usize, const W: usize>(
    tile: &Tile<P::Acc>,
    mut sums: [[V; W]; H],
) -> [[V; W]; H]
where
    P: PanelElem<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    let (mut a_plane, mut plane) = (tile.a, tile.b);
    let each = tile.steps.checked_div(tile.planes).unwrap_or(0);
    let all = u32::MAX >> (u32::BITS as usize - V::LANES);
    for first in (0..tile.steps).step_by(each.max(1)) {
        for i in 0..each {
            if first + i < H {
                prefetch_output::<V, W>(tile, first + i);
            }
            // SAFETY: the table has so many places.
            let step = unsafe { &*tile.offsets.add(i) };
            let (a, b) = (a_plane.wrapping_add(step.nth * tile.a_step), plane.wrapping_offset(step.at));
            let mut b_row = [V::zero(); W];
            for (j, lanes) in b_row.iter_mut().enumerate() {
                let b = b.wrapping_add(j * V::LANES);
                // A load that leaves lanes out takes a multiplication's time, too; few do.
                // SAFETY: what is there is valid.
                *lanes = unsafe {
                    match step.lanes[j] == all {
                        true => load(b, V::LANES),
                        false => V::load_where(b, step.lanes[j]),
                    }
                };
                // The vectors of the next tile, which follow these in memory.
                V::prefetch(b.wrapping_add(W * V::LANES));
            }
            for (i, row) in sums.iter_mut().enumerate() {
                // SAFETY: A's places are valid.
                let x = V::splat(unsafe { *a.add(i) });
                for (sum, lanes) in row.iter_mut().zip(b_row) {
                    *sum = P::add::<S>(x, lanes, *sum);
                }
            }
        }
        a_plane = a_plane.wrapping_add(tile.a_plane);
        plane = plane.wrapping_add(tile.b_step);
    }
    sums
}

/// Adds all steps to the sums. A's row i begins at `tile.rows[i]`; its steps are those of the segments.
///
/// # Safety
///
/// [`run_tile`](super::micro_kernel::run_tile)'s.
#[inline(always)]
pub(super) unsafe fn add_segments<P, S, V, const H: usize, const W: usize>(
    tile: &Tile<P::Acc>,
    mut sums: [[V; W]; H],
) -> [[V; W]; H]
where
    P: PanelElem<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    (0..H).for_each(|row| prefetch_output::<V, W>(tile, row));
    let mut b = tile.b;
    for i in 0..tile.segment_count {
        // SAFETY: there are so many segments.
        let run = unsafe { &*tile.segments.add(i) };
        b = b.wrapping_add(run.skip * tile.b_step);
        for step in run.from..run.from + run.len {
            let a = tile.a.wrapping_add(step);
            let mut b_row = [V::zero(); W];
            for (j, lanes) in b_row.iter_mut().enumerate() {
                // SAFETY: B's places are valid.
                *lanes = unsafe { load(b.wrapping_add(j * V::LANES), V::LANES) };
                V::prefetch(b.wrapping_add(AHEAD * tile.b_step + j * V::LANES));
            }
            for (i, row) in sums.iter_mut().enumerate() {
                // SAFETY: the table has a place for each row, and the row such a step.
                let x = V::splat(unsafe { *a.add(*tile.rows.add(i)) });
                for (sum, lanes) in row.iter_mut().zip(b_row) {
                    *sum = P::add::<S>(x, lanes, *sum);
                }
            }
            b = b.wrapping_add(tile.b_step);
        }
    }
    sums
}

/// Prefetches a row of where the sums go.
#[inline(always)]
pub(super) fn prefetch_output<V: Vector, const W: usize>(tile: &Tile<V::Elem>, row: usize) {
    for j in 0..W {
        V::prefetch(tile.prefetch.wrapping_add(row * tile.prefetch_row + j * V::LANES));
    }
}

/// So few steps after B's last whole square are added from registers.
const FEW_STEPS: usize = 4;
/// How many squares ahead a transposed B is prefetched.
const SQUARES_AHEAD: usize = 8;

/// Adds all steps to the sums of one vector of columns of B, each of which has its steps side by side.
///
/// # Safety
///
/// [`run_tile`](super::micro_kernel::run_tile)'s.
#[inline(always)]
pub(super) unsafe fn transpose_and_add<P, S, V, const H: usize, const W: usize>(
    tile: &Tile<P::Acc>,
    mut sums: [[V; W]; H],
) -> [[V; W]; H]
where
    P: PanelElem<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    // Lanes beyond the last column repeat it; their sums are not read.
    let columns: [_; LANES_MAX] = each(|j| tile.b.wrapping_add(j.min(tile.cols - 1) * tile.b_col));
    let whole = tile.steps - tile.steps % V::LANES;
    for step in (0..whole).step_by(V::LANES) {
        let ahead = step + SQUARES_AHEAD * V::LANES;
        // Near a column's end the next tile's first column is prefetched, if that tile lies beside this one.
        let ahead = if ahead < tile.steps { ahead } else { V::LANES * tile.b_col + ahead - tile.steps };
        let mut square = [V::zero(); LANES_MAX];
        for (row, column) in square[..V::LANES].iter_mut().zip(&columns) {
            // SAFETY: B's places are valid.
            *row = unsafe { load(column.add(step), V::LANES) };
            V::prefetch_far(column.wrapping_add(ahead));
        }
        // SAFETY: the caller's.
        sums = unsafe { add_square::<P, S, V, H, W, LANES_MAX>(tile, sums, step, square, V::LANES) };
    }
    let count = tile.steps - whole;
    if count > 0 {
        let mut square = [V::zero(); LANES_MAX];
        for (row, column) in square[..V::LANES].iter_mut().zip(&columns) {
            // SAFETY: B's places are valid.
            *row = unsafe { load(column.add(whole), count) };
        }
        // Few steps need few of the transposed vectors, which are all in registers then.
        // SAFETY: the caller's.
        sums = unsafe {
            match count <= FEW_STEPS {
                true => add_square::<P, S, V, H, W, FEW_STEPS>(tile, sums, whole, square, count),
                false => add_square::<P, S, V, H, W, LANES_MAX>(tile, sums, whole, square, count),
            }
        };
    }
    sums
}

/// Transposes a square whose rows are columns of B, and adds its first `count` steps (at most `MAX`) to the sums; step 0 of the square is step
/// `first` of k.
///
/// # Safety
///
/// [`run_tile`](super::micro_kernel::run_tile)'s.
#[inline(always)]
unsafe fn add_square<P, S, V, const H: usize, const W: usize, const MAX: usize>(
    tile: &Tile<P::Acc>,
    mut sums: [[V; W]; H],
    first: usize,
    mut square: [V; LANES_MAX],
    count: usize,
) -> [[V; W]; H]
where
    P: PanelElem<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    V::transpose(&mut square);
    for (s, &lanes) in square[..MAX].iter().enumerate() {
        if s == count {
            break;
        }
        for (i, row) in sums.iter_mut().enumerate() {
            // SAFETY: A's places are valid.
            let x = unsafe { *tile.a.add(i * tile.a_row + (first + s) * tile.a_step) };
            row[0] = P::add::<S>(V::splat(x), lanes, row[0]);
        }
    }
    sums
}
