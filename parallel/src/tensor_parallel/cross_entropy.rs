//! The cross entropy of logits whose classes are split over ranks.
//!
//! ```text
//! each rank, of each item   m = max x,  z = sum of e^(x - m),  s = sum of (x - m)  over its classes,  t = x[target] or 0
//! one exchange, then        M = max m,  Z = sum of z e^(m - M),  S = sum of (s + classes (m - M)),  T = sum of t
//! loss                      (1 - a) (M - T + ln Z) + a / C (C ln Z - S)       with smoothing a over all C classes
//! ```
//! The numbers are merged in f64 in order of the ranks, so every rank has the same bits: on the host where the host has the
//! numbers, and on a GPU by its own operations, so that the host does not wait for it.
//!
//! Derivative: `dx = dy (e^(x - M) / Z - q)` with q the smoothed target. A rank computes it for its classes alone, without an
//! exchange. It saves x and two numbers an item. Halves are computed in f32. With the linear map before it
//! ([`vocab_parallel_linear_cross_entropy`]) the logits are not saved, but computed again by columns.
//!
//! The vocabulary is not padded: the numbers of the ranks' classes differ by at most one. Smoothing spreads over all classes
//! and averages over all of them; Megatron-LM's (0.11) spreads over the rank's.
//! Source: Shoeybi et al.: Megatron-LM (2019), section 3.

use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_kernels::split_indices;
use phalanx_nn::Error;
use phalanx_nn::autograd::{
    Backward, CrossEntropy, Cx, Grads, Reduction, Result, SaveContext, SavedVariable, Var, begins, grads1,
    linear_grads, linear_loss_grads, logit_rows, record,
};
use phalanx_tensor::{DType, Result as TensorResult, Scalar, Tensor, Value};

use super::mappings::{Split, copy_to_region, failed, reduce_from_region};
use crate::comm::Comm;

/// The cross entropy of `logits` `[N, C / ranks]`, this rank's part of `classes` classes, and i64 `targets` `[N]` among all
/// classes, which all ranks have; see [`phalanx_kernels::cross_entropy`]. The result is the same on every rank.
///
/// # Errors
/// If shapes or dtypes do not fit, a target is no class, the config has class weights, or as
/// [`crate::comm::Pending::wait`].
pub fn vocab_parallel_cross_entropy(
    logits: &Var,
    targets: &Var,
    classes: usize,
    comm: &Comm,
    config: &CrossEntropy,
) -> Result<Var> {
    begins();
    let split = Split::uneven(OP, 1, classes, comm.size())?;
    check(logits, targets, split.lengths[comm.rank()], config)?;
    let of_item = targets.unsqueeze(1)?;
    let own = numbers(logits.tensor(), of_item.tensor(), &split, comm.rank(), config)?;
    let (y, loss) = VocabParallelLoss::merge(&own, targets, logits.dtype(), split, comm, config)?;
    record(OP, &[logits], y, |s: &SaveContext<'_>| Ok(Recorded { x: s.input(0)?, loss }))
}

/// [`vocab_parallel_cross_entropy`] of the logits `x weightᵀ`, for activations `x` `[N, in]`, which every rank has, and this rank's part
/// `[C / ranks, in]` of the weight. A rank holds at most `logits_max` logits at a time, but one row at least; see
/// [`Var::linear_cross_entropy`]. The gradient of `x` is this rank's part of a sum.
///
/// # Errors
/// As [`vocab_parallel_cross_entropy`].
pub fn vocab_parallel_linear_cross_entropy(
    x: &Var,
    weight: &Var,
    targets: &Var,
    classes: usize,
    comm: &Comm,
    config: &CrossEntropy,
    logits_max: usize,
) -> Result<Var> {
    let split = Split::uneven(LINEAR_OP, 1, classes, comm.size())?;
    let (&[items, inputs], &[own, columns]) = (x.shape(), weight.shape()) else {
        let got = format!("got an input of shape {:?} and a weight of {:?}", x.shape(), weight.shape());
        return Err(Error::invalid(LINEAR_OP, format!("{got}, wanted [N, in] and [classes, in]")).into());
    };
    // A gradient of one column has an order of additions of its own.
    let whole = items.saturating_mul(own) <= logits_max || inputs == 1 || items == 0;
    if whole || inputs != columns || own != split.lengths[comm.rank()] || targets.shape() != [items] {
        return vocab_parallel_cross_entropy(&x.linear(weight, None)?, targets, classes, comm, config);
    }
    let weight = &*weight.unpacked()?;
    begins();
    let (w, of_item) = (weight.tensor(), targets.unsqueeze(1)?);
    let mut parts = Vec::new();
    for rows in logit_rows([items, own], logits_max) {
        let logits = kernels::linear(&x.tensor().narrow(0, rows.start, rows.len())?, w, None)?;
        let of_item = of_item.tensor().narrow(0, rows.start, rows.len())?;
        parts.push(numbers(&logits, &of_item, &split, comm.rank(), config)?);
    }
    let own = kernels::cat(&parts.iter().collect::<Vec<_>>(), 0)?;
    let (y, loss) = VocabParallelLoss::merge(&own, targets, x.dtype(), split, comm, config)?;
    record(LINEAR_OP, &[x, weight], y, |s: &SaveContext<'_>| {
        Ok(RecordedLinear { x: s.input(0)?, weight: s.input(1)?, loss, logits_max })
    })
}

const OP: &str = "vocab_parallel_cross_entropy";
const LINEAR_OP: &str = "vocab_parallel_linear_cross_entropy";

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

/// This rank's m, z and t of each item, and s if there is smoothing, of the logits `x` of its classes. `targets` `[N, 1]` are among all
/// classes.
fn numbers(
    x: &Tensor,
    targets: &Tensor,
    split: &Split,
    rank: usize,
    config: &CrossEntropy,
) -> TensorResult<Tensor> {
    // Items with a class of another rank, and ignored items, have class 0 here: their loss is not used.
    let ignored = Some(config.ignore_index);
    let (target, elsewhere) = split_indices(targets, split.range(rank), split.total(), ignored)?;
    let (reduction, label_smoothing) = (Reduction::None, config.label_smoothing);
    let config = CrossEntropy { reduction, label_smoothing, ..CrossEntropy::default() };
    let stats = kernels::cross_entropy(x, &target.squeeze(1)?, &config)?.1;
    let at = kernels::cast(&kernels::gather(x, 1, &target)?, wide(x.dtype()))?;
    let at = kernels::masked_fill(&at, &elsewhere, Scalar::Float(0.0))?;
    let below = stats.narrow(1, 2, stats.shape()[1] - 2)?;
    kernels::cat(&[&stats.narrow(1, 0, 2)?, &at, &below], 1)
}

/// The dtype that logits of `dtype` are computed in.
fn wide(dtype: DType) -> DType {
    CrossEntropy { wide: true, ..CrossEntropy::default() }.result_dtype(dtype)
}

/// What the gradient of the logits needs of the merged numbers; tensors are `[N, 1]`.
struct VocabParallelLoss {
    max: Var,
    sum: Var,
    /// The factor of an item's loss in the result; 0 for ignored items.
    factors: Var,
    /// Among all classes.
    targets: Var,
    split: Split,
    config: CrossEntropy,
    comm: Comm,
}

impl VocabParallelLoss {
    /// Exchanges and merges the numbers of all ranks. Returns the result, too. The logits have this dtype.
    fn merge(
        own: &Tensor,
        targets: &Var,
        dtype: DType,
        split: Split,
        comm: &Comm,
        config: &CrossEntropy,
    ) -> Result<(Tensor, VocabParallelLoss)> {
        let mut all = Tensor::empty(&[comm.size() * own.numel()], own.dtype(), own.device())?;
        comm.all_gather(&mut all, own).map_err(failed)?;
        let dtypes = [config.result_dtype(dtype), wide(dtype)];
        let Merged { y, max, sum, factors } = merged(&all, targets.tensor(), dtypes, &split, config)?;
        let [max, sum, factors] = [max, sum, factors].map(Var::new);
        let (targets, config, comm) = (targets.unsqueeze(1)?, config.clone(), comm.clone());
        Ok((y, VocabParallelLoss { max, sum, factors, targets, split, config, comm }))
    }

    /// The gradient of the logits `x` of these columns of the rank's own, given that of the result.
    fn slope(&self, x: &Var, columns: Range<usize>, dy: &Var, create_graph: bool) -> Result<Var> {
        let wide = self.max.dtype();
        // Every rank computes something else of it, so its own gradient is a sum over the ranks.
        let dy = if create_graph { copy_to_region(dy, &self.comm)? } else { dy.clone() };
        let dy = dy.to(wide)?;
        let slope = if dy.rank() == 0 { dy } else { dy.unsqueeze(1)? }.mul(&self.factors)?;
        let shifted = {
            let x = x.to(wide)?;
            x.sub(&self.max)?
        };
        let below = shifted.exp()?;
        drop(shifted);
        let sum = match create_graph {
            // The sum depends on the logits of all ranks.
            true => copy_to_region(&reduce_from_region(&below.sum(&[1], true)?, &self.comm)?, &self.comm)?,
            false => self.sum.clone(),
        };
        let mut dx = below.mul(&slope.div(&sum)?)?;
        drop(below);
        let (classes, smoothing) = (self.split.total(), self.config.label_smoothing);
        if smoothing != 0.0 {
            dx = dx.sub(&slope.mul_scalar(smoothing / classes as f64)?)?;
        }
        // Minus the target's share; -0 for items whose target is in no column here, which counts as the first.
        let first = self.split.range(self.comm.rank()).start;
        let here = first + columns.start..first + columns.end;
        let ignored = Some(self.config.ignore_index);
        let (target, elsewhere) = split_indices(self.targets.tensor(), here, classes, ignored)?;
        let on_target = kernels::full(elsewhere.shape(), smoothing - 1.0, wide, x.device())?;
        let on_target = Var::new(kernels::masked_fill(&on_target, &elsewhere, Scalar::Float(-0.0))?);
        dx.scatter_add(1, &Var::new(target), &slope.mul(&on_target)?)?.to(x.dtype())
    }
}

struct Recorded {
    x: SavedVariable,
    loss: VocabParallelLoss,
}

impl Backward for Recorded {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let x = cx.get(&self.x)?;
        grads1(self.loss.slope(&x, 0..x.shape()[1], cx.dy(), cx.create_graph())?)
    }
}

struct RecordedLinear {
    x: SavedVariable,
    weight: SavedVariable,
    loss: VocabParallelLoss,
    logits_max: usize,
}

impl Backward for RecordedLinear {
    /// Both gradients need the logits, which are computed again of the weight.
    const SPLITS: bool = false;

    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, weight) = (cx.get(&self.x)?, cx.get(&self.weight)?);
        if cx.create_graph() {
            let slope = self.loss.slope(&x.linear(&weight, None)?, 0..weight.shape()[0], cx.dy(), true)?;
            return linear_grads(cx, &slope, [&x, &weight]);
        }
        linear_loss_grads(cx, [x.tensor(), weight.tensor()], self.logits_max, |logits, columns| {
            Ok(self.loss.slope(&Var::new(logits), columns, cx.dy(), false)?.into_tensor())
        })
    }
}

/// A loss, and the values that its derivative needs.
pub(super) struct Merged {
    /// The loss, reduced.
    pub(super) y: Tensor,
    /// The largest logit, `[N, 1]`.
    pub(super) max: Tensor,
    /// The sum of the exponentials below it, `[N, 1]`.
    pub(super) sum: Tensor,
    /// The factor of an item's loss in the result, `[N, 1]`; 0 for ignored items.
    pub(super) factors: Tensor,
}

/// The loss, from the numbers of all ranks, one rank after another. For each item these are m, z, t and, with smoothing, s of the
/// module's comment. The loss has the first dtype, and the other values have the second.
pub(super) fn merged(
    all: &Tensor,
    targets: &Tensor,
    [result, wide]: [DType; 2],
    split: &Split,
    config: &CrossEntropy,
) -> TensorResult<Merged> {
    let all = kernels::cast(all, DType::F64)?;
    let merged = if all.device().is_cuda() { on_gpu } else { on_host };
    merged(&all, targets, [result, wide], split, config)
}

fn on_host(
    all: &Tensor,
    targets: &Tensor,
    [result, wide]: [DType; 2],
    split: &Split,
    config: &CrossEntropy,
) -> TensorResult<Merged> {
    let (items, classes, smoothing) = (targets.numel(), split.total(), config.label_smoothing);
    let counts: Vec<bool> =
        values::<i64>(targets)?.into_iter().map(|target| target != config.ignore_index).collect();
    let merged = merge(&values(all)?, items, split);
    let counted = counts.iter().filter(|&&counts| counts).count() as f64;
    let factor = if config.reduction == Reduction::Mean { config.scale / counted } else { config.scale };
    let losses = counts
        .iter()
        .zip(&merged)
        .map(|(&counts, item)| if counts { item.loss(smoothing, classes) } else { 0.0 });
    let like = |dtype: DType, values: &[f64], shape: &[usize]| {
        kernels::cast(&Tensor::from_slice(values, shape, all.device())?, dtype)
    };
    let column = |values: Vec<f64>| like(wide, &values, &[items, 1]);
    Ok(Merged {
        y: match config.reduction {
            Reduction::None => like(result, &losses.map(|loss| loss * factor).collect::<Vec<_>>(), &[items])?,
            Reduction::Mean | Reduction::Sum => like(result, &[losses.sum::<f64>() * factor], &[])?,
        },
        max: column(merged.iter().map(|item| item.max).collect())?,
        sum: column(merged.iter().map(|item| item.sum).collect())?,
        factors: column(counts.iter().map(|&counts| if counts { factor } else { 0.0 }).collect())?,
    })
}

/// The same by operations on whole columns of items.
fn on_gpu(
    all: &Tensor,
    targets: &Tensor,
    [result, wide]: [DType; 2],
    split: &Split,
    config: &CrossEntropy,
) -> TensorResult<Merged> {
    let (items, ranks, smoothing) = (targets.numel(), split.lengths.len(), config.label_smoothing);
    let each = if smoothing == 0.0 { 3 } else { 4 };
    let all = all.with_shape(&[ranks, items, each])?;
    let of = |number: usize| all.narrow(2, number, 1)?.squeeze(2);
    let (own, zero) = ([of(0)?, of(1)?, of(2)?], Scalar::Float(0.0));
    let max = kernels::amax(&own[0], &[0], true)?;
    let apart = kernels::sub(&own[0], &max)?;
    let sum = kernels::sum(&kernels::mul(&own[1], &kernels::exp(&apart)?)?, &[0], true)?;
    let (at, log) = (kernels::sum(&own[2], &[0], true)?, kernels::log(&sum)?);
    let above = kernels::add(&kernels::sub(&max, &at)?, &log)?;
    let mut losses = kernels::mul_scalar(&above, Scalar::Float(1.0 - smoothing))?;
    if smoothing != 0.0 {
        let classes: Vec<f64> = split.lengths.iter().map(|&length| length as f64).collect();
        let classes = Tensor::from_slice(&classes, &[ranks, 1], all.device())?;
        let below = kernels::add(&of(3)?, &kernels::mul(&apart, &classes)?)?;
        let below = kernels::sum(&below, &[0], true)?;
        let even = kernels::sub(&log, &kernels::div_scalar(&below, Scalar::Float(split.total() as f64))?)?;
        losses = kernels::add(&losses, &kernels::mul_scalar(&even, Scalar::Float(smoothing))?)?;
    }
    let ignored = kernels::eq_scalar(targets, Scalar::Int(config.ignore_index))?;
    let counts = kernels::full(&[items], 1.0, DType::F64, all.device())?;
    let counts = kernels::masked_fill(&counts, &ignored, zero)?;
    let factor = match config.reduction {
        Reduction::Mean => kernels::rdiv_scalar(&kernels::sum(&counts, &[0], true)?, config.scale.into())?,
        Reduction::None | Reduction::Sum => kernels::full(&[1], config.scale, DType::F64, all.device())?,
    };
    let factors = kernels::masked_fill(&factor.broadcast_to(&[items])?, &ignored, zero)?;
    let losses = kernels::masked_fill(&losses.squeeze(0)?, &ignored, zero)?;
    let y = match config.reduction {
        Reduction::None => kernels::mul(&losses, &factor)?,
        Reduction::Mean | Reduction::Sum => {
            kernels::mul(&kernels::sum(&losses, &[0], true)?, &factor)?.with_shape(&[])?
        }
    };
    let column = |x: &Tensor| kernels::cast(x, wide)?.with_shape(&[items, 1]);
    Ok(Merged {
        y: kernels::cast(&y, result)?,
        max: column(&max)?,
        sum: column(&sum)?,
        factors: column(&factors)?,
    })
}

/// The merged numbers of an item: the largest logit, the sum of the exponentials relative to it, the target's logit, and the sum
/// of all logits minus the largest (0 without smoothing).
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

/// Merges the numbers of all ranks, which come one rank after another, to those of the items.
fn merge(all: &[f64], items: usize, split: &Split) -> Vec<Item> {
    let each = all.len() / (items * split.lengths.len()).max(1);
    let of = |rank: usize, item: usize| &all[(rank * items + item) * each..][..each];
    let ranks = || split.lengths.iter().enumerate();
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

/// All values of a tensor; zeros on a `meta` device.
fn values<T: Value + Default + Clone>(tensor: &Tensor) -> TensorResult<Vec<T>> {
    if tensor.device().is_meta() { Ok(vec![T::default(); tensor.numel()]) } else { tensor.to_vec() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_two_ranks_merge_to_those_of_the_whole() {
        let x = [0.5, -1.0, 700.0, 2.0, 3.0f64];
        let below = |x: &[f64], max: f64| x.iter().map(|x| x - max).sum::<f64>();
        let sum = |x: &[f64], max: f64| x.iter().map(|x| (x - max).exp()).sum::<f64>();
        let split = Split::uneven("classes", 1, 5, 2).unwrap();
        let all = [700.0, sum(&x[..3], 700.0), 0.0, below(&x[..3], 700.0)];
        let all = [all, [3.0, sum(&x[3..], 3.0), 2.0, below(&x[3..], 3.0)]].concat();
        let item = merge(&all, 1, &split).remove(0);
        assert_eq!((item.max, item.at), (700.0, 2.0));
        assert!((item.sum - 1.0).abs() < 1e-15 && (item.below - below(&x, 700.0)).abs() < 1e-12);
        let even = x.iter().map(|x| 700.0 - x).sum::<f64>() / 5.0;
        assert!((item.loss(0.1, 5) - (0.9 * 698.0 + 0.1 * even)).abs() < 1e-12);
    }
}
