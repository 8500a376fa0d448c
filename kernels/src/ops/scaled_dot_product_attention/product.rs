//! Products of small matrices that lie in the first-level caches, summed in registers.

use crate::simd::Vector;

/// The number of rows that every product's left side must have a multiple of.
pub(super) const ROWS: usize = 8;

/// A product's left side.
#[derive(Clone, Copy)]
pub(super) enum Left<'a, T> {
    /// Row i begins at `i * stride`.
    Rows(&'a [T], usize),
    /// Column k begins at `k * stride`.
    Columns(&'a [T], usize),
}

/// A matrix whose row k begins at `k * stride`.
#[derive(Clone, Copy)]
pub(super) struct Right<'a, T>(pub(super) &'a [T], pub(super) usize);

/// What becomes of the former elements of the result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Write {
    Replace,
    Add,
}

/// C = A B or C += A B for A `m` x `k`, with `m` a multiple of [`ROWS`] and `n` of the vector's lanes. C's rows begin at
/// multiples of `stride`. An element's sum is one chain over ascending k.
#[inline(always)]
pub(super) fn product<V: Vector>(
    a: Left<'_, V::Elem>,
    b: Right<'_, V::Elem>,
    (c, stride): (&mut [V::Elem], usize),
    [m, n, k]: [usize; 3],
    write: Write,
) {
    debug_assert!(m % ROWS == 0 && n % V::LANES == 0);
    // Thirty-two registers hold 8 x 2 sums well, sixteen 4 x 2.
    if size_of::<V>() == 64 {
        tiles::<V, 8>(a, b, (c, stride), [m, n, k], write);
    } else {
        tiles::<V, 4>(a, b, (c, stride), [m, n, k], write);
    }
}

#[inline(always)]
fn tiles<V: Vector, const H: usize>(
    a: Left<'_, V::Elem>,
    b: Right<'_, V::Elem>,
    (c, stride): (&mut [V::Elem], usize),
    [m, n, k]: [usize; 3],
    write: Write,
) {
    let mut j = 0;
    while j < n {
        let wide = n - j >= 2 * V::LANES;
        let panel = Right(&b.0[j.min(b.0.len())..], b.1);
        for i in (0..m).step_by(H) {
            let c = &mut c[i * stride + j..];
            match (a, wide) {
                (Left::Rows(a, s), true) => {
                    sum_into::<V, _, H, 2>(by_rows::<V, H>(&a[i * s..], s, k), panel, c, stride, write);
                }
                (Left::Rows(a, s), false) => {
                    sum_into::<V, _, H, 1>(by_rows::<V, H>(&a[i * s..], s, k), panel, c, stride, write);
                }
                (Left::Columns(a, s), true) => {
                    sum_into::<V, _, H, 2>(by_columns::<V, H>(&a[i..], s, k), panel, c, stride, write);
                }
                (Left::Columns(a, s), false) => {
                    sum_into::<V, _, H, 1>(by_columns::<V, H>(&a[i..], s, k), panel, c, stride, write);
                }
            }
        }
        j += if wide { 2 * V::LANES } else { V::LANES };
    }
}

/// The left side's columns, `H` elements each.
#[inline(always)]
fn by_rows<V: Vector, const H: usize>(
    a: &[V::Elem],
    stride: usize,
    k: usize,
) -> impl Iterator<Item = [V::Elem; H]> {
    let rows: [&[V::Elem]; H] = std::array::from_fn(|h| &a[h * stride..][..k]);
    (0..k).map(move |step| std::array::from_fn(|h| rows[h][step]))
}

#[inline(always)]
fn by_columns<V: Vector, const H: usize>(
    a: &[V::Elem],
    stride: usize,
    k: usize,
) -> impl Iterator<Item = [V::Elem; H]> {
    a.chunks(stride).take(k).map(|column| {
        let column = &column[..H];
        std::array::from_fn(|h| column[h])
    })
}

#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn sum_into<V: Vector, I: Iterator<Item = [V::Elem; H]>, const H: usize, const W: usize>(
    a: I,
    b: Right<'_, V::Elem>,
    c: &mut [V::Elem],
    stride: usize,
    write: Write,
) {
    // Plain loops: vectors stay out of closures; see `lanes`.
    let mut sums = [[V::zero(); W]; H];
    if write == Write::Add {
        for h in 0..H {
            for w in 0..W {
                sums[h][w] = V::load(&c[h * stride + w * V::LANES..]);
            }
        }
    }
    for (column, row) in a.zip(b.0.chunks(b.1)) {
        let mut lanes = [V::zero(); W];
        for w in 0..W {
            lanes[w] = V::load(&row[w * V::LANES..]);
        }
        for h in 0..H {
            let x = V::splat(column[h]);
            for w in 0..W {
                sums[h][w] = x.mul_add(lanes[w], sums[h][w]);
            }
        }
    }
    for h in 0..H {
        for w in 0..W {
            sums[h][w].store(&mut c[h * stride + w * V::LANES..]);
        }
    }
}
