//! RMSprop.
//!
//! `g += decay p`; `v = alpha v + (1 - alpha) g²`; centered: `a = alpha a + (1 - alpha) g`, and `v - a²` in place of
//! v; `b = momentum b + g / (sqrt(v) + eps)`; `p -= lr b`.
//! Source: Tieleman and Hinton: Neural networks for machine learning, lecture 6.5 (2012).

use phalanx_tensor::Result;

use super::{Rule, Step, decayed, splat, update};
use crate::simd::{Float, Vector};

/// The numbers of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rmsprop {
    /// The learning rate.
    pub lr: f64,
    /// Decay of the averages.
    pub alpha: f64,
    /// Added to the root.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Decay of the momentum buffer.
    pub momentum: f64,
    /// Whether the variance is taken in place of the second moment.
    pub centered: bool,
}

/// A step of RMSprop; each item's state is the square average, then the gradient average if centered, then the momentum
/// buffer if the momentum is not 0.
///
/// # Errors
/// If the number of state tensors, shapes, dtypes or devices do not fit.
pub fn rmsprop_(step: Step<'_>, rmsprop: Rmsprop) -> Result<()> {
    match 1 + usize::from(rmsprop.centered) + usize::from(rmsprop.momentum != 0.0) {
        1 => update::<1>("rmsprop", rmsprop, step),
        2 => update::<2>("rmsprop", rmsprop, step),
        _ => update::<3>("rmsprop", rmsprop, step),
    }
}

impl<const N: usize> Rule<N> for Rmsprop {
    #[inline(always)]
    fn eval<V: Vector>(self, p: V, g: V, mut state: [V; N]) -> (V, [V; N]) {
        let (keep, take) = (splat::<V>(self.alpha), splat::<V>(1.0 - self.alpha));
        let g = decayed(g, p, self.weight_decay);
        let v = state[0].mul_add(keep, g * g * take);
        state[0] = v;
        let mut spread = v;
        if self.centered {
            let a = state[1].mul_add(keep, g * take);
            state[1] = a;
            spread = v - a * a;
        }
        let mut b = g / (spread.sqrt() + V::splat(V::Elem::from_f64(self.eps)));
        if self.momentum != 0.0 {
            let last = N - 1;
            b = state[last].mul_add(splat(self.momentum), b);
            state[last] = b;
        }
        (p - b * splat(self.lr), state)
    }
}
