//! The negative log likelihood of class indices.

mod cuda;

use phalanx_tensor::{Result, Tensor};

use crate::check;
use crate::classes::{Weighing, classes_last, classes_second};
use crate::real::{Real, for_real};
use crate::reduction::Reduction;
use crate::simd::Float;
use crate::source::{Source, values_f64};
use crate::wide::store;

/// What the loss is told beside log probabilities and targets.
#[derive(Clone, Debug)]
pub struct NllLoss {
    /// A weight a class, in the input's dtype.
    pub weight: Option<Tensor>,
    /// Items with this target give no loss and no gradient (-100).
    pub ignore_index: i64,
    /// What becomes of the items' losses (their mean).
    pub reduction: Reduction,
    /// A factor on the result (1).
    pub scale: f64,
}

impl Default for NllLoss {
    fn default() -> NllLoss {
        NllLoss { weight: None, ignore_index: -100, reduction: Reduction::Mean, scale: 1.0 }
    }
}

impl NllLoss {
    fn weighing(&self) -> Weighing<'_> {
        let NllLoss { weight, ignore_index, reduction, scale } = self;
        let (ignore_index, reduction, scale) = (*ignore_index, *reduction, *scale);
        Weighing { weight: weight.as_ref(), ignore_index, reduction, scale }
    }
}

/// For log probabilities `x` [N, C, ...] and i64 targets [N, ...]: an item's loss is `-w[y] x[y]`; the mean divides by
/// the sum of `w[y]`. Losses are added in f64.
///
/// # Errors
/// If shapes, dtypes or devices do not fit, or a target is no class.
pub fn nll_loss(x: &Tensor, target: &Tensor, config: &NllLoss) -> Result<Tensor> {
    const OP: &str = "nll_loss";
    let weighing = config.weighing();
    weighing.check(OP, x, target)?;
    let mut loss = Tensor::empty_for(OP, &weighing.result_shape(target), x.dtype(), x.device())?;
    if x.device().is_meta() {
        return Ok(loss);
    }
    if x.device().is_cuda() {
        cuda::forward(OP, [&classes_last(x)?, target], weighing, &mut loss)?;
        return Ok(loss);
    }
    let width = x.shape()[1];
    let classes = weighing.read(OP, target, width)?;
    for_real!(OP, x.dtype(), T => {
        let x = classes_last(x)?;
        let source = Source::<T>::open(OP, &x, x.shape())?;
        let item = |(row, class): (usize, &Option<usize>)| {
            let Some(class) = *class else { return 0.0 };
            let x = source.block(row * width + class, 1, &mut [T::narrow(Float::ZERO)])[0];
            -classes.weight_of(class) * x.widen().to_f64()
        };
        let losses = classes.reduce(config.reduction, classes.targets.iter().enumerate().map(item));
        store::<T>(OP, &mut loss, &losses)
    })?;
    Ok(loss)
}

/// `dx` of [`nll_loss`], given the result's gradient `dy`: `-w[y] dy` at each item's class, 0 elsewhere.
///
/// # Errors
/// As [`nll_loss`].
pub fn nll_loss_backward(x: &Tensor, target: &Tensor, dy: &Tensor, config: &NllLoss) -> Result<Tensor> {
    const OP: &str = "nll_loss_backward";
    let weighing = config.weighing();
    weighing.check(OP, x, target)?;
    check::same(OP, &[x, dy])?;
    check::shape(OP, "a gradient", dy, &weighing.result_shape(target))?;
    let mut dx = Tensor::zeros_for(OP, classes_last(x)?.shape(), x.dtype(), x.device())?;
    if x.device().is_cuda() {
        cuda::backward(OP, [target, dy], weighing, &mut dx)?;
    } else if !x.device().is_meta() {
        let width = x.shape()[1];
        let classes = weighing.read(OP, target, width)?;
        let slopes = classes.slopes(config.reduction, &values_f64(OP, dy)?);
        for_real!(OP, x.dtype(), T => {
            let mut dx = dx.write::<T>(OP)?;
            for (row, (class, slope)) in classes.targets.iter().zip(slopes).enumerate() {
                let Some(class) = *class else { continue };
                let slope = <T as Real>::Wide::from_f64(-classes.weight_of(class) * slope);
                dx[row * width + class] = T::narrow(slope);
            }
            Ok(())
        })?;
    }
    classes_second(&dx)
}
