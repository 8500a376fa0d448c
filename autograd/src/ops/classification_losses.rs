//! Losses of probabilities: cross entropy of classes, binary cross entropy, Kullback-Leibler divergence.

use phalanx_kernels as kernels;
use phalanx_tensor::{Error, Result as TensorResult, Tensor};

use super::elementwise::{Broadcasting, broadcasting};
use super::frame::composed;
use super::regression_losses::one_shape;
use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, grads1, record};

pub use phalanx_kernels::NllLoss;
pub use phalanx_kernels::{CrossEntropy, Reduction};

// Cross entropy of logits [N, C, ...] and class indices [N, ...].
//
// With `p = softmax(x)` over C, weights w and smoothing s an item's loss is
// `-(1-s) w[y] log p[y] - s/C sum_c w[c] log p[c]`; the mean divides by the sum of `w[y]` over the items that count.
//
// Derivative: `dx = dy (p sum(q) - q)` with `q` the smoothed and weighted target, times the item's share in the result.
// Saves `x` and two numbers a row (the largest logit, the sum of the exponentials below it): probabilities are never
// stored. The backward pass computes them again in its one pass, and writes the gradient over the logits if they have
// no other owner. Losses are added in f64, items in order. The loss of halves
// may be in f32; their gradient is rounded once, from f32.

impl Var {
    /// The cross entropy of these logits and i64 targets, which may hold `ignore_index`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or a target is no class.
    pub fn cross_entropy(&self, target: &Var, config: &CrossEntropy) -> Result<Var> {
        begins();
        let (y, stats) = kernels::cross_entropy(self.tensor(), target.tensor(), config)?;
        record("cross_entropy", &[self], y, |s: &SaveContext<'_>| {
            let target = target.tensor().clone();
            Ok(RecordedCrossEntropy { x: s.input(0)?, target, stats, config: config.clone() })
        })
    }
}

struct RecordedCrossEntropy {
    x: SavedVariable,
    target: Tensor,
    stats: Tensor,
    config: CrossEntropy,
}

impl Backward for RecordedCrossEntropy {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, dy) = (cx.get(&self.x)?, cx.dy());
        if !cx.create_graph() {
            let RecordedCrossEntropy { target, stats, config, .. } = self;
            let dx = kernels::cross_entropy_backward(x.tensor(), target, stats, dy.tensor(), config)?;
            return grads1(Var::new(dx));
        }
        grads1(slope(&x, &self.target, &self.config, dy)?)
    }

    fn backward_once(self, cx: &mut Cx<'_>) -> Result<Grads> {
        let RecordedCrossEntropy { x, target, stats, config } = self;
        let dx =
            kernels::cross_entropy_backward_over(cx.take(x)?, &target, &stats, cx.dy().tensor(), &config)?;
        grads1(Var::new(dx))
    }
}

/// The gradient of the logits `x`, of differentiable operations.
pub(super) fn slope(x: &Var, target: &Tensor, config: &CrossEntropy, dy: &Var) -> Result<Var> {
    let q = Var::new(kernels::cross_entropy_targets(x.tensor(), target, config)?);
    let slope = x.to(dy.dtype())?.softmax(1)?.mul(&q.sum(&[1], true)?)?.sub(&q)?;
    slope.mul(&beside_classes(dy)?)?.to(x.dtype())
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

// The negative log likelihood of class indices [N, ...] under log probabilities [N, C, ...].
//
// An item's loss is `-w[y] x[y]`; the mean divides by the sum of `w[y]` over the items that count. Derivative:
// `dx[y] = -w[y] dy`, times the item's share in the result. Losses are added in f64, items in order.

impl Var {
    /// The loss of these log probabilities and i64 targets, which may hold `ignore_index`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or a target is no class.
    pub fn nll_loss(&self, target: &Var, config: &NllLoss) -> Result<Var> {
        begins();
        let y = kernels::nll_loss(self.tensor(), target.tensor(), config)?;
        record("nll_loss", &[self], y, |s: &SaveContext<'_>| {
            // Only the shape of x is used.
            Ok(RecordedNll { x: s.input(0)?, target: target.tensor().clone(), config: config.clone() })
        })
    }
}

struct RecordedNll {
    x: SavedVariable,
    target: Tensor,
    config: NllLoss,
}

impl Backward for RecordedNll {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, dy) = (cx.get(&self.x)?, cx.dy());
        let slope = |dy: &Tensor| kernels::nll_loss_backward(x.tensor(), &self.target, dy, &self.config);
        if !cx.create_graph() {
            return grads1(Var::new(slope(dy.tensor())?));
        }
        let ones = kernels::full(dy.shape(), 1.0, dy.dtype(), dy.device())?;
        grads1(Var::new(slope(&ones)?).mul(&beside_classes(dy)?)?)
    }
}

// `-(t ln x + (1 - t) ln(1 - x))` of probabilities `x`, elementwise, then weighted and reduced; no logarithm counts for
// less than -100.
//
// Derivative: `dx = dy (x - t) / max(x (1 - x), 1e-12)`, `dt = dy (ln(1 - x) - ln x)`. Saves both. The halves are
// computed in f32.

const OP: &str = "binary_cross_entropy";

impl Var {
    /// The binary cross entropy of these probabilities and the targets of the same shape, each between 0 and 1, in nats;
    /// multiplied by `weight`, which broadcasts. Of logits use [`Var::binary_cross_entropy_with_logits`], which is
    /// exact in the tails.
    ///
    /// # Errors
    /// If the shapes differ, dtypes or devices do, the dtype is no floating-point one, or (where the host sees the
    /// elements) an input is not between 0 and 1.
    pub fn binary_cross_entropy(
        &self,
        target: &Var,
        weight: Option<&Var>,
        reduction: Reduction,
    ) -> Result<Var> {
        begins();
        if self.shape() != target.shape() {
            let got = format!("an input of shape {:?} and a target of {:?}", self.shape(), target.shape());
            return Err(Error::shape(OP, got, "one shape").into());
        }
        let inputs: Vec<&Var> = [self, target].into_iter().chain(weight).collect();
        composed(OP, &inputs, |inputs| {
            check_probabilities(inputs[0].tensor())?;
            let (x, t) = (&inputs[0], &inputs[1]);
            let positive = t.tensor_times(&x.log()?)?;
            let negative = kernels::mul(&kernels::rsub_scalar(t.tensor(), 1.0.into())?, &log_of_rest(x)?)?;
            let y = kernels::neg(&kernels::add(&positive, &negative)?)?;
            let losses = broadcasting(&[x, t], y, BinaryEntropy)?;
            inputs.get(2).map_or(Ok(losses.clone()), |weight| losses.mul(weight))?.reduce(reduction)
        })
    }

    /// This times a logarithm that counts for no less than -100, without a graph.
    fn tensor_times(&self, log: &Var) -> Result<Tensor> {
        Ok(kernels::mul(self.tensor(), &kernels::clamp(log.tensor(), Some((-100.0).into()), None)?)?)
    }
}

/// `max(ln(1 - x), -100)`, without a graph.
fn log_of_rest(x: &Var) -> Result<Tensor> {
    let log = kernels::ln_1p(&kernels::neg(x.tensor())?)?;
    Ok(kernels::clamp(&log, Some((-100.0).into()), None)?)
}

/// All between 0 and 1, where the host can see them.
fn check_probabilities(x: &Tensor) -> Result<()> {
    if x.device().is_cuda() || x.device().is_meta() || x.numel() == 0 {
        return Ok(());
    }
    let dims: Vec<usize> = (0..x.rank()).collect();
    let wide = |x: Tensor| kernels::cast(&x, phalanx_tensor::DType::F64)?.item::<f64>();
    let bounds = [wide(kernels::amin(x, &dims, false)?)?, wide(kernels::amax(x, &dims, false)?)?];
    match bounds.iter().find(|&&x| !(x.is_nan() || (0.0..=1.0).contains(&x))) {
        Some(bad) => {
            let wanted = "probabilities between 0 and 1 (of logits use binary_cross_entropy_with_logits)";
            Err(Error::range(OP, format!("input {bad}"), wanted).into())
        }
        None => Ok(()),
    }
}

struct BinaryEntropy;

impl Broadcasting for BinaryEntropy {
    const NAME: &'static str = OP;

    fn fused(&self, _: usize, _: &[Var], _: &Tensor) -> TensorResult<Option<Tensor>> {
        Ok(None)
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let (x, t) = (&x[0], &x[1]);
        let least = |x: &Var, bound: f64| x.clamp(Some(bound.into()), None);
        let slope = match i {
            0 => x.sub(t)?.div(&least(&x.rsub_scalar(1.0)?.mul(x)?, 1e-12)?)?,
            _ => least(&x.neg()?.ln_1p()?, -100.0)?.sub(&least(&x.log()?, -100.0)?)?,
        };
        dy.mul(&slope)
    }
}

/// `-(w t ln s + (1 - t) ln(1 - s))` with `s = sigmoid(x)` and the weight w of the positive class, elementwise,
/// then weighted and reduced.
///
/// Computed as `(1 - t) x + (1 + (w - 1) t) ln(1 + e^-x)`, which no x makes infinite. Derivative:
/// `dx = dy ((1 + (w - 1) t) s - w t)`, `dt = dy ((w - 1) ln(1 + e^-x) - x)`, `dw = dy t ln(1 + e^-x)`. Saves all
/// three.
impl Var {
    /// The binary cross entropy of the probabilities `sigmoid(self)` and the targets, each between 0 and 1;
    /// multiplied by `weight`, the positive class besides by `pos_weight` (both broadcast to this shape).
    ///
    /// # Errors
    /// If the shapes differ, a weight does not broadcast to them, dtypes or devices differ, or the dtype is no
    /// floating-point one.
    pub fn binary_cross_entropy_with_logits(
        &self,
        target: &Var,
        weight: Option<&Var>,
        pos_weight: Option<&Var>,
        reduction: Reduction,
    ) -> Result<Var> {
        begins();
        const OP: &str = "binary_cross_entropy_with_logits";
        one_shape(OP, self, target)?;
        for weight in weight.into_iter().chain(pos_weight) {
            weight.tensor().broadcast_for(OP, self.shape())?;
        }
        let positive = match pos_weight {
            Some(weight) => weight.clone(),
            None => Var::new(kernels::full(&[], 1.0, self.dtype(), self.device())?),
        };
        let y = kernels::binary_cross_entropy_with_logits(self.tensor(), target.tensor(), positive.tensor())?;
        let losses = broadcasting(&[self, target, &positive], y, LogitsEntropy)?;
        weight.map_or(Ok(losses.clone()), |weight| losses.mul(weight))?.reduce(reduction)
    }
}

struct LogitsEntropy;

impl Broadcasting for LogitsEntropy {
    const NAME: &'static str = "binary_cross_entropy_with_logits";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let [x, t, w] = [x[0].tensor(), x[1].tensor(), x[2].tensor()];
        let dx = || kernels::binary_cross_entropy_with_logits_backward(x, t, w, dy);
        (i == 0).then(dx).transpose()
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let [x, t, w] = [&x[0], &x[1], &x[2]];
        let softplus = || x.neg()?.softplus(1.0, f64::INFINITY);
        let slope = match i {
            0 => w.sub_scalar(1.0)?.mul(t)?.add_scalar(1.0)?.mul(&x.sigmoid()?)?.sub(&w.mul(t)?)?,
            1 => w.sub_scalar(1.0)?.mul(&softplus()?)?.sub(x)?,
            _ => t.mul(&softplus()?)?,
        };
        dy.mul(&slope)
    }
}

// The divergence `t (ln t - x)` of log probabilities x from probabilities t, 0 where `t` is; or `e^t (t - x)` of
// log probabilities t; elementwise, then reduced.
//
// Derivative: `dx = -dy t`, `dt = dy (ln t + 1 - x)`; or `dx = -dy e^t`, `dt = dy e^t (t + 1 - x)`. Saves both.

/// What [`Var::kl_div`] makes of its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KlReduction {
    /// The sum divided by the first dimension's size: the divergence's mathematical mean over a batch.
    BatchMean,
    /// As for other losses.
    Elements(Reduction),
}

/// What the target of [`Var::kl_div`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KlTarget {
    /// Probabilities.
    Probabilities,
    /// Their logarithms.
    LogProbabilities,
}

impl Var {
    /// The Kullback-Leibler divergence of these log probabilities from the target.
    ///
    /// # Errors
    /// If the shapes, dtypes or devices differ, the dtype is no floating-point one, or there is no
    /// first dimension to take the batch's mean over.
    pub fn kl_div(&self, target: &Var, kind: KlTarget, reduction: KlReduction) -> Result<Var> {
        begins();
        one_shape("kl_div", self, target)?;
        if reduction == KlReduction::BatchMean && self.rank() == 0 {
            return Err(Error::shape(
                "kl_div",
                "a tensor without dimensions",
                "a first dimension, the batch",
            )
            .into());
        }
        let kernel = match kind {
            KlTarget::Probabilities => kernels::kl_div,
            KlTarget::LogProbabilities => kernels::kl_div_log_target,
        };
        let losses = broadcasting(&[self, target], kernel(self.tensor(), target.tensor())?, kind)?;
        match reduction {
            KlReduction::BatchMean => losses.sum_all()?.div_scalar(self.tensor().size(0)? as f64),
            KlReduction::Elements(reduction) => losses.reduce(reduction),
        }
    }
}

impl Broadcasting for KlTarget {
    const NAME: &'static str = "kl_div";

    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>> {
        let (x, t) = (x[0].tensor(), x[1].tensor());
        Ok(Some(match (self, i) {
            (KlTarget::Probabilities, 0) => kernels::neg(&kernels::mul(t, dy)?)?,
            (KlTarget::Probabilities, _) => kernels::kl_div_backward_target(x, t, dy)?,
            (KlTarget::LogProbabilities, 0) => kernels::kl_div_log_target_backward(t, dy)?,
            (KlTarget::LogProbabilities, _) => kernels::kl_div_log_target_backward_target(x, t, dy)?,
        }))
    }

    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var> {
        let (x, t) = (&x[0], &x[1]);
        let slope = match (self, i) {
            (KlTarget::Probabilities, 0) => t.neg()?,
            (KlTarget::Probabilities, _) => t.log()?.add_scalar(1.0)?.sub(x)?,
            (KlTarget::LogProbabilities, 0) => t.exp()?.neg()?,
            (KlTarget::LogProbabilities, _) => t.exp()?.mul(&t.add_scalar(1.0)?.sub(x)?)?,
        };
        dy.mul(&slope)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use phalanx_kernels::Reduction;
    use phalanx_tensor::{DType, Device, Tensor};

    use super::{CrossEntropy, NllLoss};
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
    fn first_and_second_derivatives_of_cross_entropy_hold() {
        let target = Var::from_slice(&[1i64, 0, 2, -100], &[2, 2], Device::CPU).unwrap();
        let weight = Tensor::from_slice(&[0.5, 2.0, 1.5], &[3], Device::CPU).unwrap();
        for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
            for (weight, label_smoothing) in [(None, 0.0), (Some(weight.clone()), 0.2)] {
                let config = CrossEntropy { weight, label_smoothing, reduction, ..CrossEntropy::default() };
                check_twice(&[&[2, 3, 2]], |v| v[0].cross_entropy(&target, &config));
            }
        }
    }

    #[test]
    fn first_and_second_derivatives_of_nll_loss_hold() {
        let target = Var::from_slice(&[1i64, 0, 2, -100], &[2, 2], Device::CPU).unwrap();
        for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
            let config = NllLoss { reduction, ..NllLoss::default() };
            check_twice(&[&[2, 3, 2]], |v| v[0].nll_loss(&target, &config));
        }
    }

    #[test]
    fn certainty_costs_at_most_a_hundred_and_derivatives_hold() {
        let make = |values: &[f64]| Var::from_slice(values, &[values.len()], Device::CPU).unwrap();
        let x = Var::leaf(make(&[0.0, 1.0, 0.0, 1.0, 0.5]).into_tensor()).unwrap();
        let t = make(&[0.0, 1.0, 1.0, 0.0, 0.25]);
        let y = x.binary_cross_entropy(&t, None, Reduction::None).unwrap();
        let losses = y.to_vec::<f64>().unwrap();
        assert_eq!(losses[..4], [0.0, 0.0, 100.0, 100.0]);
        assert!((losses[4] - 2f64.ln()).abs() < 1e-15);
        let dx = grad(&[(y.sum_all().unwrap(), None)], &[&x], Default::default()).unwrap().remove(0).unwrap();
        assert_eq!(dx.to_vec::<f64>().unwrap(), [0.0, 0.0, -1e12, 1e12, 1.0]);
        for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
            check_twice(&[&[2, 3], &[2, 3], &[3]], |v| {
                v[0].sigmoid()?.binary_cross_entropy(&v[1].sigmoid()?, Some(&v[2]), reduction)
            });
        }
    }

    #[test]
    fn what_is_no_probability_or_of_another_shape_is_refused() {
        let x = Var::from_slice(&[0.2, 1.5], &[2], Device::CPU).unwrap();
        let error = x.binary_cross_entropy(&x, None, Reduction::Mean).unwrap_err().to_string();
        assert!(error.starts_with("binary_cross_entropy: input 1.5"), "{error}");
        let refused = x
            .binary_cross_entropy(&x.select(0, 0).unwrap(), None, Reduction::Mean)
            .err()
            .unwrap()
            .to_string();
        assert!(
            refused.contains("binary_cross_entropy: got an input of shape [2] and a target of []"),
            "{refused}"
        );
    }
}
