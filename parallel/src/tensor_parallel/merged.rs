//! What ranks know of the items of a loss whose classes are cut, merged: on the host where the host has the numbers, on a GPU by
//! its own operations, so that nobody waits for it.

use phalanx_kernels as kernels;
use phalanx_nn::autograd::{CrossEntropy, Reduction};
use phalanx_tensor::{DType, Result, Scalar, Tensor, Value};

use super::cut::Cut;

/// A loss, and what its derivative needs.
pub(super) struct Merged {
    /// The loss, reduced.
    pub(super) y: Tensor,
    /// The largest logit, `[N, 1]`.
    pub(super) max: Tensor,
    /// The sum of the exponentials below it, `[N, 1]`.
    pub(super) sum: Tensor,
    /// What an item's loss is multiplied with in the result, `[N, 1]`; 0 where it does not count.
    pub(super) factors: Tensor,
}

/// The loss of `all` ranks' numbers, one rank after another: of each item of `targets` the largest logit, the sum of the
/// exponentials below it, the target's logit or 0 and, if there is smoothing, the sum of all logits less the largest. The loss is
/// in the first dtype, the rest in the second.
pub(super) fn merged(
    all: &Tensor,
    targets: &Tensor,
    [result, wide]: [DType; 2],
    cut: &Cut,
    config: &CrossEntropy,
) -> Result<Merged> {
    let all = kernels::cast(all, DType::F64)?;
    let merged = if all.device().is_cuda() { on_gpu } else { on_host };
    merged(&all, targets, [result, wide], cut, config)
}

fn on_host(
    all: &Tensor,
    targets: &Tensor,
    [result, wide]: [DType; 2],
    cut: &Cut,
    config: &CrossEntropy,
) -> Result<Merged> {
    let (items, classes, smoothing) = (targets.numel(), cut.whole(), config.label_smoothing);
    let counts: Vec<bool> =
        values::<i64>(targets)?.into_iter().map(|target| target != config.ignore_index).collect();
    let merged = merge(&values(all)?, items, cut);
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

/// The same, written over whole columns of items.
fn on_gpu(
    all: &Tensor,
    targets: &Tensor,
    [result, wide]: [DType; 2],
    cut: &Cut,
    config: &CrossEntropy,
) -> Result<Merged> {
    let (items, ranks, smoothing) = (targets.numel(), cut.lengths.len(), config.label_smoothing);
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
        let classes: Vec<f64> = cut.lengths.iter().map(|&length| length as f64).collect();
        let classes = Tensor::from_slice(&classes, &[ranks, 1], all.device())?;
        let below = kernels::add(&of(3)?, &kernels::mul(&apart, &classes)?)?;
        let below = kernels::sum(&below, &[0], true)?;
        let even = kernels::sub(&log, &kernels::div_scalar(&below, Scalar::Float(cut.whole() as f64))?)?;
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
fn values<T: Value + Default + Clone>(tensor: &Tensor) -> Result<Vec<T>> {
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
