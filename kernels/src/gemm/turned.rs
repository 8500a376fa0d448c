//! A tile's steps where B's columns lie along k: a square of LANES x LANES at a time is turned in registers.

#![allow(unsafe_code)]

use super::element::Place;
use super::kernel::load;
use super::tile::Tile;
use crate::simd::{Float, Isa, LANES_MAX, Vector, each};

/// So few steps are added out of registers after B's last whole square.
const FEW_STEPS: usize = 4;
/// How many squares ahead of a turned B.
const SQUARES_AHEAD: usize = 8;

/// Adds all steps to the sums of one vector of columns, each of which has its steps side by side.
///
/// # Safety
///
/// [`run_tile`](super::kernel::run_tile)'s.
#[inline(always)]
pub(super) unsafe fn turn_and_add<P, S, V, const H: usize, const W: usize>(
    tile: &Tile<P::Acc>,
    mut sums: [[V; W]; H],
) -> [[V; W]; H]
where
    P: Place<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    // Lanes beyond the last column repeat it; nobody looks at their sums.
    let columns: [_; LANES_MAX] = each(|j| tile.b.wrapping_add(j.min(tile.cols - 1) * tile.b_col));
    let whole = tile.steps - tile.steps % V::LANES;
    for step in (0..whole).step_by(V::LANES) {
        let ahead = step + SQUARES_AHEAD * V::LANES;
        // Behind a column's end, the one that the next tile begins with, if it lies beside this one.
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
        // Few steps need few of the turned vectors, which are all in registers then.
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

/// Turns a square whose rows are columns of B, and adds its first `count` steps, `MAX` at most, which are k's from `first` on.
///
/// # Safety
///
/// [`run_tile`](super::kernel::run_tile)'s.
#[inline(always)]
unsafe fn add_square<P, S, V, const H: usize, const W: usize, const MAX: usize>(
    tile: &Tile<P::Acc>,
    mut sums: [[V; W]; H],
    first: usize,
    mut square: [V; LANES_MAX],
    count: usize,
) -> [[V; W]; H]
where
    P: Place<Acc: Float<Vec<S> = V>>,
    S: Isa,
    V: Vector<Elem = P::Acc>,
{
    V::turn(&mut square);
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
