//! Adam and AdamW.
//!
//! `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g²`, `p -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`.
//! Adam adds `decay * p` to the gradient first; AdamW multiplies `p` by `1 - lr * decay` first.
//! Sources: Kingma and Ba: Adam (2015); Loshchilov and Hutter: Decoupled weight decay regularization (2019).

use phalanx_tensor::Result;

use super::{Rule, Step, decayed, splat, update};
use crate::simd::{Float, Vector};

/// Adam's numbers for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// The learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// The step's number, from 1.
    pub step: u64,
}

/// A step of Adam; each item's state is the two moments.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn adam_(step: Step<'_>, adam: Adam) -> Result<()> {
    update("adam", Corrected::<false>::new(adam), step)
}

/// A step of AdamW; each item's state is the two moments.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn adamw_(step: Step<'_>, adam: Adam) -> Result<()> {
    update("adamw", Corrected::<true>::new(adam), step)
}

/// Adam with what depends on the step's number computed; `W`: decoupled weight decay.
#[derive(Clone, Copy)]
struct Corrected<const W: bool> {
    adam: Adam,
    /// `lr / (1 - b1^t)`
    rate: f64,
    /// `1 / sqrt(1 - b2^t)`
    root: f64,
}

impl<const W: bool> Corrected<W> {
    fn new(adam: Adam) -> Self {
        let correction = |beta: f64| 1.0 - beta.powf(adam.step as f64);
        Corrected {
            adam,
            rate: adam.lr / correction(adam.beta1),
            root: correction(adam.beta2).sqrt().recip(),
        }
    }
}

impl<const W: bool> Rule<2> for Corrected<W> {
    #[inline(always)]
    fn eval<V: Vector>(self, p: V, g: V, [m, v]: [V; 2]) -> (V, [V; 2]) {
        let Adam { lr, beta1, beta2, eps, weight_decay, .. } = self.adam;
        let g = if W { g } else { decayed(g, p, weight_decay) };
        let p = if W { p * splat(1.0 - lr * weight_decay) } else { p };
        let m = m.mul_add(splat(beta1), g * splat(1.0 - beta1));
        let v = v.mul_add(splat(beta2), g * g * splat(1.0 - beta2));
        let denominator = v.sqrt().mul_add(splat(self.root), V::splat(V::Elem::from_f64(eps)));
        (p - m * splat(self.rate) / denominator, [m, v])
    }
}
