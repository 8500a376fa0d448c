//! The launches of `channels.cu`, and the reductions that measure channels.

use phalanx_tensor::cuda::{Args, Gpu, Grid, Kernel, Program, Scratch};
use phalanx_tensor::{DType, Dims, Result, Tensor};

use super::{Channels, KEPT};
use crate::cuda::{File, PRELUDE, type_name};
use crate::real::wide_dtype;
use crate::reduce::cuda::{Destination, Finish, Precision, fold, numbers};
use crate::reduce::{Deviation, Itself, ReduceView, Total};
use crate::rows::cuda::{ROWS, STANDARD};

const FILES: &[File] = &[PRELUDE, ROWS, STANDARD, ("channels.cu", include_str!("channels.cu"))];
/// As many blocks as keep a large device busy, whatever the device.
const BLOCKS: usize = 1024;

/// Sizes, as `channels.cu`'s `Shape`.
fn sizes(channels: &Channels) -> [u64; 3] {
    [channels.items, channels.channels, channels.places].map(|x| x as u64)
}

fn kernel(op: &'static str, gpu: &'static Gpu, [dtype, running]: [DType; 2], entry: &str) -> Result<Kernel> {
    let (element, running) = (type_name(dtype), type_name(running));
    let defines = [("ELEMENT", element), ("RUNNING", running), ("TEAM", "256"), ("PACKETS", "0")];
    gpu.kernel(op, &Program { name: "channels.cu", files: FILES, defines: &defines }, entry)
}

/// The statistics, those of the batch or given ones, and the normalised elements.
pub(super) fn forward(
    op: &'static str,
    channels: &Channels,
    x: &Tensor,
    running: Option<[&Tensor; 2]>,
    affine: [Option<&Tensor>; 2],
    eps: f64,
    [y, stats]: [&mut Tensor; 2],
) -> Result<()> {
    match running {
        Some(running) => running_stats(op, x.dtype(), running, eps, stats)?,
        None => measure(op, channels, x, eps, stats)?,
    }
    apply(op, channels, [x, stats], affine, y)
}

/// Computes each channel's statistics: [`KEPT`] numbers.
fn measure(op: &'static str, channels: &Channels, x: &Tensor, eps: f64, stats: &mut Tensor) -> Result<()> {
    let (outer, n) = (channels.channels, channels.count);
    let shape = Dims::from_slice(&[outer]);
    let reduced = (1..x.rank()).collect();
    let view = ReduceView { input: channels.transposed(x)?, outer, n, inner: 1, shape, reduced };
    let means = numbers(op, &view)?;
    let mean = Finish { text: "set(out, o, x[0] / a)", numbers: [n as f64, 0.0] };
    let with = (Total, Itself { neutral: 0.0 });
    fold(op, &view, with, Precision::Plain, None, Destination::Scratch(&means), &mean)?;
    let text = "const f64 low = x[0] / a, variance = x[1] / a - low * low; \
                set(out, 4 * o, shift); set(out, 4 * o + 1, low); \
                set(out, 4 * o + 2, 1.0 / sqrt(variance + b)); set(out, 4 * o + 3, variance)";
    let finish = Finish { text, numbers: [n as f64, eps] };
    let with = (Total, Deviation);
    fold(op, &view, with, Precision::Plain, Some(&means), Destination::Tensor(stats), &finish)
}

/// Stores running statistics in the form of a batch's own.
fn running_stats(
    op: &'static str,
    dtype: DType,
    running: [&Tensor; 2],
    eps: f64,
    stats: &mut Tensor,
) -> Result<()> {
    let gpu = stats.device().gpu()?;
    let channels = stats.numel() / KEPT;
    // One type for both.
    let same = running[0].dtype() == running[1].dtype();
    let var = if same {
        running[1].contiguous()?
    } else {
        crate::ops::cast(running[1], running[0].dtype())?.contiguous()?
    };
    let mean = running[0].contiguous()?;
    let args = Args::new(op, gpu).write(stats)?.read(&mean)?.read(&var)?.value(eps).value(channels as u64);
    let grid = Grid::new(channels.div_ceil(256), 256);
    kernel(op, gpu, [dtype, mean.dtype()], "given")?.launch(grid, args)
}

/// `y = (x - mean) scale + shift`.
fn apply(
    op: &'static str,
    channels: &Channels,
    [x, stats]: [&Tensor; 2],
    [weight, bias]: [Option<&Tensor>; 2],
    y: &mut Tensor,
) -> Result<()> {
    let (gpu, x) = (x.device().gpu()?, together(op, x)?);
    let [weight, bias] = [contiguous(weight)?, contiguous(bias)?];
    let (grid, dtype) = (packets(gpu, y), y.dtype());
    let args = x.put(Args::new(op, gpu).write(y)?)?.read(stats)?;
    let args = args.read_if(weight.as_ref())?.read_if(bias.as_ref())?.value(sizes(channels));
    kernel(op, gpu, [dtype; 2], "apply")?.launch(grid, args)
}

/// Moves a running statistic: the mean (0) or the variance (1).
pub(super) fn update(
    op: &'static str,
    (running, moved): (&Tensor, &mut Tensor),
    stats: &Tensor,
    which: usize,
    [momentum, unbiased]: [f64; 2],
) -> Result<()> {
    let (gpu, running, stats) = (running.device().gpu()?, running.contiguous()?, stats.contiguous()?);
    let channels = running.numel();
    let args = Args::new(op, gpu).write(moved)?.read(&running)?.read(&stats)?.value(which as u64);
    let args = args.value([momentum, unbiased]).value(channels as u64);
    // Statistics are f64 or f32, as they are of elements of their own dtype.
    let dtypes = [stats.dtype(), running.dtype()];
    kernel(op, gpu, dtypes, "update")?.launch(Grid::new(channels.div_ceil(256), 256), args)
}

/// Each channel's sums of `dy` and `dy xhat`, and, of them, the gradients of bias and weight.
pub(super) fn backward(
    op: &'static str,
    channels: &Channels,
    [x, dy, stats]: [&Tensor; 3],
    weight: Option<&Tensor>,
    training: bool,
    [dx, dw, db]: [Option<&mut Tensor>; 3],
) -> Result<()> {
    let gpu = x.device().gpu()?;
    let (dtype, len) = (x.dtype(), 16 / x.dtype().size());
    let (x, dy) = (together(op, x)?, together(op, dy)?);
    let (stats, weight) = (stats.contiguous()?, contiguous(weight)?);
    let parts = (BLOCKS / channels.channels.max(1)).clamp(1, channels.count.div_ceil(2048).max(1));
    let part_len = channels.count.div_ceil(parts).max(1).next_multiple_of(len);
    let own = Sums { op, kept: KEPT, groups: 0, part_len, parts: channels.count.div_ceil(part_len).max(1) };
    let parts = own.parts(channels, dtype, [&x, &dy], &stats)?;
    let sums = own.join(channels, dtype, &parts, [dw, db])?;
    let Some(dx) = dx else { return Ok(()) };
    let grid = packets(gpu, dx);
    let args = dy.put(x.put(Args::new(op, gpu).write(dx)?)?)?.read(&stats)?.scratch(&sums);
    let n = if training { channels.count as f64 } else { 0.0 };
    let args = args.read_if(weight.as_ref())?.value(n).value(sizes(channels));
    kernel(op, gpu, [dtype; 2], "input_gradient")?.launch(grid, args)
}

/// How the sums of a channel are computed: in parts, then joined.
pub(in crate::ops) struct Sums {
    pub(in crate::ops) op: &'static str,
    /// Numbers kept by the forward pass: of a channel, or of a group of an item.
    pub(in crate::ops) kept: usize,
    /// Groups of an item; 0 if a channel has its own statistics.
    pub(in crate::ops) groups: usize,
    /// Elements of a part, and how many parts there are.
    pub(in crate::ops) part_len: usize,
    pub(in crate::ops) parts: usize,
}

impl Sums {
    /// Each part's: `[channel][sum][part]`, in f64.
    pub(in crate::ops) fn parts(
        &self,
        channels: &Channels,
        dtype: DType,
        [x, dy]: [&Together<'_>; 2],
        stats: &Tensor,
    ) -> Result<Scratch> {
        let gpu = stats.device().gpu()?;
        let sums = gpu.scratch(self.op, channels.channels * 2 * self.parts * size_of::<f64>())?;
        let args = dy.put(x.put(Args::new(self.op, gpu).scratch(&sums))?)?.read(stats)?;
        let numbers = [self.kept, self.groups, self.part_len, self.parts].map(|x| x as u64);
        let threads = if self.part_len <= 256 { 32 } else { 256 };
        let grid = Grid::new(channels.channels * self.parts, threads);
        let kernel = kernel(self.op, gpu, [dtype; 2], "sums")?;
        kernel.launch(grid, args.value(numbers).value(sizes(channels)))?;
        Ok(sums)
    }

    /// All parts': `[channel][sum]`, in the type that is computed in; and rounded, as gradients.
    pub(in crate::ops) fn join(
        &self,
        channels: &Channels,
        dtype: DType,
        parts: &Scratch,
        [dw, db]: [Option<&mut Tensor>; 2],
    ) -> Result<Scratch> {
        let gpu = channels.device.gpu()?;
        let sums = gpu.scratch(self.op, channels.channels * 2 * wide_dtype(dtype).size())?;
        let args = Args::new(self.op, gpu).scratch(&sums).write_if(dw)?.write_if(db)?.scratch(parts);
        let args = args.value(self.parts as u64).value(channels.channels as u64);
        let grid = Grid::new(channels.channels.div_ceil(4), 128);
        kernel(self.op, gpu, [dtype; 2], "join")?.launch(grid, args)?;
        Ok(sums)
    }
}

/// A tensor's elements in row-major order: in place, or gathered.
pub(in crate::ops) enum Together<'a> {
    Lying(&'a Tensor),
    Gathered(Scratch),
}

pub(in crate::ops) fn together<'a>(op: &'static str, x: &'a Tensor) -> Result<Together<'a>> {
    Ok(if x.is_contiguous() { Together::Lying(x) } else { Together::Gathered(Scratch::of(op, x)?) })
}

impl Together<'_> {
    fn put<'b>(&'b self, args: Args<'b>) -> Result<Args<'b>> {
        match self {
            Together::Lying(x) => args.read(x),
            Together::Gathered(scratch) => Ok(args.scratch(scratch)),
        }
    }
}

fn contiguous(x: Option<&Tensor>) -> Result<Option<Tensor>> {
    x.map(Tensor::contiguous).transpose()
}

/// A thread a packet.
fn packets(gpu: &Gpu, x: &Tensor) -> Grid {
    Grid::over(gpu, (x.numel() * x.dtype().size()).div_ceil(16), 256)
}
