//! Loops over the vectors of rows.
//!
//! What is not inlined is compiled without the instruction set, and a closure cannot be marked to be. So each of these
//! calls its function in one place only, for whole vectors and a row's end alike, and none hands vectors to a closure of
//! the standard library.

#![allow(clippy::needless_range_loop)]

use crate::simd::{Float, Vector};

/// Chains of a reduction that run side by side.
const CHAINS: usize = 4;

/// Slices cut to one length: one comparison then serves them all.
#[inline(always)]
fn cut<'a, T, const N: usize>(mut x: [&'a [T]; N], len: usize) -> [&'a [T]; N] {
    for n in 0..N {
        x[n] = &x[n][..len];
    }
    x
}

/// The vectors from `at` on, whole ones or, beyond the end, filled up.
#[inline(always)]
fn load<V: Vector, const N: usize>(
    x: &[&[V::Elem]; N],
    at: usize,
    whole: bool,
    fill: &[V::Elem; N],
) -> [V; N] {
    let mut v = [V::zero(); N];
    for n in 0..N {
        v[n] = match whole {
            true => V::load(&x[n][at..]),
            false => V::load_partial(&x[n][at.min(x[n].len())..], fill[n]),
        };
    }
    v
}

/// Writes a vector from `at` on, what is beyond the end left out.
#[inline(always)]
fn store<V: Vector>(v: V, y: &mut [V::Elem], at: usize, whole: bool) {
    if whole { v.store(&mut y[at..]) } else { v.store_partial(&mut y[at..]) }
}

/// `y[i] = f(x[0][i], x[1][i], ..)`.
#[inline(always)]
pub(crate) fn map<V: Vector, const N: usize>(x: [&[V::Elem]; N], y: &mut [V::Elem], f: impl Fn([V; N]) -> V) {
    let (len, mut at) = (y.len(), 0);
    let x = cut(x, len);
    while at < len {
        let whole = len - at >= V::LANES;
        store(f(load(&x, at, whole, &[V::Elem::ZERO; N])), y, at, whole);
        at += V::LANES;
    }
}

/// `y[i] = f(y[i], x[0][i], ..)`.
#[inline(always)]
pub(crate) fn update<V: Vector, const N: usize>(
    y: &mut [V::Elem],
    x: [&[V::Elem]; N],
    f: impl Fn(V, [V; N]) -> V,
) {
    update_from(None, y, x, f);
}

/// `y[i] = f(old[i], x[0][i], ..)`, where `old` may be what `y` holds.
#[inline(always)]
pub(crate) fn update_from<V: Vector, const N: usize>(
    old: Option<&[V::Elem]>,
    y: &mut [V::Elem],
    x: [&[V::Elem]; N],
    f: impl Fn(V, [V; N]) -> V,
) {
    let (len, mut at) = (y.len(), 0);
    let x = cut(x, len);
    let from = old.map(|old| &old[..len]);
    while at < len {
        let whole = len - at >= V::LANES;
        let [old] = load(&[from.unwrap_or(&*y)], at, whole, &[V::Elem::ZERO]);
        let result = f(old, load(&x, at, whole, &[V::Elem::ZERO; N]));
        store(result, y, at, whole);
        at += V::LANES;
    }
}

/// `y[m][i] = f([y[0][i], ..], [x[0][i], ..])[m]` for those of `y` that there are. Meanwhile the rows at `near` come near.
#[inline(always)]
pub(crate) fn update_all<V: Vector, const N: usize, const M: usize>(
    mut y: [Option<&mut [V::Elem]>; M],
    x: [&[V::Elem]; N],
    near: &[*const V::Elem],
    f: impl Fn([V; M], [V; N]) -> [V; M],
) {
    let (len, mut at) = (x[0].len(), 0);
    let x = cut(x, len);
    while at < len {
        let whole = len - at >= V::LANES;
        let mut values = [V::zero(); M];
        for m in 0..M {
            if let Some(y) = &y[m] {
                [values[m]] = load(&[&y[..len]], at, whole, &[V::Elem::ZERO]);
            }
        }
        values = f(values, load(&x, at, whole, &[V::Elem::ZERO; N]));
        for m in 0..M {
            if let Some(y) = &mut y[m] {
                store(values[m], &mut y[..len], at, whole);
            }
        }
        bring::<V>(near, at);
        at += V::LANES;
    }
}

/// Where what lies behind a row begins: in memory the next row, perhaps.
#[inline(always)]
pub(crate) fn next<T>(row: &[T]) -> *const T {
    row.as_ptr_range().end
}

/// Asks for the elements `at` behind these addresses, which need not be valid. The processor by itself stops at a
/// page's end, and waits while a row is computed with.
#[inline(always)]
fn bring<V: Vector>(near: &[*const V::Elem], at: usize) {
    for i in 0..near.len() {
        V::prefetch(near[i].wrapping_add(at));
    }
}

/// Folds vectors of the rows into `M` values at once: `f` takes the values so far and the next vectors, `join`
/// joins two partial results. Beyond a row's end its elements are `fill`, which must not change the result.
#[inline(always)]
pub(crate) fn fold<V: Vector, const N: usize, const M: usize>(
    x: [&[V::Elem]; N],
    fill: [V::Elem; N],
    start: V,
    f: impl Fn([V; M], [V; N]) -> [V; M],
    join: impl Fn(V, V) -> V,
) -> [V; M] {
    fold_near(&[], x, fill, start, f, join)
}

/// [`fold`]; meanwhile the rows at `near` come near.
#[inline(always)]
pub(crate) fn fold_near<V: Vector, const N: usize, const M: usize>(
    near: &[*const V::Elem],
    x: [&[V::Elem]; N],
    fill: [V::Elem; N],
    start: V,
    f: impl Fn([V; M], [V; N]) -> [V; M],
    join: impl Fn(V, V) -> V,
) -> [V; M] {
    let (len, step) = (x[0].len(), CHAINS * V::LANES);
    let x = cut(x, len);
    let mut chains = [[start; M]; CHAINS];
    let mut block = 0;
    while block < len {
        let rest = cut_start(x, block);
        let whole = len - block >= step;
        for c in 0..CHAINS {
            chains[c] = f(chains[c], load(&rest, c * V::LANES, whole, &fill));
            bring::<V>(near, block + c * V::LANES);
        }
        block += step;
    }
    let mut result = chains[0];
    for m in 0..M {
        result[m] = join(join(chains[0][m], chains[1][m]), join(chains[2][m], chains[3][m]));
    }
    result
}

/// Slices without their first elements.
#[inline(always)]
fn cut_start<'a, T, const N: usize>(mut x: [&'a [T]; N], start: usize) -> [&'a [T]; N] {
    for n in 0..N {
        x[n] = &x[n][start..];
    }
    x
}

/// [`fold`] that adds.
#[inline(always)]
pub(crate) fn sums<V: Vector, const N: usize, const M: usize>(
    x: [&[V::Elem]; N],
    fill: [V::Elem; N],
    f: impl Fn([V; N]) -> [V; M],
) -> [V::Elem; M] {
    sums_near(&[], x, fill, f)
}

/// [`sums`]; meanwhile the rows at `near` come near.
#[inline(always)]
pub(crate) fn sums_near<V: Vector, const N: usize, const M: usize>(
    near: &[*const V::Elem],
    x: [&[V::Elem]; N],
    fill: [V::Elem; N],
    f: impl Fn([V; N]) -> [V; M],
) -> [V::Elem; M] {
    let add = |so_far: [V; M], v: [V; N]| {
        let mut terms = f(v);
        for m in 0..M {
            terms[m] = so_far[m] + terms[m];
        }
        terms
    };
    let total = fold_near(near, x, fill, V::zero(), add, |a, b| a + b);
    let mut sums = [V::Elem::ZERO; M];
    for m in 0..M {
        sums[m] = total[m].reduce_sum();
    }
    sums
}

/// The largest element, NaN passed over; negative infinity of none. Meanwhile the rows at `near` come near.
#[inline(always)]
pub(crate) fn max_near<V: Vector>(near: &[*const V::Elem], x: &[V::Elem]) -> V::Elem {
    let low = -V::Elem::INFINITY;
    let larger = |[m]: [V; 1], [v]: [V; 1]| [v.max(m)];
    let [max] = fold_near(near, [x], [low], V::splat(low), larger, |a, b| a.max(b));
    max.reduce_max()
}

/// `e^(x - shift)`.
#[inline(always)]
pub(crate) fn exp_below<V: Vector>(x: V, shift: V) -> V {
    (x - shift).exp()
}
