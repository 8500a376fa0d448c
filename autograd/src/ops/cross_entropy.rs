//! Cross entropy of logits [N, C, ...] and class indices [N, ...].
//!
//! With `p = softmax(x)` over C, weights w and smoothing s an item's loss is
//! `-(1-s) w[y] log p[y] - s/C sum_c w[c] log p[c]`; the mean divides by the sum of `w[y]` over the items that count.
//!
//! Derivative: `dx = dy (p sum(q) - q)` with `q` the smoothed and weighted target, times the item's share in the result.
//! Saves `x` and two numbers a row (the largest logit, the sum of the exponentials below it): probabilities are never
//! stored, the backward pass makes them again in its one pass, over the logits themselves where nobody else has them. Losses are added in f64, items in order. The loss of halves
//! may be in f32; their gradient is rounded once, from f32.

use phalanx_kernels as kernels;
use phalanx_tensor::Tensor;

pub use phalanx_kernels::{CrossEntropy, Reduction};

use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads1, record};

impl Var {
    /// The cross entropy of these logits and i64 targets, which may hold `ignore_index`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or a target is no class.
    pub fn cross_entropy(&self, target: &Var, config: &CrossEntropy) -> Result<Var> {
        begins();
        let (y, stats) = kernels::cross_entropy(self.tensor(), target.tensor(), config)?;
        record("cross_entropy", &[self], y, |s: &Saver<'_>| {
            let target = target.tensor().clone();
            Ok(Recorded { x: s.input(0)?, target, stats, config: config.clone() })
        })
    }
}

struct Recorded {
    x: SavedVariable,
    target: Tensor,
    stats: Tensor,
    config: CrossEntropy,
}

impl Backward for Recorded {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, dy) = (cx.get(&self.x)?, cx.dy());
        if !cx.create_graph() {
            let Recorded { target, stats, config, .. } = self;
            let dx = kernels::cross_entropy_backward(x.tensor(), target, stats, dy.tensor(), config)?;
            return grads1(Var::new(dx));
        }
        let q = Var::new(kernels::cross_entropy_targets(x.tensor(), &self.target, &self.config)?);
        let slope = x.to(dy.dtype())?.softmax(1)?.mul(&q.sum(&[1], true)?)?.sub(&q)?;
        grads1(slope.mul(&beside_classes(dy)?)?.to(x.dtype())?)
    }

    fn backward_once(self, cx: &mut Cx<'_>) -> Result<Grads> {
        let Recorded { x, target, stats, config } = self;
        let dx =
            kernels::cross_entropy_backward_over(cx.take(x)?, &target, &stats, cx.dy().tensor(), &config)?;
        grads1(Var::new(dx))
    }
}

/// The gradient of the losses, one an item [N, ...] or one of all, in a shape that broadcasts over the classes.
pub(super) fn beside_classes(dy: &Var) -> Result<Var> {
    if dy.rank() == 0 {
        return Ok(dy.clone());
    }
    let mut shape = phalanx_tensor::Dims::from_slice(dy.shape());
    shape.insert(1, 1);
    dy.reshape_to(&shape)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use phalanx_tensor::{DType, Device, Tensor};

    use super::{CrossEntropy, Reduction};
    use crate::ops::testing::check_twice;
    use crate::{Options, Var, backward, grad};

    #[test]
    fn halves_have_the_derivatives_that_they_have_widened() {
        let target = Var::from_slice(&[1i64, 0, 2, -100], &[2, 2], Device::CPU).unwrap();
        let values: Vec<f64> = (0..12).map(|i| 4.0 * (i as f64 * 0.618).fract() - 2.0).collect();
        for (dtype, label_smoothing) in [(DType::BF16, 0.0), (DType::BF16, 0.2), (DType::F16, 0.2)] {
            let run = |widened: bool| {
                let x = Var::from_slice(&values, &[2, 3, 2], Device::CPU)?.to(dtype)?;
                let x = Var::leaf(x.tensor().clone())?;
                let seen = if widened { x.to(DType::F32)? } else { x.clone() };
                let config = CrossEntropy { label_smoothing, wide: true, ..CrossEntropy::default() };
                let loss = seen.cross_entropy(&target, &config)?;
                assert_eq!(loss.dtype(), DType::F32);
                let plain = grad(
                    &[(loss.clone(), None)],
                    &[&x],
                    Options { retain_graph: true, ..Options::default() },
                )?;
                let options = Options { create_graph: true, ..Options::default() };
                let dx = grad(&[(loss.square()?, None)], &[&x], options)?.remove(0).unwrap();
                let twice = grad(&[(dx.square()?.sum_all()?, None)], &[&x], Options::default())?;
                let all = [loss, dx].into_iter().chain(plain.into_iter().chain(twice).flatten());
                all.map(|v| v.to(DType::F64)?.to_vec::<f64>()).collect::<crate::Result<Vec<_>>>()
            };
            let (mut got, mut want) = (run(false).unwrap(), run(true).unwrap());
            // What meets at the logits is added in their dtype, two roundings more.
            let (got_twice, want_twice) = (got.pop().unwrap(), want.pop().unwrap());
            assert_eq!((got.len(), &got), (3, &want), "{dtype}");
            for (got, want) in got_twice.into_iter().zip(want_twice) {
                assert!(
                    (got - want).abs() <= 2.0 * 2f64.powi(-8) * (1.0 + want.abs()),
                    "{dtype}: {got}, {want}"
                );
            }
        }
    }

    #[test]
    fn the_last_backward_uses_up_the_logits_that_nobody_else_has() {
        let target = Var::from_slice(&[1i64, 0], &[2], Device::CPU).unwrap();
        let x = Tensor::from_slice(&[0.5, -1.0, 2.0, 0.1, 0.2, 0.3], &[2, 3], Device::CPU).unwrap();
        let run = |keep: bool, retain_graph: bool| {
            let x = Var::leaf(x.clone()).unwrap();
            let logits = x.square().unwrap();
            let storage = std::ptr::from_ref(logits.tensor().storage()).addr();
            let over = Arc::new(AtomicBool::new(false));
            let seen = over.clone();
            logits.on_grad(move |dx| {
                seen.store(std::ptr::from_ref(dx.tensor().storage()).addr() == storage, Ordering::Relaxed);
                Ok(None)
            });
            let loss = logits.cross_entropy(&target, &CrossEntropy::default()).unwrap();
            let before = logits.to_vec::<f64>().unwrap();
            let kept = keep.then_some(logits);
            backward(&[(loss, None)], Options { retain_graph, ..Options::default() }).unwrap();
            kept.into_iter().for_each(|kept| assert_eq!(kept.to_vec::<f64>().unwrap(), before));
            (x.grad().unwrap().to_vec::<f64>().unwrap(), over.load(Ordering::Relaxed))
        };
        let (grad, over) = run(false, false);
        assert!(over);
        for (keep, retain_graph) in [(true, false), (false, true)] {
            assert_eq!(run(keep, retain_graph), (grad.clone(), false));
        }
    }

    #[test]
    fn first_and_second_derivatives_hold() {
        let target = Var::from_slice(&[1i64, 0, 2, -100], &[2, 2], Device::CPU).unwrap();
        let weight = Tensor::from_slice(&[0.5, 2.0, 1.5], &[3], Device::CPU).unwrap();
        for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
            for (weight, label_smoothing) in [(None, 0.0), (Some(weight.clone()), 0.2)] {
                let config = CrossEntropy { weight, label_smoothing, reduction, ..CrossEntropy::default() };
                check_twice(&[&[2, 3, 2]], |v| v[0].cross_entropy(&target, &config));
            }
        }
    }
}
