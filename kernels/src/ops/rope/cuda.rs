//! Launches of `rope.cu`.

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{Result, Tensor};

use super::Rope;
use crate::cuda::{File, LAYOUT, PRELUDE, Strided, type_name};

const FILES: &[File] = &[PRELUDE, LAYOUT, ("rope.cu", include_str!("rope.cu"))];
const THREADS: u32 = 128;
/// Heads that a thread rotates, as in `rope.cu`.
const HEADS: usize = 16;

/// The rotation of `x` into the contiguous `y`, which has elements; positions as [`super::rope`] takes them.
pub(super) fn rotate(
    op: &'static str,
    x: &Tensor,
    ids: Option<&Tensor>,
    config: &Rope,
    sense: f64,
    y: &mut Tensor,
) -> Result<()> {
    let gpu = x.device().gpu()?;
    let (last, half) = (x.rank() - 1, x.size(-1)? / 2);
    let positions = x.size(-2)?;
    let ids = ids.map(Tensor::contiguous).transpose()?;
    let batches = ids.as_ref().map_or(1, |ids| ids.numel() / positions);
    let heads = x.numel() / (2 * half * positions * batches);
    let rows = x.select(last, 0)?;
    let step = x.strides()[last];
    // Pairs lie together and begin at multiples of two, in every row.
    let even = |stride: &usize| stride.is_multiple_of(2);
    let pairs = half.is_multiple_of(2)
        && [x.offset(), y.offset()].iter().all(even)
        && (step != 1 || rows.strides().iter().all(even));
    let (entry, lanes) = if pairs { ("rotate_2", 2) } else { ("rotate_1", 1) };
    let defines = [("ELEMENT", type_name(x.dtype()))];
    let program = Program { name: "rope.cu", files: FILES, defines: &defines };
    let blocks = (positions * (half / lanes)).div_ceil(THREADS as usize);
    let most = usize::from(u16::MAX);
    let grid = Grid::new(blocks, THREADS).by(heads.div_ceil(HEADS).min(most), batches.min(most));
    let layout = Strided::new(op, rows.shape(), [&rows])?;
    let args = Args::new(op, gpu).write(y)?.read(x)?.read_if(ids.as_ref())?.value(layout);
    let args = args.value(step as u64).value(batches as u64).value(heads as u64).value(positions as u64);
    let args = args.value(half as u64).value(config.offset).value(config.base).value(sense);
    gpu.kernel(op, &program, entry)?.launch(grid, args)
}
