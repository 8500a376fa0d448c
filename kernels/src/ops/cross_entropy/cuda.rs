//! The launches of `cross_entropy.cu`.

use phalanx_tensor::cuda::Kernel;
use phalanx_tensor::{Result, Tensor};

use super::CrossEntropy;
use crate::classes::cuda::{CLASSES, Targets};
use crate::cuda::{FAULT, type_name};
use crate::rows::Shape;
use crate::rows::cuda::{Operand, PACKET_BYTES, RowProgram, Team, row_program};

const PROGRAM: RowProgram = row_program!("cross_entropy.cu", FAULT, CLASSES);

/// For logits `x`; `result` has the result's dtype.
fn kernel(op: &'static str, x: &Tensor, result: &Tensor, team: Team, entry: &str) -> Result<Kernel> {
    team.kernel(op, x.device().gpu()?, PROGRAM, entry, Some(("RESULT", type_name(result.dtype()))))
}

/// `x` has its classes last.
pub(super) fn forward(
    op: &'static str,
    [x, target]: [&Tensor; 2],
    shape: Shape,
    config: &CrossEntropy,
    [loss, stats]: [&mut Tensor; 2],
) -> Result<()> {
    let targets = Targets::new(op, config.weighing(), x, target, shape.width)?;
    let team = Team::new(x.dtype(), shape.rows, shape.width);
    let (losses, operand) = (targets.losses()?, Operand::of(op, x, shape.width)?);
    let args = operand.put(targets.args().scratch(&losses).write(stats)?)?;
    let args = targets.put(args.value(shape.stats as u64).value(config.label_smoothing))?;
    kernel(op, x, loss, team, "forward")?.launch(team.grid(), args)?;
    targets.reduce(&losses, loss)
}

/// `x` has its classes last, and so has `dx`, which holds the logits if there is no `x`.
pub(super) fn backward(
    op: &'static str,
    x: Option<&Tensor>,
    [target, stats, dy]: [&Tensor; 3],
    shape: Shape,
    config: &CrossEntropy,
    dx: &mut Tensor,
) -> Result<()> {
    let itself = dx.clone();
    let x = x.unwrap_or(&itself);
    let targets = Targets::new(op, config.weighing(), x, target, shape.width)?;
    let team = Team::new(x.dtype(), shape.rows, shape.width);
    let (factor, operand) = (targets.factor()?, Operand::of(op, x, shape.width)?);
    let (stats, dy) = (stats.contiguous()?, dy.contiguous()?);
    let args = operand.put(targets.args().write(dx)?)?.read(&stats)?.value(stats.shape()[1] as u64);
    let args = targets.put_factor(args.read(&dy)?.value(targets.slope_step()), factor.as_ref());
    kernel(op, x, &dy, team, "backward")?
        .launch(team.grid(), targets.put(args.value(config.label_smoothing))?)
}

/// Whether [`backward`] may be told to write over `x` [N, C]: where a thread that reads a packet sees no byte of another's.
pub(super) fn may_write_over(x: &Tensor) -> bool {
    let width = x.shape()[1];
    let team = Team::new(x.dtype(), x.shape()[0], width);
    !x.device().is_cuda() || team.packets == 0 || (width * x.dtype().size()).is_multiple_of(PACKET_BYTES)
}

/// `q` has its classes last.
pub(super) fn targets(
    op: &'static str,
    [x, target]: [&Tensor; 2],
    config: &CrossEntropy,
    q: &mut Tensor,
) -> Result<()> {
    let classes = q.size(-1)?;
    let targets = Targets::new(op, config.weighing(), x, target, classes)?;
    let team = Team::new(x.dtype(), targets.items(), classes);
    let (factor, kernel) = (targets.factor()?, kernel(op, x, q, team, "targets")?);
    let args = targets.put_factor(targets.args().write(q)?, factor.as_ref());
    kernel.launch(team.grid(), targets.put(args.value(config.label_smoothing))?)
}
