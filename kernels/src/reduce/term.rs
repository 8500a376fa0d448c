//! What a reduction takes of an element ([`Term`]: `x`, `|x|`, `x²`, `e^(x - shift)`, ..) and how two numbers are merged ([`Combine`]: sum, product,
//! largest, smallest); and how a kernel reads elements ([`Elements`]), halves among them.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use phalanx_tensor::{bf16, f16};

use crate::simd::{Float, Isa, LANES_MAX, Vector};

/// An element type in memory, to be computed in `W`.
pub(crate) trait Stored<W: Float>: Copy + Sync {
    /// Whether the type and `W` are f32: then halves are widened in registers.
    const HALVES: bool;
    /// A vector of the first elements of `from`, and of `fill` if there are fewer. To be marked `#[inline(always)]`.
    fn load<S: Isa>(from: &[Self], fill: W) -> W::Vec<S>;
}

impl<W: Float> Stored<W> for W {
    const HALVES: bool = size_of::<W>() == size_of::<f32>();

    #[inline(always)]
    fn load<S: Isa>(from: &[W], fill: W) -> W::Vec<S> {
        match from.len() < <W::Vec<S> as Vector>::LANES {
            true => W::Vec::<S>::load_partial(from, fill),
            false => W::Vec::<S>::load(from),
        }
    }
}

/// The elements that a kernel reads.
pub(super) trait Elements<W: Float>: Copy {
    /// `len` elements from place `at` on.
    fn part(self, at: usize, len: usize) -> Self;
    /// A vector of `count` elements from place `at` on, at most as many as there are lanes, then `fill`. To be marked
    /// `#[inline(always)]`.
    fn load<S: Isa>(self, at: usize, count: usize, fill: W) -> W::Vec<S>;
    /// The address of place `at`, for a prefetch; it may lie outside.
    fn address(self, at: usize) -> *const W;
}

impl<E: Stored<W>, W: Float> Elements<W> for &[E] {
    #[inline(always)]
    fn part(self, at: usize, len: usize) -> Self {
        &self[at..][..len]
    }

    #[inline(always)]
    fn load<S: Isa>(self, at: usize, count: usize, fill: W) -> W::Vec<S> {
        E::load::<S>(&self[at..][..count], fill)
    }

    #[inline(always)]
    fn address(self, at: usize) -> *const W {
        self.as_ptr().wrapping_add(at).cast()
    }
}

/// Halves, which are widened in registers. Each load branches on their type, so that a kernel is compiled once for both.
#[derive(Clone, Copy)]
pub(super) enum Half<'a> {
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<W: Float> Elements<W> for Half<'_> {
    #[inline(always)]
    fn part(self, at: usize, len: usize) -> Self {
        match self {
            Half::Bf16(x) => Half::Bf16(&x[at..][..len]),
            Half::F16(x) => Half::F16(&x[at..][..len]),
        }
    }

    #[inline(always)]
    fn load<S: Isa>(self, at: usize, count: usize, fill: W) -> W::Vec<S> {
        let x = match self {
            Half::Bf16(x) => W::load_bf16::<S>(&x[at..][..count]),
            Half::F16(x) => W::load_f16::<S>(&x[at..][..count]),
        };
        if count >= <W::Vec<S> as Vector>::LANES || fill == W::ZERO {
            return x;
        }
        let mut lanes = [W::ZERO; LANES_MAX];
        x.store(&mut lanes);
        W::Vec::<S>::load_partial(&lanes[..count], fill)
    }

    #[inline(always)]
    fn address(self, at: usize) -> *const W {
        match self {
            Half::Bf16(x) => x.as_ptr().wrapping_add(at).cast(),
            Half::F16(x) => x.as_ptr().wrapping_add(at).cast(),
        }
    }
}

/// f32 that is reduced in f64, as products are.
impl Stored<f64> for f32 {
    const HALVES: bool = false;

    #[inline(always)]
    fn load<S: Isa>(from: &[f32], fill: f64) -> S::F64 {
        S::in_f64(from, fill)
    }
}

/// A function of an element `x` and its output's `shift` that gives `K` numbers, each of which is merged.
pub(crate) trait Term<const K: usize>: Copy + Sync {
    /// The numbers. To be marked `#[inline(always)]`.
    fn of<V: Vector>(self, x: V, shift: V) -> [V; K];
    /// An element that changes no result, to fill partial vectors with.
    fn neutral<W: Float>(self, shift: W) -> W;
}

/// `x`.
#[derive(Clone, Copy)]
pub(crate) struct Itself {
    /// The neutral element: 0 for a sum, an infinity for an extremum.
    pub(crate) neutral: f64,
}

impl Term<1> for Itself {
    #[inline(always)]
    fn of<V: Vector>(self, x: V, _shift: V) -> [V; 1] {
        [x]
    }

    #[inline(always)]
    fn neutral<W: Float>(self, _shift: W) -> W {
        W::from_f64(self.neutral)
    }
}

/// `|x|`.
#[derive(Clone, Copy)]
pub(crate) struct Magnitude {
    /// The neutral element: 0, or an infinity for the smallest.
    pub(crate) neutral: f64,
}

impl Term<1> for Magnitude {
    #[inline(always)]
    fn of<V: Vector>(self, x: V, _shift: V) -> [V; 1] {
        [x.abs()]
    }

    #[inline(always)]
    fn neutral<W: Float>(self, _shift: W) -> W {
        W::from_f64(self.neutral)
    }
}

/// `x²`.
#[derive(Clone, Copy)]
pub(crate) struct Square;

impl Term<1> for Square {
    #[inline(always)]
    fn of<V: Vector>(self, x: V, _shift: V) -> [V; 1] {
        [x * x]
    }

    #[inline(always)]
    fn neutral<W: Float>(self, _shift: W) -> W {
        W::ZERO
    }
}

/// `|x|^p`.
#[derive(Clone, Copy)]
pub(crate) struct Power(pub(crate) f64);

impl Term<1> for Power {
    #[inline(always)]
    fn of<V: Vector>(self, x: V, _shift: V) -> [V; 1] {
        [x.abs().pow(V::splat(V::Elem::from_f64(self.0)))]
    }

    #[inline(always)]
    fn neutral<W: Float>(self, _shift: W) -> W {
        if self.0 < 0.0 { W::INFINITY } else { W::ZERO }
    }
}

/// 1 where `x` is not 0.
#[derive(Clone, Copy)]
pub(crate) struct NonZero;

impl Term<1> for NonZero {
    #[inline(always)]
    fn of<V: Vector>(self, x: V, _shift: V) -> [V; 1] {
        [V::select(x.ne(V::zero()), V::splat(V::Elem::ONE), V::zero())]
    }

    #[inline(always)]
    fn neutral<W: Float>(self, _shift: W) -> W {
        W::ZERO
    }
}

/// `e^(x - shift)`.
#[derive(Clone, Copy)]
pub(crate) struct ExpAbove;

impl Term<1> for ExpAbove {
    #[inline(always)]
    fn of<V: Vector>(self, x: V, shift: V) -> [V; 1] {
        [(x - shift).exp()]
    }

    #[inline(always)]
    fn neutral<W: Float>(self, _shift: W) -> W {
        -W::INFINITY
    }
}

/// `x - shift` and its square.
#[derive(Clone, Copy)]
pub(crate) struct Deviation;

impl Term<2> for Deviation {
    #[inline(always)]
    fn of<V: Vector>(self, x: V, shift: V) -> [V; 2] {
        let d = x - shift;
        [d, d * d]
    }

    #[inline(always)]
    fn neutral<W: Float>(self, shift: W) -> W {
        shift
    }
}

/// `|x / shift|^p`.
#[derive(Clone, Copy)]
pub(crate) struct Relative(pub(crate) f64);

impl Term<1> for Relative {
    #[inline(always)]
    fn of<V: Vector>(self, x: V, shift: V) -> [V; 1] {
        Power(self.0).of(x / shift, shift)
    }

    #[inline(always)]
    fn neutral<W: Float>(self, shift: W) -> W {
        Power(self.0).neutral(shift)
    }
}

/// An associative function of two numbers, up to rounding.
pub(crate) trait Combine: Copy + Sync {
    /// The neutral element.
    const START: f64;
    /// Lane by lane. To be marked `#[inline(always)]`.
    fn merge<V: Vector>(a: V, b: V) -> V;
    /// Two blocks' results.
    fn join(a: f64, b: f64) -> f64;
}

/// Merges the first `count` vectors, a power of two, by halves: vector i with vector i + half, until one is left.
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
