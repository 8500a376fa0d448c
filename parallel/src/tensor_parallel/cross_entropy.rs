//! The cross entropy of logits whose classes are cut over ranks.
//!
//! ```text
//! a rank has of each item   m = max x,  z = sum of e^(x - m),  s = sum of (x - m)  over its classes,  t = x[target] or 0
//! one exchange, then        M = max m,  Z = sum of z e^(m - M),  S = sum of (s + classes (m - M)),  T = sum of t
//! loss                      (1 - a) (M - T + ln Z) + a / C (C ln Z - S)       with smoothing a over all C classes
//! ```
//! merged in f64 in order of the ranks, so every rank has the same bits. Derivative: `dx = dy (e^(x - M) / Z - q)` with q
//! the smoothed target: the rank's classes alone, no exchange. Saves x and two numbers an item. Halves are computed in f32.
//!
//! The vocabulary is not padded: ranks have shares that differ by at most one class. Smoothing spreads over all classes
//! and averages over all of them; Megatron-LM's (0.11) spreads over the rank's.
//! Source: Shoeybi et al.: Megatron-LM (2019), section 3.

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{
    Backward, CrossEntropy, Cx, Grads, Reduction, Result, Saved, Saver, Var, grads1, record,
};
use phalanx_nn::{Error, tensor};
use phalanx_tensor::{DType, Scalar, Tensor, Value};

use super::cut::Cut;
use super::embedding::local;
use super::exchange::failed;
use super::regions::{copy_to_region, reduce_from_region};
use crate::comm::Comm;

/// The cross entropy of `logits` `[N, C / ranks]`, this rank's of `classes`, and i64 `targets` `[N]` of the whole, which
/// all ranks have; see [`phalanx_kernels::cross_entropy`]. The same on every rank.
///
/// # Errors
/// If shapes or dtypes do not fit, a target is no class, class weights are asked for, or as
/// [`crate::comm::Pending::wait`].
pub fn vocab_parallel_cross_entropy(
    logits: &Var,
    targets: &Var,
    classes: usize,
    comm: &Comm,
    config: &CrossEntropy,
) -> Result<Var> {
    let cut = Cut::shares(OP, 1, classes, comm.size())?;
    check(logits, targets, cut.lengths[comm.rank()], config)?;
    let (x, items, smoothing) = (logits.tensor(), targets.numel(), config.label_smoothing);
    let counts: Vec<bool> =
        values::<i64>(targets.tensor())?.into_iter().map(|t| t != config.ignore_index).collect();
    let [target, elsewhere] = local(&targets.unsqueeze(1)?, &cut, comm.rank(), Some(config.ignore_index))?;
    let own = numbers(x, &target, &elsewhere, smoothing)?;
    let mut all = Tensor::empty(&[comm.size() * own.numel()], own.dtype(), own.device())?;
    comm.all_gather(&mut all, &own).map_err(failed)?;
    let merged = merge(&values(&kernels::cast(&all, DType::F64)?)?, items, &cut);
    drop((all, own));
    let counted = counts.iter().filter(|&&counts| counts).count() as f64;
    let factor = if config.reduction == Reduction::Mean { config.scale / counted } else { config.scale };
    let losses = counts
        .iter()
        .zip(&merged)
        .map(|(&counts, item)| if counts { item.loss(smoothing, classes) } else { 0.0 });
    let result = config.result_dtype(x.dtype());
    let y = match config.reduction {
        Reduction::None => like(x, result, &losses.map(|loss| loss * factor).collect::<Vec<_>>(), &[items])?,
        Reduction::Mean | Reduction::Sum => like(x, result, &[losses.sum::<f64>() * factor], &[])?,
    };
    record(OP, &[logits], y, |s: &Saver<'_>| {
        let column =
            |values: Vec<f64>| Ok::<_, tensor::Error>(Var::new(like(x, wide(x), &values, &[items, 1])?));
        let on_target =
            values(elsewhere.tensor())?.into_iter().map(|away| if away { -0.0 } else { smoothing - 1.0 });
        Ok(Recorded {
            x: s.input(0)?,
            max: column(merged.iter().map(|item| item.max).collect())?,
            sum: column(merged.iter().map(|item| item.sum).collect())?,
            factors: column(counts.iter().map(|&counts| if counts { factor } else { 0.0 }).collect())?,
            on_target: column(on_target.collect())?,
            target,
            even: smoothing / classes as f64,
            comm: comm.clone(),
        })
    })
}

const OP: &str = "vocab_parallel_cross_entropy";

fn check(logits: &Var, targets: &Var, classes: usize, config: &CrossEntropy) -> Result<()> {
    let got = match (logits.shape(), targets.shape()) {
        _ if config.weight.is_some() => "weights of the classes".to_string(),
        (&[items, own], &[count]) if items == count && own == classes => match logits.dtype() {
            dtype if dtype.is_float() && targets.dtype() == DType::I64 => return Ok(()),
            dtype => format!("{dtype} logits and {} targets", targets.dtype()),
        },
        (logits, targets) => format!("logits {logits:?} and targets {targets:?}"),
    };
    let wanted = format!("wanted logits [N, {classes}] of floats, i64 targets [N], and no weights");
    Err(Error::invalid(OP, format!("got {got}, {wanted}")).into())
}

/// This rank's m, z and t of each item, and s if there is smoothing.
fn numbers(x: &Tensor, target: &Var, elsewhere: &Var, smoothing: f64) -> tensor::Result<Tensor> {
    // Items whose class is elsewhere, or that do not count, stand at class 0: their loss here is not used.
    let (reduction, label_smoothing) = (Reduction::None, smoothing);
    let config = CrossEntropy { reduction, label_smoothing, ..CrossEntropy::default() };
    let stats = kernels::cross_entropy(x, &target.tensor().squeeze(1)?, &config)?.1;
    let at = kernels::cast(&kernels::gather(x, 1, target.tensor())?, wide(x))?;
    let at = kernels::masked_fill(&at, elsewhere.tensor(), Scalar::Float(0.0))?;
    let below = stats.narrow(1, 2, stats.shape()[1] - 2)?;
    kernels::cat(&[&stats.narrow(1, 0, 2)?, &at, &below], 1)
}

/// What is known of an item: the largest logit, the sum of the exponentials below it, the target's logit, and the sum of
/// all logits less the largest (0 without smoothing).
struct Item {
    max: f64,
    sum: f64,
    at: f64,
    below: f64,
}

impl Item {
    fn loss(&self, smoothing: f64, classes: usize) -> f64 {
        let log = self.sum.ln();
        let even = if smoothing == 0.0 { 0.0 } else { smoothing * (log - self.below / classes as f64) };
        (1.0 - smoothing) * (self.max - self.at + log) + even
    }
}

/// The items of all ranks' numbers, one rank after another.
fn merge(all: &[f64], items: usize, cut: &Cut) -> Vec<Item> {
    let each = all.len() / (items * cut.lengths.len()).max(1);
    let of = |rank: usize, item: usize| &all[(rank * items + item) * each..][..each];
    let ranks = || cut.lengths.iter().enumerate();
    let item = |i: usize| {
        let max = ranks().map(|(rank, _)| of(rank, i)[0]).fold(f64::NEG_INFINITY, larger);
        let mut merged = Item { max, sum: 0.0, at: 0.0, below: 0.0 };
        for (rank, &classes) in ranks() {
            let own = of(rank, i);
            merged.sum += own[1] * (own[0] - max).exp();
            merged.at += own[2];
            merged.below += own.get(3).map_or(0.0, |below| below + classes as f64 * (own[0] - max));
        }
        merged
    };
    (0..items).map(item).collect()
}

fn larger(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

/// All values; zeros where there are no elements.
fn values<T: Value + Default + Clone>(tensor: &Tensor) -> tensor::Result<Vec<T>> {
    if tensor.device().is_meta() { Ok(vec![T::default(); tensor.numel()]) } else { tensor.to_vec() }
}

/// Values in a dtype, where `x` is.
fn like(x: &Tensor, dtype: DType, values: &[f64], shape: &[usize]) -> tensor::Result<Tensor> {
    kernels::cast(&Tensor::from_slice(values, shape, x.device())?, dtype)
}

/// The dtype that `x` is computed in.
fn wide(x: &Tensor) -> DType {
    CrossEntropy { wide: true, ..CrossEntropy::default() }.result_dtype(x.dtype())
}

/// What the forward pass leaves; all but the logits `[N, 1]`.
struct Recorded {
    x: Saved,
    max: Var,
    sum: Var,
    /// What an item's loss is multiplied with in the result; 0 where it does not count.
    factors: Var,
    /// The target's place here, and less what the smoothed target has of it; -0 where the target is elsewhere.
    target: Var,
    on_target: Var,
    /// A class's share of the smoothing.
    even: f64,
    comm: Comm,
}

impl Backward for Recorded {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, wide) = (cx.get(&self.x)?, self.max.dtype());
        // Every rank makes something else of it.
        let dy = if cx.create_graph() { copy_to_region(cx.dy(), &self.comm)? } else { cx.dy().clone() };
        let dy = dy.to(wide)?;
        let slope = if dy.rank() == 0 { dy } else { dy.unsqueeze(1)? }.mul(&self.factors)?;
        let shifted = {
            let x = x.to(wide)?;
            x.sub(&self.max)?
        };
        let below = shifted.exp()?;
        drop(shifted);
        let sum = match cx.create_graph() {
            // The sum depends on the logits, of all ranks.
            true => copy_to_region(&reduce_from_region(&below.sum(&[1], true)?, &self.comm)?, &self.comm)?,
            false => self.sum.clone(),
        };
        let mut dx = below.mul(&slope.div(&sum)?)?;
        drop(below);
        if self.even != 0.0 {
            dx = dx.sub(&slope.mul_scalar(self.even)?)?;
        }
        grads1(dx.scatter_add(1, &self.target, &slope.mul(&self.on_target)?)?.to(x.dtype())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_two_ranks_merge_to_those_of_the_whole() {
        let x = [0.5, -1.0, 700.0, 2.0, 3.0f64];
        let below = |x: &[f64], max: f64| x.iter().map(|x| x - max).sum::<f64>();
        let sum = |x: &[f64], max: f64| x.iter().map(|x| (x - max).exp()).sum::<f64>();
        let cut = Cut::shares("classes", 1, 5, 2).unwrap();
        let all = [700.0, sum(&x[..3], 700.0), 0.0, below(&x[..3], 700.0)];
        let all = [all, [3.0, sum(&x[3..], 3.0), 2.0, below(&x[3..], 3.0)]].concat();
        let item = merge(&all, 1, &cut).remove(0);
        assert_eq!((item.max, item.at), (700.0, 2.0));
        assert!((item.sum - 1.0).abs() < 1e-15 && (item.below - below(&x, 700.0)).abs() < 1e-12);
        let even = x.iter().map(|x| 700.0 - x).sum::<f64>() / 5.0;
        assert!((item.loss(0.1, 5) - (0.9 * 698.0 + 0.1 * even)).abs() < 1e-12);
    }
}
