//! The negative log likelihood of class indices.

use phalanx_tensor::cuda::{Kernel, Program};
use phalanx_tensor::{Result, Tensor};

use crate::block_reader::{BlockReader, store, values_f64};
use crate::check;
use crate::classes::{CLASSES, Reduction, Targets, Weighing, classes_last, classes_second};
use crate::cuda::{FAULT, File, PRELUDE, type_name};
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::rows::cuda::Operand;
use crate::simd::Float;

const FORWARD: Kernels<Forward> = Kernels { cpu: forward_on_cpu, cuda: forward_on_gpu };
const BACKWARD: Kernels<Forward> = Kernels { cpu: backward_on_cpu, cuda: backward_on_gpu };

type Forward = fn(&'static str, [&Tensor; 2], Weighing<'_>, &mut Tensor) -> Result<()>;

/// The options of the loss.
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
    let x = classes_last(x)?;
    FORWARD.run(x.device(), |run| run(OP, [&x, target], weighing, &mut loss))?;
    Ok(loss)
}

/// `x` has its classes last.
fn forward_on_cpu(
    op: &'static str,
    [x, target]: [&Tensor; 2],
    weighing: Weighing<'_>,
    loss: &mut Tensor,
) -> Result<()> {
    let width = x.size(-1)?;
    let classes = weighing.read(op, target, width)?;
    for_real!(op, x.dtype(), T => {
        let source = BlockReader::<T>::open(op, x, x.shape())?;
        let item = |(row, class): (usize, &Option<usize>)| {
            let Some(class) = *class else { return 0.0 };
            let x = source.block(row * width + class, 1, &mut [T::narrow(Float::ZERO)])[0];
            -classes.weight_of(class) * x.widen().to_f64()
        };
        let losses = classes.reduce(weighing.reduction, classes.targets.iter().enumerate().map(item));
        store::<T>(op, loss, &losses)
    })
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
    BACKWARD.run(x.device(), |run| run(OP, [target, dy], weighing, &mut dx))?;
    classes_second(&dx)
}

/// `dx` has its classes last, and holds zeros.
fn backward_on_cpu(
    op: &'static str,
    [target, dy]: [&Tensor; 2],
    weighing: Weighing<'_>,
    dx: &mut Tensor,
) -> Result<()> {
    let width = dx.size(-1)?;
    let classes = weighing.read(op, target, width)?;
    let slopes = classes.slopes(weighing.reduction, &values_f64(op, dy)?);
    for_real!(op, dx.dtype(), T => {
        let mut dx = dx.write::<T>(op)?;
        for (row, (class, slope)) in classes.targets.iter().zip(slopes).enumerate() {
            let Some(class) = *class else { continue };
            let slope = <T as Real>::Wide::from_f64(-classes.weight_of(class) * slope);
            dx[row * width + class] = T::narrow(slope);
        }
        Ok(())
    })
}

const FILES: &[File] = &[PRELUDE, FAULT, CLASSES, ("nll_loss.cu", include_str!("nll_loss.cu"))];

fn kernel(op: &'static str, x: &Tensor, entry: &str) -> Result<Kernel> {
    let defines = [("ELEMENT", type_name(x.dtype()))];
    x.device().gpu()?.kernel(op, &Program { name: "nll_loss.cu", files: FILES, defines: &defines }, entry)
}

/// `x` has its classes last.
fn forward_on_gpu(
    op: &'static str,
    [x, target]: [&Tensor; 2],
    weighing: Weighing<'_>,
    loss: &mut Tensor,
) -> Result<()> {
    let classes = x.size(-1)?;
    let targets = Targets::new(op, weighing, x.dtype(), target, classes)?;
    let (losses, operand) = (targets.losses()?, Operand::of(op, x, classes)?);
    let args = targets.put(operand.put(targets.args().scratch(&losses))?)?;
    kernel(op, x, "forward")?.launch(targets.grid(), args)?;
    targets.reduce(|args| Ok(args.scratch(&losses)), loss)
}

/// `dx` has its classes last, and holds zeros.
fn backward_on_gpu(
    op: &'static str,
    [target, dy]: [&Tensor; 2],
    weighing: Weighing<'_>,
    dx: &mut Tensor,
) -> Result<()> {
    let classes = dx.size(-1)?;
    let targets = Targets::new(op, weighing, dx.dtype(), target, classes)?;
    let (factor, dy, kernel) = (targets.factor()?, dy.contiguous()?, kernel(op, dx, "backward")?);
    let args = targets.args().write(dx)?.read(&dy)?.value(targets.slope_step());
    kernel.launch(targets.grid(), targets.put(targets.put_factor(args, factor.as_ref()))?)
}
