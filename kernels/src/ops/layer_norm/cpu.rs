//! Layer norm and RMS norm of a row on a CPU ([`Forward`]), and their gradients ([`BackwardOf`]). The row stays in the L1 cache between the
//! passes over it. Group norm and batch norm use [`measure`] and [`Standard`].
//!
//! The mean is `high + low`: `high` is the rounded mean, `low` the mean of what remains after subtracting it. So the
//! differences `(x - high) - low` and the variance keep their digits when the spread is small beside the mean.

use crate::rows::lanes::{self, Function};
use crate::rows::{Row, RowKernel};
use crate::simd::{Float, Isa, Vector};

/// How many numbers are kept of a row: the mean's two parts, if `CENTERED`, and the inverse deviation.
pub(super) const fn stats_of<const CENTERED: bool>() -> usize {
    if CENTERED { 3 } else { 1 }
}

/// The standardisation of a row, `(x - mean) / deviation`: the two parts of the mean and the inverse deviation, in every lane.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Standard<V, const CENTERED: bool> {
    high: V,
    low: V,
    pub(in crate::ops) inverse: V,
}

impl<V: Vector, const CENTERED: bool> Standard<V, CENTERED> {
    #[inline(always)]
    pub(in crate::ops) fn load(stats: &[V::Elem]) -> Self {
        let (high, low) = match CENTERED {
            true => (V::splat(stats[0]), V::splat(stats[1])),
            false => (V::zero(), V::zero()),
        };
        Standard { high, low, inverse: V::splat(stats[stats.len() - 1]) }
    }

    #[inline(always)]
    pub(in crate::ops) fn of(self, x: V) -> V {
        (if CENTERED { (x - self.high) - self.low } else { x }) * self.inverse
    }
}

/// `x` standardised, times a weight if `W`, plus a bias if `B`; these follow `x` in the inputs.
struct Affine<V, const CENTERED: bool, const W: bool, const B: bool>(Standard<V, CENTERED>);

impl<V: Vector, const CENTERED: bool, const W: bool, const B: bool, const N: usize> Function<V, N>
    for Affine<V, CENTERED, W, B>
{
    #[inline(always)]
    fn of(&self, x: [V; N]) -> V {
        let y = self.0.of(x[0]);
        match (W, B) {
            (false, false) => y,
            (true, false) => y * x[1],
            (false, true) => y + x[1],
            (true, true) => y.mul_add(x[1], x[2]),
        }
    }
}

/// The forward pass: measures the row, keeps its numbers in `stats`, and standardises it.
pub(super) struct Forward<'a, T, const CENTERED: bool> {
    pub(super) weight: Option<&'a [T]>,
    pub(super) bias: Option<&'a [T]>,
    pub(super) eps: f64,
}

impl<T: Float, const CENTERED: bool, const N: usize> RowKernel<T, N> for Forward<'_, T, CENTERED> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, N>) {
        let (x, y, stats) = (row.x[0], row.y, row.stats);
        measure::<T::Vec<S>, CENTERED>(x, self.eps, stats);
        let standard = Standard::<T::Vec<S>, CENTERED>::load(stats);
        match (self.weight, self.bias) {
            (None, None) => lanes::map_by([x], y, Affine::<_, CENTERED, false, false>(standard)),
            (Some(w), None) => lanes::map_by([x, w], y, Affine::<_, CENTERED, true, false>(standard)),
            (None, Some(b)) => lanes::map_by([x, b], y, Affine::<_, CENTERED, false, true>(standard)),
            (Some(w), Some(b)) => lanes::map_by([x, w, b], y, Affine::<_, CENTERED, true, true>(standard)),
        }
    }
}

/// Mean and inverse deviation of a row; returns the variance.
#[inline(always)]
pub(in crate::ops) fn measure<V: Vector, const CENTERED: bool>(
    x: &[V::Elem],
    eps: f64,
    stats: &mut [V::Elem],
) -> V::Elem {
    let n = x.len() as f64;
    let mut inverse = |variance: f64| {
        stats[stats_of::<CENTERED>() - 1] = V::Elem::from_f64(1.0 / (variance + eps).sqrt());
        V::Elem::from_f64(variance)
    };
    if !CENTERED {
        let [squares] = lanes::sums([x], [V::Elem::ZERO], |[x]: [V; 1]| [x * x]);
        return inverse(squares.to_f64() / n);
    }
    let [sum] = lanes::sums([x], [V::Elem::ZERO], |x: [V; 1]| x);
    let high = V::Elem::from_f64(sum.to_f64() / n);
    let shift = V::splat(high);
    let [rest, squares] = lanes::sums([x], [high], |[x]: [V; 1]| {
        let d = x - shift;
        [d, d * d]
    });
    let low = rest.to_f64() / n;
    let variance = inverse(squares.to_f64() / n - low * low);
    (stats[0], stats[1]) = (high, V::Elem::from_f64(low));
    variance
}

/// The backward pass: `dx`, and the row's part of the sums for `dw` and `db`, if they are wanted.
pub(super) struct BackwardOf<'a, T, const CENTERED: bool> {
    pub(super) weight: Option<&'a [T]>,
    pub(super) stats: &'a [T],
    pub(super) dw: bool,
    pub(super) db: bool,
}

impl<T: Float, const CENTERED: bool, const N: usize> RowKernel<T, N> for BackwardOf<'_, T, CENTERED> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, N>) {
        let (x, dy, width) = (row.x[0], row.x[1], row.x[0].len());
        let kept = stats_of::<CENTERED>();
        let standard = Standard::<T::Vec<S>, CENTERED>::load(&self.stats[row.index * kept..][..kept]);
        if !row.y.is_empty() {
            match self.weight {
                None => input_gradient([x, dy], row.y, standard, |[x, dy]| (x, dy)),
                Some(w) => input_gradient([x, dy, w], row.y, standard, |[x, dy, w]| (x, dy * w)),
            }
            if let Some(dsum) = row.x.get(2) {
                lanes::update(row.y, [dsum], |dx: T::Vec<S>, [dsum]| dx + dsum);
            }
        }
        let (dw, db) = row.sums.split_at_mut(if self.dw { width } else { 0 });
        if self.dw && self.db {
            return lanes::update_both([dw, db], [x, dy], |[dw, db]: [T::Vec<S>; 2], [x, dy]| {
                [dy.mul_add(standard.of(x), dw), db + dy]
            });
        }
        if self.dw {
            lanes::update(dw, [x, dy], |sum: T::Vec<S>, [x, dy]| dy.mul_add(standard.of(x), sum));
        }
        if self.db {
            lanes::update(db, [dy], |sum: T::Vec<S>, [dy]| sum + dy);
        }
    }
}

/// `dx = (g - mean(g) - xhat mean(g xhat)) / deviation` with `g = dy w`; without the first mean if not centred.
#[inline(always)]
fn input_gradient<V: Vector, const N: usize, const CENTERED: bool>(
    inputs: [&[V::Elem]; N],
    dx: &mut [V::Elem],
    standard: Standard<V, CENTERED>,
    split: impl Fn([V; N]) -> (V, V),
) {
    let n = V::Elem::from_f64(dx.len() as f64);
    // A partial vector is filled up with gradients of 0, so that its values of x do not matter.
    let [sum, product] = lanes::sums(inputs, [V::Elem::ZERO; N], |v| {
        let (x, g) = split(v);
        [if CENTERED { g } else { V::zero() }, g * standard.of(x)]
    });
    let (mean, product) = (V::splat(sum / n), V::splat(product / n));
    lanes::map(inputs, dx, |v| {
        let (x, g) = split(v);
        let centred = if CENTERED { g - mean } else { g };
        (centred - standard.of(x) * product) * standard.inverse
    });
}
