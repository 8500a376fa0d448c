//! The launches of `nll_loss.cu`.

use phalanx_tensor::cuda::{Kernel, Program};
use phalanx_tensor::{Result, Tensor};

use crate::classes::Weighing;
use crate::classes::cuda::{CLASSES, Targets};
use crate::cuda::{FAULT, File, PRELUDE, type_name};
use crate::rows::cuda::Operand;

const FILES: &[File] = &[PRELUDE, FAULT, CLASSES, ("nll_loss.cu", include_str!("nll_loss.cu"))];

fn kernel(op: &'static str, x: &Tensor, entry: &str) -> Result<Kernel> {
    let defines = [("ELEMENT", type_name(x.dtype()))];
    x.device().gpu()?.kernel(op, &Program { name: "nll_loss.cu", files: FILES, defines: &defines }, entry)
}

/// `x` has its classes last.
pub(super) fn forward(
    op: &'static str,
    [x, target]: [&Tensor; 2],
    weighing: Weighing<'_>,
    loss: &mut Tensor,
) -> Result<()> {
    let classes = x.size(-1)?;
    let targets = Targets::new(op, weighing, x, target, classes)?;
    let (losses, operand) = (targets.losses()?, Operand::of(op, x, classes)?);
    let args = targets.put(operand.put(targets.args().scratch(&losses))?)?;
    kernel(op, x, "forward")?.launch(targets.grid(), args)?;
    targets.reduce(&losses, loss)
}

/// `dx` has its classes last, and holds zeros.
pub(super) fn backward(
    op: &'static str,
    [target, dy]: [&Tensor; 2],
    weighing: Weighing<'_>,
    dx: &mut Tensor,
) -> Result<()> {
    let classes = dx.size(-1)?;
    let targets = Targets::new(op, weighing, dx, target, classes)?;
    let (factor, dy, kernel) = (targets.factor()?, dy.contiguous()?, kernel(op, dx, "backward")?);
    let args = targets.args().write(dx)?.read(&dy)?.value(targets.slope_step());
    kernel.launch(targets.grid(), targets.put(targets.put_factor(args, factor.as_ref()))?)
}
