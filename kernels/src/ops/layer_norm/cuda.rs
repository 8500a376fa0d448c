//! Layer norm and RMS norm on a GPU: the launches of `layer_norm.cu`.

use phalanx_tensor::cuda::{Args, Grid, Scratch};
use phalanx_tensor::{DType, Result, Tensor};

use super::Residual;
use crate::cuda::type_name;
use crate::real::wide_dtype;
use crate::rows::RowSizes;
use crate::rows::cuda::{Operand, RowProgram, STANDARD, Team, row_program};

const PROGRAM: RowProgram = row_program!("layer_norm.cu", STANDARD);
/// Blocks that have sums of their own, at most: some for each of a large device's multiprocessors, whatever the device.
const BLOCKS_MAX: usize = 512;
/// Elements of a row that a thread may keep the sums of.
const SUMS_KEPT: usize = 32;

/// The macros of kernels for a branch of that dtype.
fn defines<const CENTERED: bool>(branch: &Tensor) -> [(&'static str, &'static str); 2] {
    [("CENTERED", if CENTERED { "true" } else { "false" }), ("BRANCH", type_name(branch.dtype()))]
}

/// The forward pass: the rows into `y` and their numbers, and the sum of x and the residual where there is one.
pub(super) fn forward<const CENTERED: bool>(
    op: &'static str,
    shape: RowSizes,
    x: &Tensor,
    residual: Option<Residual<'_>>,
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    [y, stats]: [&mut Tensor; 2],
) -> Result<()> {
    let gpu = x.device().gpu()?;
    let team = Team::new(x.dtype(), shape.rows, shape.width);
    let (weight, bias) = (together(weight)?, together(bias)?);
    let (residual, sum) = residual.unzip();
    let operand = Operand::of(op, x, shape.width)?;
    let residual = residual.map(|residual| Operand::of(op, residual, shape.width)).transpose()?;
    let entry = if sum.is_some() { "add_forward" } else { "forward" };
    let defines = defines::<CENTERED>(y);
    let args = operand.put(Args::new(op, gpu).write(y)?.write(stats)?)?;
    let args = match (&residual, sum) {
        (Some(residual), Some(sum)) => residual.put(args)?.write(sum)?,
        _ => args,
    };
    let args = args.read_if(weight.as_ref())?.read_if(bias.as_ref())?.value(eps);
    let args = args.value(1.0 / shape.width as f64).value(shape.rows as u64).value(shape.width as u64);
    team.kernel(op, gpu, PROGRAM, entry, &defines)?.launch(team.grid(), args)
}

/// The backward pass: the gradients that are given.
pub(super) fn backward<const CENTERED: bool>(
    op: &'static str,
    shape: RowSizes,
    [x, dy]: [&Tensor; 2],
    dsum: Option<&Tensor>,
    stats: &Tensor,
    weight: Option<&Tensor>,
    [dx, dresidual, dw, db]: [Option<&mut Tensor>; 4],
) -> Result<()> {
    let (gpu, RowSizes { rows, width, .. }) = (x.device().gpu()?, shape);
    let team = Team::keeping(x.dtype(), rows, width, SUMS_KEPT);
    let rows_a_block = rows.div_ceil(BLOCKS_MAX).max(1).next_multiple_of(team.rows_a_block());
    let blocks = rows.div_ceil(rows_a_block);
    let (weight, stats) = (together(weight)?, stats.contiguous()?);
    let operands = [Operand::of(op, x, width)?, Operand::of(op, dy, width)?];
    let dsum = dsum.map(|dsum| Operand::of(op, dsum, width)).transpose()?;
    let put = |args| operands[1].put(operands[0].put(args)?);
    let wide = if wide_dtype(x.dtype()) == DType::F64 { 8 } else { 4 };
    let summed = dw.is_some() || db.is_some();
    let parts = summed.then(|| gpu.scratch(op, blocks * 2 * width * wide)).transpose()?;
    let kept = team.packets > 0;
    let sizes = [rows_a_block as u64, rows as u64, width as u64];
    let kernel = |entry| team.kernel(op, gpu, PROGRAM, entry, &defines::<CENTERED>(dy));
    if dx.is_some() || dresidual.is_some() || kept {
        let args = Args::new(op, gpu).write_if(dx)?.write_if(dresidual)?;
        let args = put(scratch_if(args, parts.as_ref().filter(|_| kept)))?;
        let args = match &dsum {
            Some(dsum) => dsum.put(args)?,
            None => args.value([0u64; 2]),
        };
        let args = args.read_if(weight.as_ref())?.read(&stats)?.value(sizes);
        kernel("backward")?.launch(team.blocks(blocks), args)?;
    }
    let Some(parts) = parts else { return Ok(()) };
    if !kept {
        let args = put(Args::new(op, gpu).scratch(&parts))?.read(&stats)?.value(sizes);
        kernel("columns")?.launch(Grid::new(blocks, 256).by(width.div_ceil(256), 1), args)?;
    }
    let args = Args::new(op, gpu).write_if(dw)?.write_if(db)?.scratch(&parts);
    let args = args.value(blocks as u64).value(width as u64);
    kernel("sums")?.launch(Grid::new((2 * width).div_ceil(32), 256), args)
}

fn together(tensor: Option<&Tensor>) -> Result<Option<Tensor>> {
    tensor.map(Tensor::contiguous).transpose()
}

fn scratch_if<'a>(args: Args<'a>, scratch: Option<&Scratch>) -> Args<'a> {
    match scratch {
        Some(scratch) => args.scratch(scratch),
        None => args.value(0u64),
    }
}
