//! The rules: what one step of each optimizer does to a parameter, its gradient and its state.

use phalanx_tensor::Result;

use super::{Rule, Step, decayed, splat, update};
use crate::simd::{Float, Vector};

// Stochastic gradient descent, with momentum or without.
//
// `g += decay p`; with momentum `b = momentum b + (1 - dampening) g` (`b = g` in the first step) and `g = b`, or
// `g + momentum b` after Nesterov; `p -= lr g`.
// Source: Sutskever, Martens, Dahl, Hinton: On the importance of initialization and momentum (2013).

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

// Adam and AdamW.
//
// `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g²`, `p -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`.
// Adam adds `decay * p` to the gradient first; AdamW multiplies `p` by `1 - lr * decay` first.
// Sources: Kingma and Ba: Adam (2015); Loshchilov and Hutter: Decoupled weight decay regularization (2019).

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

// Adagrad.
//
// `g += decay p`; `s += g²`; `p -= lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)`.
// Source: Duchi, Hazan, Singer: Adaptive subgradient methods (2011).

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

// RMSprop.
//
// `g += decay p`; `v = alpha v + (1 - alpha) g²`; centered: `a = alpha a + (1 - alpha) g`, and `v - a²` in place of
// v; `b = momentum b + g / (sqrt(v) + eps)`; `p -= lr b`.
// Source: Tieleman and Hinton: Neural networks for machine learning, lecture 6.5 (2012).

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

// Lion: evolved sign momentum.
//
// `p -= lr (decay p + sign(b1 m + (1 - b1) g))`, then `m = b2 m + (1 - b2) g`; `sign(0) = 0`.
// Source: Chen et al.: Symbolic discovery of optimization algorithms (2023).

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

// Adadelta.
//
// `g += decay p`; `v = rho v + (1 - rho) g²`; `d = sqrt((u + eps) / (v + eps)) g`; `u = rho u + (1 - rho) d²`; `p -= lr d`.
// Source: Zeiler: ADADELTA: an adaptive learning rate method (2012).

/// The numbers of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adadelta {
    /// The learning rate.
    pub lr: f64,
    /// Decay of the averages.
    pub rho: f64,
    /// Added to both averages under their roots.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
}

/// A step of Adadelta; each item's state is the square average of the gradients, then that of the updates.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn adadelta_(step: Step<'_>, adadelta: Adadelta) -> Result<()> {
    update("adadelta", adadelta, step)
}

impl Rule<2> for Adadelta {
    #[inline(always)]
    fn eval<V: Vector>(self, p: V, g: V, [v, u]: [V; 2]) -> (V, [V; 2]) {
        let (keep, take) = (splat::<V>(self.rho), splat::<V>(1.0 - self.rho));
        let g = decayed(g, p, self.weight_decay);
        let v = v.mul_add(keep, g * g * take);
        let eps = splat::<V>(self.eps);
        // One root in place of two, for which a GPU has too few registers.
        let delta = ((u + eps) / (v + eps)).sqrt() * g;
        let u = u.mul_add(keep, delta * delta * take);
        (p - delta * splat(self.lr), [v, u])
    }
}

// Adamax: Adam with the largest gradient in place of the second moment.
//
// `g += decay p`; `m = b1 m + (1 - b1) g`, `u = max(b2 u, |g| + eps)`, `p -= lr / (1 - b1^t) m / u`.
// Source: Kingma and Ba: Adam (2015), section 7.1; PyTorch's place of eps.

/// A step of Adamax; each item's state is the first moment and the largest gradient.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn adamax_(step: Step<'_>, adam: Adam) -> Result<()> {
    let rate = adam.lr / (1.0 - adam.beta1.powf(adam.step as f64));
    update("adamax", Adamax { adam, rate }, step)
}

#[derive(Clone, Copy)]
struct Adamax {
    adam: Adam,
    /// `lr / (1 - b1^t)`
    rate: f64,
}

impl Rule<2> for Adamax {
    #[inline(always)]
    fn eval<V: Vector>(self, p: V, g: V, [m, u]: [V; 2]) -> (V, [V; 2]) {
        let Adam { beta1, beta2, eps, weight_decay, .. } = self.adam;
        let g = decayed(g, p, weight_decay);
        let m = m.mul_add(splat(beta1), g * splat(1.0 - beta1));
        // A NaN of the gradient is kept: of two operands `max` returns the second if one is NaN.
        let u = (u * splat(beta2)).max(g.abs() + splat(eps));
        // The quotient first: so no GPU lacks registers.
        (p - splat::<V>(self.rate) / u * m, [m, u])
    }
}

// The direction of LAMB: that of Adam with decoupled weight decay, before its length is chosen.
//
// `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g²`, `r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p`.
// Source: You et al.: Large batch optimization for deep learning (2020), algorithm 2.

/// Replaces parameters by their directions; each item's state is the two moments.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn lamb_direction_(step: Step<'_>, adam: Adam) -> Result<()> {
    update("lamb", Direction(Corrected::new(Adam { lr: 1.0, ..adam })), step)
}

#[derive(Clone, Copy)]
struct Direction(Corrected<true>);

impl Rule<2> for Direction {
    #[inline(always)]
    fn eval<V: Vector>(self, p: V, g: V, [m, v]: [V; 2]) -> (V, [V; 2]) {
        let Corrected { adam: Adam { beta1, beta2, eps, weight_decay, .. }, rate, root } = self.0;
        // The term of the weights comes first: so a GPU holds fewer numbers at a time.
        let p = p * splat(weight_decay);
        let m = m.mul_add(splat(beta1), g * splat(1.0 - beta1));
        let v = v.mul_add(splat(beta2), g * g * splat(1.0 - beta2));
        let denominator = v.sqrt().mul_add(splat(root), splat(eps));
        (p + m * splat(rate) / denominator, [m, v])
    }
}
