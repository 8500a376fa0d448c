//! Loops over the vectors of a row, for the bodies of row kernels: [`map`], [`update`], [`fold`], [`sums`] and variants.
//!
//! The compiler has to inline each of them, with the closure that it is given: code that it does not inline is compiled without the
//! instruction set's features, and a closure cannot be marked `#[inline(always)]`. So each loop calls its function in one place only, for whole vectors and for the partial vector at a row's end, and none
//! passes vectors to a closure of the standard library.

#![allow(clippy::needless_range_loop)]

use crate::simd::{Float, Vector};

/// Independent chains of a reduction.
const CHAINS: usize = 4;

/// The first `len` elements of each slice: with equal lengths one bounds check covers all of them.
#[inline(always)]
fn cut<E, const N: usize>(mut x: [&[E]; N], len: usize) -> [&[E]; N] {
    for n in 0..N {
        x[n] = &x[n][..len];
    }
    x
}

/// The vectors at `at`: whole, or partial and filled up with `fill`.
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
            true => V::load(&x[n][at..at + V::LANES]),
            false => V::load_partial(&x[n][at..], fill[n]),
        };
    }
    v
}

/// A function of `N` vectors: a closure, or a type whose `of` is marked `#[inline(always)]`, for bodies that the compiler would not inline as a
/// closure.
pub(crate) trait Function<V, const N: usize> {
    /// Its value.
    fn of(&self, x: [V; N]) -> V;
}

impl<V, F: Fn([V; N]) -> V, const N: usize> Function<V, N> for F {
    #[inline(always)]
    fn of(&self, x: [V; N]) -> V {
        self(x)
    }
}

/// `y[i] = f(x[0][i], x[1][i], ..)`.
#[inline(always)]
pub(crate) fn map<V: Vector, const N: usize>(x: [&[V::Elem]; N], y: &mut [V::Elem], f: impl Fn([V; N]) -> V) {
    map_by(x, y, f);
}

/// [`map`] by a closure or a [`Function`] type.
#[inline(always)]
pub(crate) fn map_by<V: Vector, const N: usize>(
    x: [&[V::Elem]; N],
    y: &mut [V::Elem],
    f: impl Function<V, N>,
) {
    let (x, mut at) = (cut(x, y.len()), 0);
    while at < y.len() {
        let whole = at + V::LANES <= y.len();
        let result = f.of(load(&x, at, whole, &[V::Elem::ZERO; N]));
        if whole {
            result.store(&mut y[at..])
        } else {
            result.store_partial(&mut y[at..])
        }
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
    let (x, old, mut at) = (cut(x, y.len()), old.map(|old| &old[..y.len()]), 0);
    while at < y.len() {
        let whole = at + V::LANES <= y.len();
        let [old] = load(&[old.unwrap_or(&*y)], at, whole, &[V::Elem::ZERO]);
        let result = f(old, load(&x, at, whole, &[V::Elem::ZERO; N]));
        if whole {
            result.store(&mut y[at..])
        } else {
            result.store_partial(&mut y[at..])
        }
        at += V::LANES;
    }
}

/// Two [`update`]s in one pass. Meanwhile the memory behind the rows of `x` is prefetched, where the next rows usually lie.
#[inline(always)]
pub(crate) fn update_both<V: Vector, const N: usize>(
    y: [&mut [V::Elem]; 2],
    x: [&[V::Elem]; N],
    f: impl Fn([V; 2], [V; N]) -> [V; 2],
) {
    let [a, b] = y;
    let (x, b, mut at) = (cut(x, a.len()), &mut b[..a.len()], 0);
    while at < a.len() {
        let whole = at + V::LANES <= a.len();
        let old = load(&[&*a, &*b], at, whole, &[V::Elem::ZERO; 2]);
        for n in 0..N {
            V::prefetch(x[n].as_ptr().wrapping_add(x[n].len() + at));
        }
        let new = f(old, load(&x, at, whole, &[V::Elem::ZERO; N]));
        if whole {
            new[0].store(&mut a[at..]);
            new[1].store(&mut b[at..]);
        } else {
            new[0].store_partial(&mut a[at..]);
            new[1].store_partial(&mut b[at..]);
        }
        at += V::LANES;
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

/// [`fold`]. Meanwhile as much memory as a row has is prefetched from each of the addresses `near`, which need not be valid.
#[inline(always)]
pub(crate) fn fold_near<V: Vector, const N: usize, const M: usize>(
    near: &[*const V::Elem],
    x: [&[V::Elem]; N],
    fill: [V::Elem; N],
    start: V,
    f: impl Fn([V; M], [V; N]) -> [V; M],
    join: impl Fn(V, V) -> V,
) -> [V; M] {
    let (x, step) = (cut(x, x[0].len()), CHAINS * V::LANES);
    let mut chains = [[start; M]; CHAINS];
    let mut block = 0;
    while block < x[0].len() {
        let whole = block + step <= x[0].len();
        for c in 0..CHAINS {
            let at = block + c * V::LANES;
            if !whole && at >= x[0].len() {
                break;
            }
            for row in near {
                V::prefetch(row.wrapping_add(at));
            }
            chains[c] = f(chains[c], load(&x, at, whole || at + V::LANES <= x[0].len(), &fill));
        }
        block += step;
    }
    let mut result = chains[0];
    for m in 0..M {
        result[m] = join(join(chains[0][m], chains[1][m]), join(chains[2][m], chains[3][m]));
    }
    result
}

/// [`fold`] that adds.
#[inline(always)]
pub(crate) fn sums<V: Vector, const N: usize, const M: usize>(
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
    let total = fold(x, fill, V::zero(), add, |a, b| a + b);
    let mut sums = [V::Elem::ZERO; M];
    for m in 0..M {
        sums[m] = total[m].reduce_sum();
    }
    sums
}

/// The largest element, ignoring NaN; negative infinity if there are none.
#[inline(always)]
pub(crate) fn max<V: Vector>(x: &[V::Elem]) -> V::Elem {
    let low = -V::Elem::INFINITY;
    let [max] = fold([x], [low], V::splat(low), |[m]: [V; 1], [v]: [V; 1]| [v.max(m)], |a, b| a.max(b));
    max.reduce_max()
}

/// `e^(x - shift)`.
#[inline(always)]
pub(crate) fn exp_below<V: Vector>(x: V, shift: V) -> V {
    (x - shift).exp()
}
