//! Lion: evolved sign momentum.
//!
//! `p -= lr (decay p + sign(b1 m + (1 - b1) g))`, then `m = b2 m + (1 - b2) g`; `sign(0) = 0`.
//! Source: Chen et al.: Symbolic discovery of optimization algorithms (2023).

use phalanx_tensor::Result;

use super::{Rule, Step, splat, update};
use crate::simd::Vector;

/// The numbers of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// The learning rate.
    pub lr: f64,
    /// Weight of the momentum in the direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Weight decay.
    pub weight_decay: f64,
}

/// A step of Lion; each item's state is the momentum.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn lion_(step: Step<'_>, lion: Lion) -> Result<()> {
    update("lion", lion, step)
}

impl Rule<1> for Lion {
    #[inline(always)]
    fn eval<V: Vector>(self, p: V, g: V, [m]: [V; 1]) -> (V, [V; 1]) {
        let direction = m.mul_add(splat(self.beta1), g * splat(1.0 - self.beta1));
        // NaN is equal to nothing, so it stays what it is; zero, of either sign, is kept too.
        let sign = splat::<V>(1.0).copysign(direction);
        let moves = direction.lt(V::zero()) | direction.gt(V::zero());
        let sign = V::select(moves, sign, direction);
        let p = p - p.mul_add(splat(self.weight_decay), sign) * splat(self.lr);
        (p, [m.mul_add(splat(self.beta2), g * splat(1.0 - self.beta2))])
    }
}
