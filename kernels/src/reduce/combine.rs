//! How terms are brought together.

use crate::simd::Vector;

/// An associative function of two numbers, up to rounding.
pub(crate) trait Combine: Copy + Sync {
    /// What changes nothing.
    const START: f64;
    /// Lane by lane. To be marked `#[inline(always)]`.
    fn merge<V: Vector>(a: V, b: V) -> V;
    /// All lanes of one vector. To be marked `#[inline(always)]`.
    fn across<V: Vector>(v: V) -> V::Elem;
    /// Two blocks' results.
    fn join(a: f64, b: f64) -> f64;
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
    fn across<V: Vector>(v: V) -> V::Elem {
        v.reduce_sum()
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
    fn across<V: Vector>(v: V) -> V::Elem {
        v.reduce_max()
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
    fn across<V: Vector>(v: V) -> V::Elem {
        v.reduce_min()
    }

    #[inline(always)]
    fn join(a: f64, b: f64) -> f64 {
        if a < b || a.is_nan() { a } else { b }
    }
}
