//! The product itself: `out[j][i] = sum over p of a[i][p] b[p][j]`, the sum one chain over ascending p.
//!
//! Both inputs are packed into panels whose elements lie in the order in which they are used; the inner loop keeps a
//! tile of sums in registers, `LANES` wide along i, so the compiler makes it vector code for the instruction set it
//! is compiled for. Tiles of columns are shared out among threads.
#![allow(unsafe_code)]

use rayon::prelude::*;

use crate::element::Number;

/// Columns of a tile: their sums are in registers at once.
const COLUMNS: usize = 6;
/// Multiplications below which threads cost more than they save.
const ALONE: usize = 1 << 22;

/// Element (row, column) of an input.
pub(crate) type Input<'a, T> = &'a (dyn Fn(usize, usize) -> T + Sync);

/// The product of an m x k and a k x n matrix, by columns.
pub(crate) fn product<T: Number>(m: usize, n: usize, k: usize, a: Input<'_, T>, b: Input<'_, T>) -> Vec<T> {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the machine has the instructions.
            let tile: Tile<T, 32> = |a, b, sums| unsafe { tile_avx512(a, b, sums) };
            return by_tiles(m, n, k, a, b, tile);
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the machine has the instructions.
            let tile: Tile<T, 16> = |a, b, sums| unsafe { tile_avx2(a, b, sums) };
            return by_tiles(m, n, k, a, b, tile);
        }
    }
    if cfg!(target_arch = "aarch64") {
        return by_tiles::<T, 8>(m, n, k, a, b, |a, b, sums| tile(a, b, sums, T::fused));
    }
    by_tiles::<T, 8>(m, n, k, a, b, |a, b, sums| tile(a, b, sums, T::plain))
}

type Sums<T, const LANES: usize> = [[T; LANES]; COLUMNS];
type Tile<T, const LANES: usize> = fn(&[[T; LANES]], &[[T; COLUMNS]], &mut Sums<T, LANES>);

#[inline(always)]
fn tile<T: Number, const LANES: usize>(
    a: &[[T; LANES]],
    b: &[[T; COLUMNS]],
    sums: &mut Sums<T, LANES>,
    add: impl Fn(T, T, T) -> T,
) {
    let mut kept = *sums;
    for (a, b) in a.iter().zip(b) {
        for (column, &times) in kept.iter_mut().zip(b) {
            for (sum, &x) in column.iter_mut().zip(a) {
                *sum = add(x, times, *sum);
            }
        }
    }
    *sums = kept;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn tile_avx512<T: Number>(a: &[[T; 32]], b: &[[T; COLUMNS]], sums: &mut Sums<T, 32>) {
    tile(a, b, sums, T::fused);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn tile_avx2<T: Number>(a: &[[T; 16]], b: &[[T; COLUMNS]], sums: &mut Sums<T, 16>) {
    tile(a, b, sums, T::fused);
}

fn by_tiles<T: Number, const LANES: usize>(
    m: usize,
    n: usize,
    k: usize,
    a: Input<'_, T>,
    b: Input<'_, T>,
    tile: Tile<T, LANES>,
) -> Vec<T> {
    let mut out = vec![T::default(); m * n];
    if m == 0 || n == 0 {
        return out;
    }
    let panels: Vec<Vec<[T; LANES]>> =
        (0..m.div_ceil(LANES)).map(|panel| rows(panel * LANES, m, k, a)).collect();
    if m * n * k < ALONE {
        share_of(0, &mut out, m, n, k, &panels, b, tile);
        return out;
    }
    let columns = n.div_ceil(COLUMNS).div_ceil(rayon::current_num_threads()) * COLUMNS;
    out.par_chunks_mut(columns * m).enumerate().for_each(|(share, out)| {
        share_of(share * columns, out, m, n, k, &panels, b, tile);
    });
    out
}

#[allow(clippy::too_many_arguments)]
fn share_of<T: Number, const LANES: usize>(
    first: usize,
    out: &mut [T],
    m: usize,
    n: usize,
    k: usize,
    panels: &[Vec<[T; LANES]>],
    b: Input<'_, T>,
    tile: Tile<T, LANES>,
) {
    for (strip, out) in out.chunks_mut(COLUMNS * m).enumerate() {
        let from = first + strip * COLUMNS;
        let packed = columns(from, n, k, b);
        for (panel, a) in panels.iter().enumerate() {
            let mut sums = [[T::default(); LANES]; COLUMNS];
            tile(a, &packed, &mut sums);
            let row = panel * LANES;
            for (column, sums) in out.chunks_mut(m).zip(&sums) {
                let there = LANES.min(m - row);
                column[row..row + there].copy_from_slice(&sums[..there]);
            }
        }
    }
}

fn rows<T: Number, const LANES: usize>(from: usize, m: usize, k: usize, a: Input<'_, T>) -> Vec<[T; LANES]> {
    let there = LANES.min(m - from);
    let row = |p| std::array::from_fn(|lane| if lane < there { a(from + lane, p) } else { T::default() });
    (0..k).map(row).collect()
}

fn columns<T: Number>(from: usize, n: usize, k: usize, b: Input<'_, T>) -> Vec<[T; COLUMNS]> {
    let there = COLUMNS.min(n - from);
    let column = |p| std::array::from_fn(|c| if c < there { b(p, from + c) } else { T::default() });
    (0..k).map(column).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(i: usize, j: usize) -> f64 {
        ((i * 31 + j * 17) % 23) as f64 - 11.0
    }

    #[test]
    fn products_of_whole_numbers_are_exact_in_every_shape() {
        for (m, n, k) in [(1, 1, 1), (5, 7, 3), (33, 13, 65), (64, 12, 128), (3, 2, 0), (31, 6, 9)] {
            let (a, b) = (|i, p| value(i, p), |p, j| value(p + 5, j));
            let out = product::<f64>(m, n, k, &a, &b);
            let narrow = product::<f32>(m, n, k, &|i, p| a(i, p) as f32, &|p, j| b(p, j) as f32);
            for i in 0..m {
                for j in 0..n {
                    let sum: f64 = (0..k).map(|p| a(i, p) * b(p, j)).sum();
                    assert_eq!(out[j * m + i], sum, "{m} {n} {k}: ({i}, {j})");
                    assert_eq!(f64::from(narrow[j * m + i]), sum, "{m} {n} {k}: ({i}, {j})");
                }
            }
        }
    }

    #[test]
    fn large_products_are_shared_among_threads_and_stay_exact() {
        let (m, n, k) = (130, 258, 160);
        let out = product::<f32>(m, n, k, &|i, p| value(i, p) as f32, &|p, j| value(p, j) as f32);
        let at = |i: usize, j: usize| (0..k).map(|p| value(i, p) * value(p, j)).sum::<f64>();
        for (i, j) in [(0, 0), (129, 257), (64, 128), (1, 131)] {
            assert_eq!(f64::from(out[j * m + i]), at(i, j));
        }
    }
}
