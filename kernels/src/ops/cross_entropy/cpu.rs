//! A row of logits: what the loss and its gradient need of it.

use crate::rows::columns::{self, ColumnKernel, Columns, SIDE};
use crate::rows::lanes::{self, exp_below};
use crate::rows::{Row, RowKernel};
use crate::simd::{Float, Isa, LANES_MAX, Vector};

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
        let (max, sum) = exponentials::<T::Vec<S>>(x);
        let shift = T::Vec::<S>::splat(max);
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

/// As [`Forward`] without smoothing, of as many classes as make a block at most.
impl<T: Float> ColumnKernel<T, 1> for Forward<'_, T> {
    #[inline(always)]
    fn run<S: Isa>(&self, columns: Columns<'_, T, 1>) {
        let Columns { x: [x], stats: [most, sums, ..], first, count } = columns else {
            unreachable!("two numbers are kept of a column")
        };
        for column in (0..SIDE).step_by(T::Vec::<S>::LANES) {
            let max = columns::max::<T::Vec<S>>(x, column, -T::MAX);
            let exp = |row: usize| (columns::at::<T::Vec<S>>(&x[row], column) - max).exp();
            columns::sums(x.len(), exp).store(&mut sums[column..]);
            max.store(&mut most[column..]);
        }
        for i in 0..count {
            if self.targets[first + i].is_none() {
                (most[i], sums[i]) = (T::ONE, T::ONE);
            } else if sums[i] == T::ZERO {
                (most[i], sums[i]) = (-T::INFINITY, T::NAN);
            }
        }
    }
}

/// Elements that stay in the L1 cache between two passes.
pub(super) const BLOCK: usize = 2048;

/// A row's largest element, NaN passed over, and the sum of the exponentials below it, in one pass over memory: each
/// lane has a maximum and a sum of its own, which shrinks when a block has a larger element.
#[inline(always)]
fn exponentials<V: Vector>(x: &[V::Elem]) -> (V::Elem, V::Elem) {
    let low = -V::Elem::INFINITY;
    let (mut max, mut sum) = (V::splat(-V::Elem::MAX), V::zero());
    if x.len() <= BLOCK {
        let [most] = lanes::fold([x], [low], max, |[max]: [V; 1], [x]: [V; 1]| [x.max(max)], |a, b| a.max(b));
        let all = most.reduce_max();
        let [sum] = lanes::sums([x], [low], |[x]: [V; 1]| [(x - V::splat(all)).exp()]);
        return if sum == V::Elem::ZERO { (low, V::Elem::NAN) } else { (all, sum) };
    }
    let mut rest = x;
    while !rest.is_empty() {
        let (block, after) = rest.split_at(rest.len().min(BLOCK));
        let [new] =
            lanes::fold([block], [low], max, |[max]: [V; 1], [x]: [V; 1]| [x.max(max)], |a, b| a.max(b));
        if rest.len() < x.len() {
            sum = sum * (max - new).exp();
        }
        let [here] = lanes::fold_near(
            &[block.as_ptr_range().end],
            [block],
            [low],
            V::zero(),
            |[sum]: [V; 1], [x]: [V; 1]| [sum + (x - new).exp()],
            |a, b| a + b,
        );
        (max, sum, rest) = (new, sum + here, after);
    }
    let all = max.reduce_max();
    let sum = (sum * (max - V::splat(all)).exp()).reduce_sum();
    // Nothing but negative infinity.
    if sum == V::Elem::ZERO { (low, V::Elem::NAN) } else { (all, sum) }
}

/// How a row's gradient is made: `factor e^(x - max) - even w[c]`, less `on_target` at its class.
pub(super) struct Gradient<T> {
    /// Beyond the row's end if the row is a part without it.
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
        if let Some(at) = dx.get_mut(gradient.class) {
            *at = *at - gradient.on_target;
        }
    }
}

/// As [`BackwardOf`] without smoothing.
impl<T: Float> ColumnKernel<T, 1> for BackwardOf<'_, T> {
    #[inline(always)]
    fn run<S: Isa>(&self, columns: Columns<'_, T, 1>) {
        let (Columns { x: [dx], first, count, .. }, lanes) = (columns, T::Vec::<S>::LANES);
        for column in (0..count).step_by(lanes) {
            let (mut max, mut factor) = ([T::ZERO; LANES_MAX], [T::ZERO; LANES_MAX]);
            for i in 0..lanes.min(count - column) {
                if let Some(gradient) = &self.gradients[first + column + i] {
                    (max[i], factor[i]) = (gradient.max, gradient.factor);
                }
            }
            let (max, factor) = (T::Vec::<S>::load(&max), T::Vec::<S>::load(&factor));
            columns::update(dx, column, |x: T::Vec<S>, _| exp_below(x, max) * factor);
        }
        for i in 0..count {
            match &self.gradients[first + i] {
                Some(gradient) => {
                    let to = &mut dx[gradient.class][i];
                    *to = *to - gradient.on_target;
                }
                None => dx.iter_mut().for_each(|row| row[i] = T::ZERO),
            }
        }
    }
}
