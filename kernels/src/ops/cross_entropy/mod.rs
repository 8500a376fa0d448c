//! Cross entropy between logits and class indices. Probabilities are never stored: the forward pass keeps two numbers
//! a row, from which the backward pass makes the gradient in one pass over the logits.
//!
//! Logits that are not to be held whole come in parts (`parts.rs`).

mod cpu;
mod parts;

pub use parts::{cross_entropy_backward_part, cross_entropy_items, cross_entropy_reduce};

use phalanx_tensor::cuda::{Args, Kernel};
use phalanx_tensor::{DType, Error, Result, Tensor};

use crate::block_reader::{BlockReader, elements, store, values_f64};
use crate::check;
use crate::classes::{CLASSES, Classes, Reduction, Targets, Weighing, classes_last, classes_second};
use crate::cuda::{FAULT, type_name};
use crate::dispatch::Kernels;
use crate::real::{Real, for_real, wide_dtype};
use crate::rows::cuda::{Operand, PACKET_BYTES, RowProgram, Team, row_program};
use crate::rows::{self, Outputs, RowSizes, columns};
use crate::simd::Float;

const FORWARD: Kernels<Forward> = Kernels { cpu: forward_on_cpu, cuda: forward_on_gpu };
const GRADIENT: Kernels<Gradient> = Kernels { cpu: backward_on_cpu, cuda: backward_on_gpu };
const TARGETS: Kernels<TargetsFn> = Kernels { cpu: targets_on_cpu, cuda: targets_on_gpu };

type TargetsFn = fn(&'static str, [&Tensor; 2], &CrossEntropy, &mut Tensor) -> Result<()>;

type Forward = fn(&'static str, [&Tensor; 2], RowSizes, &CrossEntropy, [&mut Tensor; 2]) -> Result<()>;
type Gradient =
    fn(&'static str, Option<&Tensor>, [&Tensor; 3], Columns, &CrossEntropy, &mut Tensor) -> Result<()>;

/// The logits of some classes, all unless they come in parts.
#[derive(Clone, Copy)]
struct Columns {
    rows: usize,
    /// The first class, and how many there are.
    first: usize,
    width: usize,
    /// All classes.
    classes: usize,
}

impl Columns {
    fn sizes(self) -> RowSizes {
        RowSizes { rows: self.rows, width: self.width, stats: 0, sums: 0 }
    }
}

/// The options of cross entropy.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// A weight a class, in the logits' dtype.
    pub weight: Option<Tensor>,
    /// Items with this target give no loss and no gradient (-100).
    pub ignore_index: i64,
    /// The share of the target that is spread evenly over all classes (0).
    pub label_smoothing: f64,
    /// What becomes of the items' losses (their mean).
    pub reduction: Reduction,
    /// A factor on the result (1): with [`Reduction::Sum`] and 1 / (the global batch's counted items), the losses of
    /// micro-batches add up to the global batch's mean.
    pub scale: f64,
    /// Whether the result of halves is in f32, as if they had been widened first (it is in their dtype).
    pub wide: bool,
}

impl Default for CrossEntropy {
    fn default() -> CrossEntropy {
        CrossEntropy {
            weight: None,
            ignore_index: -100,
            label_smoothing: 0.0,
            reduction: Reduction::Mean,
            scale: 1.0,
            wide: false,
        }
    }
}

impl CrossEntropy {
    fn weighing(&self) -> Weighing<'_> {
        let CrossEntropy { weight, ignore_index, reduction, scale, .. } = self;
        let (ignore_index, reduction, scale) = (*ignore_index, *reduction, *scale);
        Weighing { weight: weight.as_ref(), ignore_index, reduction, scale }
    }

    fn check(&self, op: &'static str) -> Result<()> {
        if (0.0..=1.0).contains(&self.label_smoothing) {
            return Ok(());
        }
        Err(Error::range(op, format!("label smoothing {:?}", self.label_smoothing), "0 to 1"))
    }

    /// The result's dtype for logits of `dtype`.
    pub fn result_dtype(&self, dtype: DType) -> DType {
        if self.wide { wide_dtype(dtype) } else { dtype }
    }
}

/// For logits `x` [N, C, ...] and i64 targets [N, ...], with `p = softmax(x)` over C: an item's loss is
/// `-(1-s) w[y] log p[y] - s/C sum_c w[c] log p[c]` with weights w and smoothing s. Losses are added in f64. Also gives
/// what the backward pass needs: of each row the largest logit and the sum of the exponentials below it.
///
/// # Errors
/// If shapes, dtypes or devices do not fit, a target is no class, the smoothing is not between 0 and 1, or a class weight
/// is negative (on a CPU).
pub fn cross_entropy(x: &Tensor, target: &Tensor, config: &CrossEntropy) -> Result<(Tensor, Tensor)> {
    const OP: &str = "cross_entropy";
    let weighing = config.weighing();
    weighing.check(OP, x, target)?;
    config.check(OP)?;
    let shape = sizes(x, target, if config.label_smoothing == 0.0 { 2 } else { 3 });
    let mut loss =
        Tensor::empty_for(OP, &weighing.result_shape(target), config.result_dtype(x.dtype()), x.device())?;
    let mut stats = Tensor::empty_for(OP, &[shape.rows, shape.stats], wide_dtype(x.dtype()), x.device())?;
    let x = classes_last(x)?;
    FORWARD.run(x.device(), |run| run(OP, [&x, target], shape, config, [&mut loss, &mut stats]))?;
    Ok((loss, stats))
}

/// `x` has its classes last.
fn forward_on_cpu(
    op: &'static str,
    [x, target]: [&Tensor; 2],
    shape: RowSizes,
    config: &CrossEntropy,
    outputs: [&mut Tensor; 2],
) -> Result<()> {
    let classes = config.weighing().read(op, target, shape.width)?;
    let [loss, stats] = outputs;
    let losses = for_real!(op, x.dtype(), T => item_losses::<T>(op, x, &classes, shape, config, stats))?;
    let losses = classes.reduce(config.reduction, losses.into_iter());
    for_real!(op, loss.dtype(), L => store::<L>(op, loss, &losses))
}

/// Each item's loss, without the factor of the reduction; and each row's `stats`. `x` has its classes last.
fn item_losses<T: Real>(
    op: &'static str,
    x: &Tensor,
    classes: &Classes,
    shape: RowSizes,
    config: &CrossEntropy,
    stats: &mut Tensor,
) -> Result<Vec<f64>> {
    let weight = wide_weight::<T>(classes);
    let kernel = cpu::Forward { targets: &classes.targets, weight: weight.as_deref() };
    let columns = in_columns(x, config)?;
    match &columns {
        Some((x, sizes)) => {
            columns::run::<T, 1>(op, &kernel, *sizes, [x], None, (&mut stats.write(op)?, shape.stats))?
        }
        None => {
            rows::run::<T, 1>(op, &kernel, shape, [x], Outputs { y: None, stats: &mut stats.write(op)? })?;
        }
    }
    let (x, inner) = columns.as_ref().map_or((x, 1), |(x, [_, inner])| (x, *inner));
    let (source, kept) = (BlockReader::<T>::open(op, x, x.shape())?, elements::<T::Wide>(op, stats)?);
    let (share, total) = smoothing(classes, config, shape.width);
    let item = |row: usize| {
        let Some(class) = classes.targets[row] else { return 0.0 };
        let at = (row / inner * shape.width + class) * inner + row % inner;
        let logit = source.block(at, 1, &mut [T::zeroed()])[0].widen();
        let kept = &kept[row * shape.stats..][..shape.stats];
        let log = kept[1].to_f64().ln();
        let below = kept[0].to_f64() - logit.to_f64();
        let even = if share == 0.0 { 0.0 } else { share * (total * log - kept[2].to_f64()) };
        (1.0 - config.label_smoothing) * classes.weight_of(class) * (below + log) + even
    };
    by_item(x, shape.rows, item)
}

/// `dx` of [`cross_entropy`], given the result's gradient `dy` and the forward pass's `stats`; in the logits' dtype.
///
/// # Errors
/// As [`cross_entropy`].
pub fn cross_entropy_backward(
    x: &Tensor,
    target: &Tensor,
    stats: &Tensor,
    dy: &Tensor,
    config: &CrossEntropy,
) -> Result<Tensor> {
    check_backward(x, target, dy, config)?;
    let last = classes_last(x)?;
    if in_columns(&last, config)?.is_some() {
        let mut dx = Tensor::empty_for(BACKWARD, x.shape(), x.dtype(), x.device())?;
        backward_to(&mut dx, Some(&last), [target, stats, dy], config)?;
        return Ok(dx);
    }
    let mut dx = Tensor::empty_for(BACKWARD, last.shape(), x.dtype(), x.device())?;
    backward_to(&mut dx, Some(&last), [target, stats, dy], config)?;
    classes_second(&dx)
}

/// [`cross_entropy_backward`] that writes `dx` over `x` [N, C] where nothing else refers to it, so that no memory is taken.
///
/// # Errors
/// As [`cross_entropy`].
pub fn cross_entropy_backward_over(
    mut x: Tensor,
    target: &Tensor,
    stats: &Tensor,
    dy: &Tensor,
    config: &CrossEntropy,
) -> Result<Tensor> {
    check_backward(&x, target, dy, config)?;
    if x.rank() > 2 || !x.is_contiguous() || !x.is_sole_owner() || !may_write_over(&x) {
        return cross_entropy_backward(&x, target, stats, dy, config);
    }
    backward_to(&mut x, None, [target, stats, dy], config)?;
    Ok(x)
}

/// The logits as [N, C, ..] and the sizes of its columns, if the kernel reads those in place: not on a GPU, whose kernels read
/// rows.
fn in_columns(last: &Tensor, config: &CrossEntropy) -> Result<Option<(Tensor, [usize; 2])>> {
    let sizes = [last.shape()[last.rank() - 1], last.shape()[1..last.rank() - 1].iter().product()];
    let lie = !last.device().is_cuda() && !last.is_contiguous() && columns::fits(sizes[0], sizes[1]);
    let plain = config.label_smoothing == 0.0 && sizes[0] <= cpu::BLOCK;
    (lie && plain).then(|| Ok((classes_second(last)?, sizes))).transpose()
}

const BACKWARD: &str = "cross_entropy_backward";

/// Items that make a task.
const ITEMS: usize = 1 << 12;

fn check_backward(x: &Tensor, target: &Tensor, dy: &Tensor, config: &CrossEntropy) -> Result<()> {
    let weighing = config.weighing();
    weighing.check(BACKWARD, x, target)?;
    check::same_device(BACKWARD, &[x, dy])?;
    check::dtype(BACKWARD, dy, config.result_dtype(x.dtype()))?;
    check::shape(BACKWARD, "a gradient", dy, &weighing.result_shape(target))
}

/// Of `x`, classes last, or of the logits that `dx` holds.
fn backward_to(
    dx: &mut Tensor,
    x: Option<&Tensor>,
    [target, stats, dy]: [&Tensor; 3],
    config: &CrossEntropy,
) -> Result<()> {
    let width = x.map_or(dx.shape(), Tensor::shape)[dx.rank() - 1];
    let shape = Columns { rows: target.numel(), first: 0, width, classes: width };
    GRADIENT.run(dx.device(), |run| run(BACKWARD, x, [target, stats, dy], shape, config, dx))
}

fn backward_on_cpu(
    op: &'static str,
    x: Option<&Tensor>,
    [target, stats, dy]: [&Tensor; 3],
    shape: Columns,
    config: &CrossEntropy,
    dx: &mut Tensor,
) -> Result<()> {
    let classes = config.weighing().read(op, target, shape.classes)?;
    for_real!(op, dx.dtype(), T => backward::<T>(x, [stats, dy], &classes, shape, config, dx))
}

fn backward<T: Real>(
    x: Option<&Tensor>,
    [stats, dy]: [&Tensor; 2],
    classes: &Classes,
    shape: Columns,
    config: &CrossEntropy,
    dx: &mut Tensor,
) -> Result<()> {
    let slopes = classes.slopes(config.reduction, &values_f64(BACKWARD, dy)?);
    let (share, total) = smoothing(classes, config, shape.classes);
    let (stats_shape, stats) = (stats.shape()[1], elements::<T::Wide>(BACKWARD, stats)?);
    let weight = wide_weight::<T>(classes);
    let row = |row: usize| {
        let (class, slope) = (classes.targets[row]?, slopes[row]);
        let on_target = slope * (1.0 - config.label_smoothing) * classes.weight_of(class);
        let all = on_target + slope * share * total;
        let [max, sum] = [stats[row * stats_shape], stats[row * stats_shape + 1]];
        let wide = T::Wide::from_f64;
        let (factor, even) = (wide(all / sum.to_f64()), wide(slope * share));
        // Beyond the row's end if the class is in another part.
        let class = class.wrapping_sub(shape.first);
        Some(cpu::Gradient { class, max, factor, on_target: wide(on_target), even })
    };
    let gradients = by_item(dx, shape.rows, row)?;
    let weight = weight.as_deref().filter(|_| share != 0.0).map(|all| &all[shape.first..][..shape.width]);
    let kernel = cpu::BackwardOf { gradients: &gradients, weight, smooth: share != 0.0 };
    if let Some((x, sizes)) = x.map(|x| in_columns(x, config)).transpose()?.flatten() {
        return columns::run::<T, 1>(BACKWARD, &kernel, sizes, [&x], Some(dx), (&mut [], 0));
    }
    let outputs = Outputs { y: Some(dx), stats: &mut [] };
    match x {
        Some(x) => rows::run::<T, 1>(BACKWARD, &kernel, shape.sizes(), [x], outputs)?,
        None => rows::run::<T, 0>(BACKWARD, &kernel, shape.sizes(), [], outputs)?,
    };
    Ok(())
}

/// What `f` makes of each of so many items, by all threads of the device of `x`.
fn by_item<R: Default + Send>(x: &Tensor, items: usize, f: impl Fn(usize) -> R + Sync) -> Result<Vec<R>> {
    let mut made: Vec<R> = (0..items).map(|_| R::default()).collect();
    x.device().pool()?.for_each_chunk(&mut made, ITEMS, |i, made| {
        made.iter_mut().enumerate().for_each(|(j, made)| *made = f(i * ITEMS + j));
    });
    Ok(made)
}

/// The distribution that [`cross_entropy`] holds the logits against, times each item's share in the result: `dx` is
/// `dy (p sum(q) - q)`, sums over C. In the result's dtype. For gradients that are differentiated again.
///
/// # Errors
/// As [`cross_entropy`].
pub fn cross_entropy_targets(x: &Tensor, target: &Tensor, config: &CrossEntropy) -> Result<Tensor> {
    const OP: &str = "cross_entropy_targets";
    let weighing = config.weighing();
    weighing.check(OP, x, target)?;
    config.check(OP)?;
    let mut q = Tensor::empty_for(OP, classes_last(x)?.shape(), config.result_dtype(x.dtype()), x.device())?;
    TARGETS.run(x.device(), |run| run(OP, [x, target], config, &mut q))?;
    classes_second(&q)
}

/// `q` has its classes last.
fn targets_on_cpu(
    op: &'static str,
    [x, target]: [&Tensor; 2],
    config: &CrossEntropy,
    q: &mut Tensor,
) -> Result<()> {
    let width = x.shape()[1];
    let classes = config.weighing().read(op, target, width)?;
    let (share, _) = smoothing(&classes, config, width);
    let mut values = vec![0.0; q.numel()];
    for (row, class) in values.chunks_mut(width).zip(&classes.targets) {
        let Some(class) = *class else { continue };
        row.iter_mut().enumerate().for_each(|(c, q)| *q = classes.factor * share * classes.weight_of(c));
        row[class] += classes.factor * (1.0 - config.label_smoothing) * classes.weight_of(class);
    }
    for_real!(op, q.dtype(), T => store::<T>(op, q, &values))
}

/// Rows of [N, C, ...], one an item.
fn sizes(x: &Tensor, target: &Tensor, stats: usize) -> RowSizes {
    RowSizes { rows: target.numel(), width: x.shape()[1], stats, sums: 0 }
}

fn wide_weight<T: Real>(classes: &Classes) -> Option<Vec<T::Wide>> {
    classes.weight.as_ref().map(|w| w.iter().map(|&w| T::Wide::from_f64(w)).collect())
}

/// Each class's share of the smoothed target, and the sum of all weights.
fn smoothing(classes: &Classes, config: &CrossEntropy, width: usize) -> (f64, f64) {
    let total = classes.weight.as_ref().map_or(width as f64, |w| w.iter().sum());
    (config.label_smoothing / width as f64, total)
}

const PROGRAM: RowProgram = row_program!("cross_entropy.cu", FAULT, CLASSES);

/// For logits `x`; `result` is the result's dtype.
fn kernel(op: &'static str, x: &Tensor, result: DType, team: Team, entry: &str) -> Result<Kernel> {
    team.kernel(op, x.device().gpu()?, PROGRAM, entry, &[("RESULT", type_name(result))])
}

/// `x` has its classes last.
fn forward_on_gpu(
    op: &'static str,
    [x, target]: [&Tensor; 2],
    shape: RowSizes,
    config: &CrossEntropy,
    [loss, stats]: [&mut Tensor; 2],
) -> Result<()> {
    let targets = Targets::new(op, config.weighing(), x.dtype(), target, shape.width)?;
    let (losses, operand) = (targets.losses()?, Operand::of(op, x, shape.width)?);
    let outputs = (targets.args().scratch(&losses), stats);
    launch_forward(op, (x, &operand), &targets, shape, config, loss.dtype(), outputs)?;
    targets.reduce(|args| Ok(args.scratch(&losses)), loss)
}

/// `losses` are the arguments so far: where each item's loss is to be written. `result` is the dtype of the reduced loss.
fn launch_forward<'a>(
    op: &'static str,
    (x, operand): (&'a Tensor, &'a Operand<'_>),
    targets: &'a Targets<'_>,
    shape: RowSizes,
    config: &CrossEntropy,
    result: DType,
    (losses, stats): (Args<'a>, &'a mut Tensor),
) -> Result<()> {
    let team = Team::new(x.dtype(), shape.rows, shape.width);
    let args = operand.put(losses.write(stats)?)?;
    let args = targets.put(args.value(shape.stats as u64).value(config.label_smoothing))?;
    kernel(op, x, result, team, "forward")?.launch(team.grid(), args)
}

/// `x` has its classes last, and so has `dx`, which holds the logits if there is no `x`.
fn backward_on_gpu(
    op: &'static str,
    x: Option<&Tensor>,
    [target, stats, dy]: [&Tensor; 3],
    shape: Columns,
    config: &CrossEntropy,
    dx: &mut Tensor,
) -> Result<()> {
    let itself = dx.clone();
    let x = x.unwrap_or(&itself);
    let targets = Targets::new(op, config.weighing(), x.dtype(), target, shape.classes)?;
    let team = Team::new(x.dtype(), shape.rows, shape.width);
    let (factor, operand) = (targets.factor()?, Operand::of(op, x, shape.width)?);
    let (stats, dy) = (stats.contiguous()?, dy.contiguous()?);
    let args = operand.put(targets.args().write(dx)?)?.read(&stats)?.value(stats.shape()[1] as u64);
    let args = targets.put_factor(args.read(&dy)?.value(targets.slope_step()), factor.as_ref());
    let args = args.value(config.label_smoothing).value(shape.first as u64).value(shape.width as u64);
    kernel(op, x, dy.dtype(), team, "backward")?.launch(team.grid(), targets.put(args)?)
}

/// Whether [`backward`] may be told to write over `x` [N, C]: where a thread that reads a packet sees no byte of another's.
fn may_write_over(x: &Tensor) -> bool {
    let width = x.shape()[1];
    let team = Team::new(x.dtype(), x.shape()[0], width);
    !x.device().is_cuda() || team.packets == 0 || (width * x.dtype().size()).is_multiple_of(PACKET_BYTES)
}

/// `q` has its classes last.
fn targets_on_gpu(
    op: &'static str,
    [x, target]: [&Tensor; 2],
    config: &CrossEntropy,
    q: &mut Tensor,
) -> Result<()> {
    let classes = q.size(-1)?;
    let targets = Targets::new(op, config.weighing(), x.dtype(), target, classes)?;
    let team = Team::new(x.dtype(), targets.items(), classes);
    let (factor, kernel) = (targets.factor()?, kernel(op, x, q.dtype(), team, "targets")?);
    let args = targets.put_factor(targets.args().write(q)?, factor.as_ref());
    kernel.launch(team.grid(), targets.put(args.value(config.label_smoothing))?)
}

#[cfg(test)]
mod tests;
