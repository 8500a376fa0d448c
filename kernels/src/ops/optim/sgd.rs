//! Stochastic gradient descent, with momentum or without.
//!
//! `g += decay p`; with momentum `b = momentum b + (1 - dampening) g` (`b = g` in the first step) and `g = b`, or
//! `g + momentum b` after Nesterov; `p -= lr g`.
//! Source: Sutskever, Martens, Dahl, Hinton: On the importance of initialization and momentum (2013).

use phalanx_tensor::Result;

use super::{Rule, Step, decayed, splat, update};
use crate::simd::Vector;

/// The numbers of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// The learning rate.
    pub lr: f64,
    /// Decay of the momentum buffer.
    pub momentum: f64,
    /// How much less of the gradient enters the momentum buffer.
    pub dampening: f64,
    /// Nesterov's look ahead.
    pub nesterov: bool,
    /// Weight decay.
    pub weight_decay: f64,
    /// The step's number, from 1.
    pub step: u64,
}

/// A step of SGD; each item's state is the momentum buffer, or none where the momentum is 0.
///
/// # Errors
/// If the number of state tensors, shapes, dtypes or devices do not fit.
pub fn sgd_(step: Step<'_>, sgd: Sgd) -> Result<()> {
    match step.items.iter().any(|item| !item.state.is_empty()) {
        true => update::<1>("sgd", sgd, step),
        false => update::<0>("sgd", sgd, step),
    }
}

impl<const N: usize> Rule<N> for Sgd {
    #[inline(always)]
    fn eval<V: Vector>(self, p: V, g: V, mut state: [V; N]) -> (V, [V; N]) {
        let mut g = decayed(g, p, self.weight_decay);
        if let Some(b) = state.first_mut() {
            let first = self.step == 1;
            *b = if first { g } else { b.mul_add(splat(self.momentum), g * splat(1.0 - self.dampening)) };
            g = if self.nesterov { b.mul_add(splat(self.momentum), g) } else { *b };
        }
        (p - g * splat(self.lr), state)
    }
}
