//! Launches of `pick.cu`.

use phalanx_tensor::cuda::{Args, Gpu, Grid, Program};
use phalanx_tensor::{Dims, Error, Result, Tensor};

use crate::cuda::{FAULT, File, LAYOUT, PRELUDE, Strided};

const FILES: &[File] = &[PRELUDE, LAYOUT, FAULT, ("pick.cu", include_str!("pick.cu"))];
const PROGRAM: Program<'static> = Program { name: "pick.cu", files: FILES, defines: &[] };

const THREADS: u32 = 256;

/// The rows of `x` along `dim` that the index (i64, contiguous) names, into the contiguous `out`; `x` is contiguous.
pub(in crate::ops::index) fn rows(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    index: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let gpu = x.device().gpu()?;
    let size = x.dtype().size();
    let (outer, row): (usize, usize) =
        (x.shape()[..dim].iter().product(), x.shape()[dim + 1..].iter().product());
    let (count, bytes) = (index.numel(), row * size);
    if out.numel() == 0 {
        return Ok(());
    }
    let places = bytes | (x.offset() * size) | (out.offset() * size);
    let width = 1 << places.trailing_zeros().min(4);
    let entry = match width {
        1 => "rows_1",
        2 => "rows_2",
        4 => "rows_4",
        8 => "rows_8",
        _ => "rows_16",
    };
    let inner = bytes / width;
    let (log_lanes, grid) = lanes(outer * count, inner);
    let args = Args::new(op, gpu).write(out)?.read(x)?.read(index)?;
    let args = args.value(outer as u64).value(count as u64).value(x.shape()[dim] as u64);
    let args = args.value(inner as u64).value(log_lanes).faults()?;
    gpu.kernel(op, &PROGRAM, entry)?.launch(grid, args)
}

/// How rows of `inner` things are shared out: the logarithm of the lanes that take a row, and the grid. Long rows are cut
/// into pieces of 8 things a lane along y.
pub(super) fn lanes(rows: usize, inner: usize) -> (u32, Grid) {
    let lanes = match inner {
        0..32 => inner.next_power_of_two(),
        32..1024 => 32,
        _ => THREADS as usize,
    };
    let pieces = inner.div_ceil(8 * lanes).min(usize::from(u16::MAX));
    let grid = Grid::new((rows * lanes).div_ceil(THREADS as usize), THREADS).by(pieces, 1);
    (lanes.trailing_zeros(), grid)
}

/// `out[.., i, ..] = x[.., index[.., i, ..], ..]` along `dim`; index (i64) and `out` are contiguous.
pub(in crate::ops::index) fn elements(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    index: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let gpu: &Gpu = x.device().gpu()?;
    let numel = out.numel();
    if numel == 0 {
        return Ok(());
    }
    let (line, along, size) = line(op, x, dim, index.shape())?;
    let layout = Strided::new(op, index.shape(), [&line])?;
    let entry = match x.dtype().size() {
        1 => "elements_1",
        2 => "elements_2",
        4 => "elements_4",
        _ => "elements_8",
    };
    let args = Args::new(op, x.device().gpu()?).write(out)?.read(x)?.read(index)?.value(layout);
    let args = args.value(along as u64).value(size as u64).value(numel as u64).faults()?;
    x.device().gpu()?.kernel(op, &PROGRAM, entry)?.launch(Grid::over(gpu, numel, THREADS), args)
}

/// What an index of this shape picks from, where every index is 0: of size 1 along `dim`; with the stride and the size
/// that `x` has there.
pub(super) fn line(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    index: &[usize],
) -> Result<(Tensor, usize, usize)> {
    let Some((&size, &along)) = x.shape().get(dim).zip(x.strides().get(dim)) else {
        return Ok((x.clone(), 0, 1));
    };
    if size == 0 {
        return Err(Error::range(op, "an index", "none into a dimension of size 0"));
    }
    let sizes: Dims = index.iter().enumerate().map(|(d, &n)| if d == dim { 1 } else { n }).collect();
    let line = sizes.iter().enumerate().try_fold(x.clone(), |line, (d, &n)| line.narrow(d, 0, n))?;
    Ok((line, along, size))
}
