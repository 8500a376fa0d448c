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
use phalanx_kernels::split_indices;
use phalanx_nn::autograd::{
    Backward, CrossEntropy, Cx, Grads, Reduction, Result, Saved, Saver, Var, begins, grads1, record,
};
use phalanx_nn::{Error, tensor};
use phalanx_tensor::{DType, Scalar, Tensor};

use super::cut::Cut;
use super::exchange::failed;
use super::merged::{Merged, merged};
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
    begins();
    let cut = Cut::shares(OP, 1, classes, comm.size())?;
    check(logits, targets, cut.lengths[comm.rank()], config)?;
    let (x, smoothing) = (logits.tensor(), config.label_smoothing);
    let of_item = targets.unsqueeze(1)?;
    let ignored = Some(config.ignore_index);
    let (target, elsewhere) = split_indices(of_item.tensor(), cut.range(comm.rank()), classes, ignored)?;
    let own = numbers(x, &target, &elsewhere, smoothing)?;
    let mut all = Tensor::empty(&[comm.size() * own.numel()], own.dtype(), own.device())?;
    comm.all_gather(&mut all, &own).map_err(failed)?;
    drop(own);
    let dtypes = [config.result_dtype(x.dtype()), wide(x)];
    let Merged { y, max, sum, factors } = merged(&all, targets.tensor(), dtypes, &cut, config)?;
    drop(all);
    record(OP, &[logits], y, |s: &Saver<'_>| {
        let on_target = kernels::full(elsewhere.shape(), smoothing - 1.0, wide(x), x.device())?;
        let on_target = kernels::masked_fill(&on_target, &elsewhere, Scalar::Float(-0.0))?;
        let [max, sum, factors, target, on_target] = [max, sum, factors, target, on_target].map(Var::new);
        let even = smoothing / classes as f64;
        Ok(Recorded { x: s.input(0)?, max, sum, factors, target, on_target, even, comm: comm.clone() })
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
fn numbers(x: &Tensor, target: &Tensor, elsewhere: &Tensor, smoothing: f64) -> tensor::Result<Tensor> {
    // Items whose class is elsewhere, or that do not count, stand at class 0: their loss here is not used.
    let (reduction, label_smoothing) = (Reduction::None, smoothing);
    let config = CrossEntropy { reduction, label_smoothing, ..CrossEntropy::default() };
    let stats = kernels::cross_entropy(x, &target.squeeze(1)?, &config)?.1;
    let at = kernels::cast(&kernels::gather(x, 1, target)?, wide(x))?;
    let at = kernels::masked_fill(&at, elsewhere, Scalar::Float(0.0))?;
    let below = stats.narrow(1, 2, stats.shape()[1] - 2)?;
    kernels::cat(&[&stats.narrow(1, 0, 2)?, &at, &below], 1)
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
