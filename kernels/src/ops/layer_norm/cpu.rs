//! A row normalised, and the gradients of that. The row stays in the first-level cache between the passes over it.
//!
//! The mean is `high + low`: `high` is the rounded mean, `low` the mean of what remains after subtracting it. So the
//! differences `(x - high) - low` and the variance keep their digits when the spread is small beside the mean.

use crate::rows::{Row, RowKernel, lanes};
use crate::simd::{Float, Isa, Vector};

/// Numbers kept of a row: the mean's two parts, if there is one, and the inverse deviation.
pub(super) const fn stats_of<const CENTERED: bool>() -> usize {
    if CENTERED { 3 } else { 1 }
}

/// `x` standardised: the two parts of the mean and the inverse deviation, in every lane.
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
            (None, None) => lanes::map([x], y, |[x]| standard.of(x)),
            (Some(w), None) => lanes::map([x, w], y, |[x, w]| standard.of(x) * w),
            (None, Some(b)) => lanes::map([x, b], y, |[x, b]| standard.of(x) + b),
            (Some(w), Some(b)) => lanes::map([x, w, b], y, |[x, w, b]| standard.of(x).mul_add(w, b)),
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

pub(super) struct BackwardOf<'a, T, const CENTERED: bool> {
    pub(super) weight: Option<&'a [T]>,
    pub(super) stats: &'a [T],
    pub(super) dw: bool,
    pub(super) db: bool,
}

impl<T: Float, const CENTERED: bool, const N: usize> RowKernel<T, N> for BackwardOf<'_, T, CENTERED> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, N>) {
        match self.weight {
            None => self.gradients::<T::Vec<S>, N, false>(row, &[]),
            Some(w) => self.gradients::<T::Vec<S>, N, true>(row, w),
        }
    }
}

impl<T: Float, const CENTERED: bool> BackwardOf<'_, T, CENTERED> {
    /// `dx = (g - mean(g) - xhat mean(g xhat)) / deviation` with `g = dy w`, without the first mean if not centred; and what
    /// the row adds to `dw` and `db`. A pass for the means and one for all gradients.
    #[inline(always)]
    fn gradients<V: Vector<Elem = T>, const N: usize, const WEIGHTED: bool>(
        &self,
        row: Row<'_, T, N>,
        w: &[T],
    ) {
        let (x, dy, dsum, kept) = (row.x[0], row.x[1], row.x[N - 1], stats_of::<CENTERED>());
        let inputs = [x, dy, if WEIGHTED { w } else { dy }, dsum];
        let mut slope = Slope::<V, N, CENTERED, WEIGHTED> {
            standard: Standard::load(&self.stats[row.index * kept..][..kept]),
            means: [V::zero(); 2],
        };
        let dx = Some(row.y).filter(|dx| !dx.is_empty());
        if dx.is_some() {
            // Beyond the row's end the gradient is 0, so what stands for x there does not matter.
            let sums = lanes::sums(inputs, [T::ZERO; 4], |inputs| slope.terms(inputs));
            slope.means = sums.map(|sum| V::splat(sum / T::from_f64(x.len() as f64)));
        }
        let (dw, db) = row.sums.split_at_mut(if self.dw { x.len() } else { 0 });
        // What is known here is not asked for each vector.
        match (dx, self.dw.then_some(dw), self.db.then_some(db)) {
            (Some(dx), Some(dw), Some(db)) => slope.put::<0>(inputs, [Some(dx), Some(dw), Some(db)]),
            (Some(dx), Some(dw), None) => slope.put::<1>(inputs, [Some(dx), Some(dw), None]),
            (dx, dw, db) => slope.put::<2>(inputs, [dx, dw, db]),
        }
    }
}

/// What a row's gradients are made of, but for the elements of x, dy, w and, if `N` is 3, dsum.
#[derive(Clone, Copy)]
struct Slope<V, const N: usize, const CENTERED: bool, const WEIGHTED: bool> {
    standard: Standard<V, CENTERED>,
    /// Of g and of g xhat.
    means: [V; 2],
}

impl<V: Vector, const N: usize, const CENTERED: bool, const WEIGHTED: bool> Slope<V, N, CENTERED, WEIGHTED> {
    /// g, if that is to be centred, and g xhat.
    #[inline(always)]
    fn terms(self, [x, dy, w, _]: [V; 4]) -> [V; 2] {
        let g = if WEIGHTED { dy * w } else { dy };
        [if CENTERED { g } else { V::zero() }, g * self.standard.of(x)]
    }

    /// `CALL` tells calls apart, so that the compiler inlines each.
    #[inline(always)]
    fn put<const CALL: usize>(self, inputs: [&[V::Elem]; 4], outputs: [Option<&mut [V::Elem]>; 3]) {
        lanes::update_all(outputs, inputs, |[_, dw, db], [x, dy, w, dsum]| {
            let hat = self.standard.of(x);
            let g = if WEIGHTED { dy * w } else { dy };
            let centred = if CENTERED { g - self.means[0] } else { g };
            let dx = (centred - hat * self.means[1]) * self.standard.inverse;
            [if N > 2 { dx + dsum } else { dx }, dy.mul_add(hat, dw), db + dy]
        });
    }
}
