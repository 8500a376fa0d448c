//! What a reduction takes of an element.

use crate::simd::{Float, Isa, Vector};

/// An element as it lies in memory, to be computed in `W`.
pub(crate) trait Stored<W: Float>: Copy + Sync {
    /// A vector of the first elements of `from`, and of `fill` if there are fewer. To be marked `#[inline(always)]`.
    fn load<S: Isa>(from: &[Self], fill: W) -> W::Vec<S>;
}

impl<W: Float> Stored<W> for W {
    #[inline(always)]
    fn load<S: Isa>(from: &[W], fill: W) -> W::Vec<S> {
        match from.len() < <W::Vec<S> as Vector>::LANES {
            true => W::Vec::<S>::load_partial(from, fill),
            false => W::Vec::<S>::load(from),
        }
    }
}

/// f32 that is reduced in f64, as products are.
impl Stored<f64> for f32 {
    #[inline(always)]
    fn load<S: Isa>(from: &[f32], fill: f64) -> S::F64 {
        S::in_f64(from, fill)
    }
}

/// `K` numbers made of an element `x` and its output's `shift`.
pub(crate) trait Term<const K: usize>: Copy + Sync {
    /// The numbers. To be marked `#[inline(always)]`.
    fn of<V: Vector>(self, x: V, shift: V) -> [V; K];
    /// An element that contributes nothing.
    fn neutral<W: Float>(self, shift: W) -> W;
}

/// `x`.
#[derive(Clone, Copy)]
pub(crate) struct Itself {
    /// What changes nothing: 0 for a sum, an infinity for an extremum.
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
    /// What changes nothing: 0, or an infinity for the smallest.
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
