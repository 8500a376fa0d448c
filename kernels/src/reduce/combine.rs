//! How terms are brought together.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use crate::simd::Vector;

/// An associative function of two numbers, up to rounding.
pub(crate) trait Combine: Copy + Sync {
    /// What changes nothing.
    const START: f64;
    /// Lane by lane. To be marked `#[inline(always)]`.
    fn merge<V: Vector>(a: V, b: V) -> V;
    /// Two blocks' results.
    fn join(a: f64, b: f64) -> f64;
}

/// Brings the first `count` of them together, a power of two: the first with the middle one, and so on by halves.
#[inline(always)]
pub(super) fn halves<V: Vector, C: Combine, const K: usize, const N: usize>(
    _: C,
    mut parts: [[V; K]; N],
    count: usize,
) -> [V; K] {
    let mut half = count / 2;
    while half > 0 {
        for i in 0..half {
            for k in 0..K {
                parts[i][k] = C::merge(parts[i][k], parts[i + half][k]);
            }
        }
        half /= 2;
    }
    parts[0]
}

/// The sum.
#[derive(Clone, Copy)]
pub(crate) struct Total;

impl Combine for Total {
    const START: f64 = 0.0;

    #[inline(always)]
    fn merge<V: Vector>(a: V, b: V) -> V {
        a + b
    }

    #[inline(always)]
    fn join(a: f64, b: f64) -> f64 {
        a + b
    }
}

/// The largest, NaN if there is one.
#[derive(Clone, Copy)]
pub(crate) struct Largest;

impl Combine for Largest {
    const START: f64 = f64::NEG_INFINITY;

    #[inline(always)]
    fn merge<V: Vector>(a: V, b: V) -> V {
        a.nan_max(b)
    }

    #[inline(always)]
    fn join(a: f64, b: f64) -> f64 {
        if a > b || a.is_nan() { a } else { b }
    }
}

/// The smallest, NaN if there is one.
#[derive(Clone, Copy)]
pub(crate) struct Smallest;

impl Combine for Smallest {
    const START: f64 = f64::INFINITY;

    #[inline(always)]
    fn merge<V: Vector>(a: V, b: V) -> V {
        a.nan_min(b)
    }

    #[inline(always)]
    fn join(a: f64, b: f64) -> f64 {
        if a < b || a.is_nan() { a } else { b }
    }
}

/// The product.
#[derive(Clone, Copy)]
pub(crate) struct Times;

impl Combine for Times {
    const START: f64 = 1.0;

    #[inline(always)]
    fn merge<V: Vector>(a: V, b: V) -> V {
        a * b
    }

    #[inline(always)]
    fn join(a: f64, b: f64) -> f64 {
        a * b
    }
}
