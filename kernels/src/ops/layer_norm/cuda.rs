//! The launches of `layer_norm.cu`.

use phalanx_tensor::cuda::{Args, Grid, Scratch};
use phalanx_tensor::{DType, Result, Tensor};

use crate::rows::Shape;
use crate::rows::cuda::{Operand, RowProgram, STANDARD, Team, row_program};
use crate::wide::wide_dtype;

use super::Residual;

const PROGRAM: RowProgram = row_program!("layer_norm.cu", STANDARD);
/// Blocks that have sums of their own, at most: some for each of a large device's multiprocessors, whatever the device.
const BLOCKS_MAX: usize = 512;
/// Elements of a row that a thread may keep the sums of.
const SUMS_KEPT: usize = 32;

fn centered<const CENTERED: bool>() -> Option<(&'static str, &'static str)> {
    Some(("CENTERED", if CENTERED { "true" } else { "false" }))
}

pub(super) fn forward<const CENTERED: bool>(
    op: &'static str,
    shape: Shape,
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
    let args = operand.put(Args::new(op, gpu).write(y)?.write(stats)?)?;
    let args = match (&residual, sum) {
        (Some(residual), Some(sum)) => residual.put(args)?.write(sum)?,
        _ => args,
    };
    let args = args.read_if(weight.as_ref())?.read_if(bias.as_ref())?.value(eps);
    let args = args.value(1.0 / shape.width as f64).value(shape.rows as u64).value(shape.width as u64);
    team.kernel(op, gpu, PROGRAM, entry, centered::<CENTERED>())?.launch(team.grid(), args)
}

pub(super) fn backward<const CENTERED: bool>(
    op: &'static str,
    shape: Shape,
    [x, dy]: [&Tensor; 2],
    dsum: Option<&Tensor>,
    stats: &Tensor,
    weight: Option<&Tensor>,
    [dx, dw, db]: [Option<&mut Tensor>; 3],
) -> Result<()> {
    let (gpu, Shape { rows, width, .. }) = (x.device().gpu()?, shape);
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
    let kernel = |entry| team.kernel(op, gpu, PROGRAM, entry, centered::<CENTERED>());
    if dx.is_some() || kept {
        let args = put(scratch_if(Args::new(op, gpu).write_if(dx)?, parts.as_ref().filter(|_| kept)))?;
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
