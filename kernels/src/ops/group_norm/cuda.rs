//! The launches of `group_norm.cu`.

use phalanx_tensor::cuda::Args;
use phalanx_tensor::{Result, Tensor};

use super::Groups;
use crate::ops::batch_norm::cuda::{Sums, together};
use crate::rows::cuda::{Operand, RowProgram, STANDARD, Team, row_program};

const PROGRAM: RowProgram = row_program!("group_norm.cu", STANDARD);

impl Groups {
    fn sizes(&self) -> [u64; 4] {
        [self.groups, self.channels, self.places, self.shape.rows].map(|x| x as u64)
    }
}

pub(super) fn forward(
    op: &'static str,
    groups: &Groups,
    x: &Tensor,
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    [y, stats]: [&mut Tensor; 2],
) -> Result<()> {
    let (gpu, shape) = (x.device().gpu()?, groups.shape);
    let team = Team::new(x.dtype(), shape.rows, shape.width);
    let (weight, bias) = (contiguous(weight)?, contiguous(bias)?);
    let operand = Operand::of(op, x, shape.width)?;
    let args = operand.put(Args::new(op, gpu).write(y)?.write(stats)?)?;
    let args = args.read_if(weight.as_ref())?.read_if(bias.as_ref())?;
    let args = args.value([eps, 1.0 / shape.width as f64]).value(groups.sizes());
    team.kernel(op, gpu, PROGRAM, "forward", None)?.launch(team.grid(), args)
}

pub(super) fn backward(
    op: &'static str,
    groups: &Groups,
    [x, dy, stats]: [&Tensor; 3],
    weight: Option<&Tensor>,
    [dx, dw, db]: [Option<&mut Tensor>; 3],
) -> Result<()> {
    let (gpu, shape) = (x.device().gpu()?, groups.shape);
    let (stats, weight, channels) = (stats.contiguous()?, contiguous(weight)?, groups.as_channels(x));
    let own = Sums { op, kept: 3, groups: groups.groups, part_len: groups.places, parts: channels.items };
    let parts = own.parts(&channels, x.dtype(), [&together(op, x)?, &together(op, dy)?], &stats)?;
    if dw.is_some() || db.is_some() {
        own.join(&channels, x.dtype(), &parts, [dw, db])?;
    }
    let Some(dx) = dx else { return Ok(()) };
    let team = Team::new(x.dtype(), shape.rows, shape.width);
    let operands = [Operand::of(op, x, shape.width)?, Operand::of(op, dy, shape.width)?];
    let args = operands[1].put(operands[0].put(Args::new(op, gpu).write(dx)?)?)?;
    let args = args.read(&stats)?.scratch(&parts).read_if(weight.as_ref())?.value(groups.sizes());
    team.kernel(op, gpu, PROGRAM, "backward", None)?.launch(team.grid(), args)
}

fn contiguous(x: Option<&Tensor>) -> Result<Option<Tensor>> {
    x.map(Tensor::contiguous).transpose()
}
