//! Launches of `pool.cu`.

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{Result, Tensor};

use super::{PoolOptions, Rule, Windows, image};
use crate::cuda::{File, PRELUDE, type_name};
use crate::ops::index::add_to_planes;

const FILES: &[File] = &[PRELUDE, ("pool.cu", include_str!("pool.cu"))];
const THREADS: u32 = 256;

/// A kernel's run over `out`'s elements, of which `args` are the rest of its arguments; `dtype` is the pixels'.
fn launch<'a>(
    op: &'static str,
    entry: &str,
    x: &'a Tensor,
    out: &'a mut Tensor,
    args: impl FnOnce(Args<'a>) -> Result<Args<'a>>,
) -> Result<()> {
    let (gpu, numel, largest) = (x.device().gpu()?, out.numel(), x.numel().max(out.numel()));
    let index = if largest < 1 << 31 { "u32" } else { "u64" };
    let defines = [("ELEMENT", type_name(x.dtype())), ("INDEX", index)];
    let program = Program { name: "pool.cu", files: FILES, defines: &defines };
    let args = args(Args::new(op, gpu).write(out)?.read(x)?)?.value(numel as u64);
    gpu.kernel(op, &program, entry)?.launch(Grid::over(gpu, numel, THREADS), args)
}

/// `pool.cu`'s `Windows`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Largest {
    image: i64,
    count: i64,
    kernel: i64,
    stride: i64,
    padding: i64,
    dilation: i64,
}

/// The places of the largest pixels.
pub(super) fn find(op: &'static str, x: &Tensor, options: &PoolOptions, places: &mut Tensor) -> Result<()> {
    let (size, count) = (image(op, x)?, image(op, places)?);
    let axis = |i: usize| Largest {
        image: size[i] as i64,
        count: count[i] as i64,
        kernel: options.kernel[i] as i64,
        // A single window needs no step, however large.
        stride: if count[i] > 1 { options.stride[i] as i64 } else { 1 },
        padding: options.padding[i] as i64,
        dilation: options.dilation[i] as i64,
    };
    launch(op, "largest", x, places, |args| Ok(args.value(axis(0)).value(axis(1))))
}

/// The pixels at places.
pub(super) fn pick(
    op: &'static str,
    x: &Tensor,
    places: &Tensor,
    size: [usize; 2],
    out: &mut Tensor,
) -> Result<()> {
    let outputs: usize = image(op, places)?.iter().product();
    let plane = size[0] * size[1];
    launch(op, "pick", x, out, |args| Ok(args.read(places)?.value(outputs as u64).value(plane as u64)))
}

/// Each element of `dy` added to its place.
pub(super) fn unpool(
    op: &'static str,
    dy: &Tensor,
    places: &Tensor,
    size: [usize; 2],
    out: &mut Tensor,
) -> Result<()> {
    crate::ops::creation::fill_(out, 0)?;
    if dy.numel() == 0 {
        return Ok(());
    }
    let outputs = image(op, dy)?.iter().product();
    add_to_planes(op, places, dy, [outputs, size[0] * size[1]], out)
}

/// `pool.cu`'s `Axis`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Axis {
    image: u64,
    count: u64,
    kernel: u64,
    stride: u64,
    padding: u64,
    kind: u64,
}

fn axis(windows: &Windows) -> Axis {
    let (image, count) = (windows.image as u64, windows.count as u64);
    let [kernel, stride, padding, kind] = match windows.rule {
        Rule::Fixed { kernel, stride, padding, count_padding } => {
            let stride = if count > 1 { stride } else { 1 };
            [kernel as u64, stride as u64, padding as u64, u64::from(count_padding)]
        }
        Rule::Adaptive => [0, 1, 0, 2],
    };
    Axis { image, count, kernel, stride, padding, kind }
}

/// Each window's mean.
pub(super) fn mean(
    op: &'static str,
    x: &Tensor,
    [rows, cols]: &[Windows; 2],
    out: &mut Tensor,
) -> Result<()> {
    launch(op, "mean", x, out, |args| Ok(args.value(axis(rows)).value(axis(cols))))
}

/// The transpose of [`mean`].
pub(super) fn spread(
    op: &'static str,
    dy: &Tensor,
    [rows, cols]: &[Windows; 2],
    out: &mut Tensor,
) -> Result<()> {
    if dy.numel() == 0 {
        return crate::ops::creation::fill_(out, 0);
    }
    launch(op, "spread", dy, out, |args| Ok(args.value(axis(rows)).value(axis(cols))))
}
