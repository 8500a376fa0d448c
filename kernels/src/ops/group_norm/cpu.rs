//! A group of channels normalised, channel by channel, and the gradients of that.

use crate::ops::layer_norm::cpu::{Standard, measure};
use crate::rows::{Row, RowKernel, lanes};
use crate::simd::{Float, Isa, Vector};

pub(super) struct Forward<'a, T> {
    pub(super) weight: &'a [T],
    pub(super) bias: &'a [T],
    pub(super) places: usize,
    pub(super) eps: f64,
}

impl<T: Float> RowKernel<T, 1> for Forward<'_, T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 1>) {
        let [x] = row.x;
        measure::<T::Vec<S>, true>(x, self.eps, row.stats);
        let standard = Standard::<T::Vec<S>, true>::load(row.stats);
        let first = first_channel(row.index, x.len() / self.places.max(1), self.weight.len());
        if self.places == 1 {
            let (w, b) = (&self.weight[first..][..x.len()], &self.bias[first..][..x.len()]);
            return lanes::map([x, w, b], row.y, |[x, w, b]: [T::Vec<S>; 3]| standard.of(x).mul_add(w, b));
        }
        let channels = x.chunks(self.places.max(1)).zip(row.y.chunks_mut(self.places.max(1)));
        for (i, (x, y)) in channels.enumerate() {
            let w = T::Vec::<S>::splat(self.weight[first + i]);
            let b = T::Vec::<S>::splat(self.bias[first + i]);
            lanes::map([x], y, |[x]| standard.of(x).mul_add(w, b));
        }
    }
}

pub(super) struct BackwardOf<'a, T> {
    pub(super) weight: &'a [T],
    pub(super) stats: &'a [T],
    pub(super) places: usize,
}

impl<T: Float> RowKernel<T, 2> for BackwardOf<'_, T> {
    #[inline(always)]
    fn run<S: Isa>(&self, row: Row<'_, T, 2>) {
        let ([x, dy], places) = (row.x, self.places.max(1));
        let standard = Standard::<T::Vec<S>, true>::load(&self.stats[row.index * 3..][..3]);
        let first = first_channel(row.index, x.len() / places, self.weight.len());
        let (dw, db) = row.sums.split_at_mut(self.weight.len());
        let n = T::from_f64(x.len() as f64);
        let splat = T::Vec::<S>::splat;
        if places == 1 {
            let w = &self.weight[first..][..x.len()];
            let [sum, product] = lanes::sums([x, dy, w], [T::ZERO; 3], |[x, dy, w]: [T::Vec<S>; 3]| {
                [dy * w, dy * w * standard.of(x)]
            });
            let own = [&mut dw[first..][..x.len()], &mut db[first..][..x.len()]];
            lanes::update_both(own, [x, dy], |[dw, db]: [T::Vec<S>; 2], [x, dy]| {
                [dy.mul_add(standard.of(x), dw), db + dy]
            });
            let (mean, product) = (splat(sum / n), splat(product / n));
            return lanes::map([x, dy, w], row.y, |[x, dy, w]| {
                (dy * w - mean - standard.of(x) * product) * standard.inverse
            });
        }
        let (mut sum, mut product) = (T::ZERO, T::ZERO);
        for (i, (x, dy)) in x.chunks(places).zip(dy.chunks(places)).enumerate() {
            // Beyond a channel's end the gradient is 0, so what stands for x there does not matter.
            let [of_dy, of_product] =
                lanes::sums([x, dy], [T::ZERO; 2], |[x, dy]: [T::Vec<S>; 2]| [dy, dy * standard.of(x)]);
            dw[first + i] += of_product;
            db[first + i] += of_dy;
            sum += of_dy * self.weight[first + i];
            product += of_product * self.weight[first + i];
        }
        let (mean, product) = (splat(sum / n), splat(product / n));
        let channels = x.chunks(places).zip(dy.chunks(places)).zip(row.y.chunks_mut(places));
        for (i, ((x, dy), dx)) in channels.enumerate() {
            let w = splat(self.weight[first + i]);
            lanes::map([x, dy], dx, |[x, dy]| (dy * w - mean - standard.of(x) * product) * standard.inverse);
        }
    }
}

/// The first channel of a row that has `own` of all channels.
#[inline(always)]
fn first_channel(row: usize, own: usize, all: usize) -> usize {
    row * own % all.max(1)
}
