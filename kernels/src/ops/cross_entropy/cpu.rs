//! A row of logits: what the loss and its gradient need of it.

use crate::rows::lanes::{self, exp_below};
use crate::rows::{Row, RowKernel};
use crate::simd::{Float, Isa, Vector};

/// Keeps of each row its largest element, the sum of the exponentials below it and, with smoothing, the sum of the
/// elements below it, weighted.
pub(super) struct Forward<'a, T> {
    pub(super) targets: &'a [Option<usize>],
    pub(super) weight: Option<&'a [T]>,
}

impl<T: Float> RowKernel<T, 1> for Forward<'_, T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 1>) {
        let ([x], stats) = (row.x, row.stats);
        stats.fill(T::ONE);
        if self.targets[row.index].is_none() {
            return;
        }
        let max = lanes::max::<T::Vec<S>>(x);
        let shift = T::Vec::<S>::splat(max);
        let [sum] = lanes::sums([x], [-T::INFINITY], |[x]: [T::Vec<S>; 1]| [(x - shift).exp()]);
        (stats[0], stats[1]) = (max, sum);
        if let Some(below) = stats.get_mut(2) {
            let [sum] = match self.weight {
                None => lanes::sums([x], [max], |[x]: [T::Vec<S>; 1]| [x - shift]),
                Some(w) => lanes::sums([x, w], [max, T::ZERO], |[x, w]: [T::Vec<S>; 2]| [(x - shift) * w]),
            };
            *below = sum;
        }
    }
}

/// How a row's gradient is made: `factor e^(x - max) - even w[c]`, less `on_target` at its class.
pub(super) struct Gradient<T> {
    pub(super) class: usize,
    pub(super) max: T,
    pub(super) factor: T,
    pub(super) on_target: T,
    pub(super) even: T,
}

pub(super) struct BackwardOf<'a, T> {
    pub(super) gradients: &'a [Option<Gradient<T>>],
    pub(super) weight: Option<&'a [T]>,
    pub(super) smooth: bool,
}

/// Of the input's row, or without one of the logits that `y` holds.
impl<T: Float, const N: usize> RowKernel<T, N> for BackwardOf<'_, T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, N>) {
        let (x, dx) = (row.x.first().copied(), row.y);
        let Some(gradient) = &self.gradients[row.index] else { return dx.fill(T::ZERO) };
        let splat = T::Vec::<S>::splat;
        let (max, factor) = (splat(gradient.max), splat(gradient.factor));
        let even = splat(gradient.even);
        match self.weight {
            Some(w) => lanes::update_from(x, dx, [w], |x, [w]| exp_below(x, max) * factor - even * w),
            None if self.smooth => lanes::update_from(x, dx, [], |x, []| exp_below(x, max) * factor - even),
            None => lanes::update_from(x, dx, [], |x, []| exp_below(x, max) * factor),
        }
        dx[gradient.class] = dx[gradient.class] - gradient.on_target;
    }
}
