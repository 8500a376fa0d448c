//! Adagrad.
//!
//! `g += decay p`; `s += g²`; `p -= lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)`.
//! Source: Duchi, Hazan, Singer: Adaptive subgradient methods (2011).

use phalanx_tensor::Result;

use super::{Rule, Step, decayed, splat, update};
use crate::simd::Vector;

/// The numbers of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    /// The learning rate.
    pub lr: f64,
    /// How the learning rate shrinks with the steps.
    pub lr_decay: f64,
    /// Added to the root.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// The step's number, from 1.
    pub step: u64,
}

/// A step of Adagrad; each item's state is the sum of squares.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn adagrad_(step: Step<'_>, adagrad: Adagrad) -> Result<()> {
    update("adagrad", adagrad, step)
}

impl Rule<1> for Adagrad {
    #[inline(always)]
    fn eval<V: Vector>(self, p: V, g: V, [s]: [V; 1]) -> (V, [V; 1]) {
        let rate = self.lr / (1.0 + self.step.saturating_sub(1) as f64 * self.lr_decay);
        let g = decayed(g, p, self.weight_decay);
        let s = g.mul_add(g, s);
        (p - g * splat(rate) / (s.sqrt() + splat(self.eps)), [s])
    }
}
