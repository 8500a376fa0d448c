//! Cross entropy of logits [N, C] that are not to be held whole and come in parts: rows forward, columns backward. The bits are those of the
//! whole.

use std::ops::Range;

use phalanx_tensor::{DType, Error, Result, Tensor};

use super::{BACKWARD, Columns, CrossEntropy, GRADIENT, item_losses, launch_forward, may_write_over};
use crate::block_reader::{elements, store};
use crate::check;
use crate::classes::{Classes, Targets};
use crate::dispatch::Kernels;
use crate::real::{for_real, wide_dtype};
use crate::rows::RowSizes;
use crate::rows::cuda::Operand;

const ITEMS: Kernels<ItemsFn> = Kernels { cpu: items_on_cpu, cuda: items_on_gpu };
const REDUCE: Kernels<ReduceFn> = Kernels { cpu: reduce_on_cpu, cuda: reduce_on_gpu };

type ItemsFn =
    fn(&'static str, [&Tensor; 2], Range<usize>, RowSizes, &CrossEntropy, [&mut Tensor; 2]) -> Result<()>;
type ReduceFn = fn(&'static str, [&Tensor; 2], (DType, usize), &CrossEntropy, &mut Tensor) -> Result<()>;

/// The losses of the items `items`, whose logits are the rows of `x` [items, C], and what [`cross_entropy_backward_part`] needs of each.
/// `target` `[N]` has those of all items. The losses are in f64, without the factor of the reduction: [`cross_entropy_reduce`] makes the result
/// of those of all items.
///
/// # Errors
/// As [`crate::cross_entropy`], or if there are not so many items.
pub fn cross_entropy_items(
    x: &Tensor,
    target: &Tensor,
    items: Range<usize>,
    config: &CrossEntropy,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "cross_entropy_items";
    if x.rank() != 2 || target.rank() != 1 || items.end > target.numel() || items.len() != x.shape()[0] {
        let got =
            format!("logits of shape {:?} for items {items:?} of targets {:?}", x.shape(), target.shape());
        return Err(Error::shape(OP, got, "a row for each item, [items, C]"));
    }
    config.weighing().check(OP, x, &target.narrow(0, items.start, items.len())?)?;
    config.check(OP)?;
    let stats = if config.label_smoothing == 0.0 { 2 } else { 3 };
    let shape = RowSizes { rows: items.len(), width: x.shape()[1], stats, sums: 0 };
    let mut losses = Tensor::empty_for(OP, &[items.len()], DType::F64, x.device())?;
    let mut kept = Tensor::empty_for(OP, &[items.len(), stats], wide_dtype(x.dtype()), x.device())?;
    let outputs = [&mut losses, &mut kept];
    ITEMS.run(x.device(), |run| run(OP, [x, target], items, shape, config, outputs))?;
    Ok((losses, kept))
}

fn items_on_cpu(
    op: &'static str,
    [x, target]: [&Tensor; 2],
    items: Range<usize>,
    shape: RowSizes,
    config: &CrossEntropy,
    [losses, stats]: [&mut Tensor; 2],
) -> Result<()> {
    // All targets are read, so that an error counts items from the first of all.
    let Classes { targets, weight, factor } = config.weighing().read(op, target, shape.width)?;
    let classes = Classes { targets: targets[items].to_vec(), weight, factor };
    let found = for_real!(op, x.dtype(), T => item_losses::<T>(op, x, &classes, shape, config, stats))?;
    store::<f64>(op, losses, &found)
}

fn items_on_gpu(
    op: &'static str,
    [x, target]: [&Tensor; 2],
    items: Range<usize>,
    shape: RowSizes,
    config: &CrossEntropy,
    [losses, stats]: [&mut Tensor; 2],
) -> Result<()> {
    let target = target.narrow(0, items.start, items.len())?;
    let targets = Targets::new(op, config.weighing(), x.dtype(), &target, shape.width)?;
    let (result, operand) = (config.result_dtype(x.dtype()), Operand::of(op, x, shape.width)?);
    launch_forward(op, (x, &operand), &targets, shape, config, result, (targets.args().write(losses)?, stats))
}

/// The result of [`crate::cross_entropy`] for logits of `dtype` and `classes` classes, of the losses `[N]` of all items.
///
/// # Errors
/// As [`crate::cross_entropy`].
pub fn cross_entropy_reduce(
    losses: &Tensor,
    target: &Tensor,
    (dtype, classes): (DType, usize),
    config: &CrossEntropy,
) -> Result<Tensor> {
    const OP: &str = "cross_entropy_reduce";
    check::same_device(OP, &[losses, target])?;
    check::dtype(OP, losses, DType::F64)?;
    check::shape(OP, "losses", losses, target.shape())?;
    let shape = config.weighing().result_shape(target);
    let mut loss = Tensor::empty_for(OP, &shape, config.result_dtype(dtype), losses.device())?;
    REDUCE.run(losses.device(), |run| run(OP, [losses, target], (dtype, classes), config, &mut loss))?;
    Ok(loss)
}

fn reduce_on_cpu(
    op: &'static str,
    [losses, target]: [&Tensor; 2],
    (_, classes): (DType, usize),
    config: &CrossEntropy,
    loss: &mut Tensor,
) -> Result<()> {
    let classes = config.weighing().read(op, target, classes)?;
    let losses = classes.reduce(config.reduction, elements::<f64>(op, losses)?.into_iter());
    for_real!(op, loss.dtype(), L => store::<L>(op, loss, &losses))
}

fn reduce_on_gpu(
    op: &'static str,
    [losses, target]: [&Tensor; 2],
    (dtype, classes): (DType, usize),
    config: &CrossEntropy,
    loss: &mut Tensor,
) -> Result<()> {
    let targets = Targets::new(op, config.weighing(), dtype, target, classes)?;
    let losses = losses.contiguous()?;
    targets.reduce(|args| args.read(&losses), loss)
}

/// The gradient of [`crate::cross_entropy`] with respect to the logits `x` [N, columns] of the classes from `first` on, of `classes` in all.
/// `stats` are those of all items [N, ..]. It is written over `x` if nothing else refers to that.
///
/// # Errors
/// As [`crate::cross_entropy`], or if there are no such classes.
pub fn cross_entropy_backward_part(
    mut x: Tensor,
    (first, classes): (usize, usize),
    [target, stats, dy]: [&Tensor; 3],
    config: &CrossEntropy,
) -> Result<Tensor> {
    check::float(BACKWARD, &x)?;
    check::same_device(BACKWARD, &[&x, target, stats, dy])?;
    let fits = x.rank() == 2 && x.shape()[0] == target.numel() && first + x.shape()[1] <= classes;
    if !fits || stats.shape().first() != Some(&target.numel()) {
        let got = format!("logits of shape {:?} from class {first} on", x.shape());
        let wanted = format!("[{}, columns] of {classes} classes", target.numel());
        return Err(Error::shape(BACKWARD, got, wanted));
    }
    check::dtype(BACKWARD, dy, config.result_dtype(x.dtype()))?;
    check::shape(BACKWARD, "a gradient", dy, &config.weighing().result_shape(target))?;
    if let Some(weight) = &config.weight {
        check::same(BACKWARD, &[&x, weight])?;
        check::shape(BACKWARD, "a weight", weight, &[classes])?;
    }
    let columns = Columns { rows: target.numel(), first, width: x.shape()[1], classes };
    let device = x.device();
    if x.is_contiguous() && x.is_sole_owner() && may_write_over(&x) {
        GRADIENT.run(device, |run| run(BACKWARD, None, [target, stats, dy], columns, config, &mut x))?;
        return Ok(x);
    }
    let mut dx = Tensor::empty_for(BACKWARD, x.shape(), x.dtype(), device)?;
    GRADIENT.run(device, |run| run(BACKWARD, Some(&x), [target, stats, dy], columns, config, &mut dx))?;
    Ok(dx)
}
