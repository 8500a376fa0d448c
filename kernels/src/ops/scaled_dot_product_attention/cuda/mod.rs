//! Attention on a GPU: the launches of its kernels.
//!
//! ```text
//! Launcher       what the launches of a call share: operands, mask, variant      view      strided tensors as kernel arguments
//! variant        the macros that kernels are compiled with; sizes of blocks
//! forward.cu     backward_keys.cu     backward_queries.cu                        by products of warps, over tile.cuh
//! warpgroup_forward.cu                                                           by those of warpgroups, over warpgroup_tile.cuh too
//!                scores.cuh: the running softmax of both forward passes
//! general.cu     the same by multiply-adds, for f32, f64 and deep heads
//! sums.cu        delta = sum(dy out) of each query      keep.cu      the factors of dropout     first_keys.cu   checks first keys
//! ```

mod variant;
mod view;

use phalanx_tensor::cuda::{Args, Gpu, Grid, Program, Scratch, Traffic};
use phalanx_tensor::{DType, Error, Result, Tensor};

use super::Problem;
use super::dropout::Keep;
use crate::cuda::{FAULT, File, HOPPER, PRELUDE};
use crate::real::wide_dtype;
use variant::{BlockSize, Variant};

pub(super) use variant::DEPTH_MAX;
use view::{StridedView, four};

const PROBLEM: File = ("problem.cuh", include_str!("problem.cuh"));
const TILE: File = ("tile.cuh", include_str!("tile.cuh"));
const SCORES: File = ("scores.cuh", include_str!("scores.cuh"));
const FORWARD: &[File] = &[PRELUDE, PROBLEM, TILE, SCORES, ("forward.cu", include_str!("forward.cu"))];
const KEY_ROWS: File = ("key_rows.cuh", include_str!("key_rows.cuh"));
const KEYS: &[File] =
    &[PRELUDE, PROBLEM, TILE, KEY_ROWS, ("backward_keys.cu", include_str!("backward_keys.cu"))];
const QUERY_ROWS: File = ("query_rows.cuh", include_str!("query_rows.cuh"));
const QUERIES: &[File] =
    &[PRELUDE, PROBLEM, TILE, QUERY_ROWS, ("backward_queries.cu", include_str!("backward_queries.cu"))];
const GENERAL: &[File] = &[PRELUDE, PROBLEM, ("general.cu", include_str!("general.cu"))];
const SUMS: &[File] = &[PRELUDE, PROBLEM, ("sums.cu", include_str!("sums.cu"))];
const KEEP: &[File] = &[PRELUDE, PROBLEM, ("keep.cu", include_str!("keep.cu"))];
const WARPGROUP_TILE: File = ("warpgroup_tile.cuh", include_str!("warpgroup_tile.cuh"));
const WARPGROUP_FORWARD: &[File] =
    &warpgroups(SCORES, ("warpgroup_forward.cu", include_str!("warpgroup_forward.cu")));
const WARPGROUP_KEYS: &[File] =
    &warpgroups(KEY_ROWS, ("warpgroup_keys.cu", include_str!("warpgroup_keys.cu")));
const WARPGROUP_QUERIES: &[File] =
    &warpgroups(QUERY_ROWS, ("warpgroup_queries.cu", include_str!("warpgroup_queries.cu")));
const FIRST_KEYS: &[File] = &[PRELUDE, FAULT, PROBLEM, ("first_keys.cu", include_str!("first_keys.cu"))];

/// The files of a program for warpgroups: what it shares with the one for warps, and the kernel.
const fn warpgroups(rows: File, kernel: File) -> [File; 7] {
    [PRELUDE, HOPPER, PROBLEM, TILE, rows, WARPGROUP_TILE, kernel]
}

/// Sets the output and each query's maximum and inverse sum.
pub(super) fn forward(
    op: &'static str,
    problem: &Problem,
    inputs: [&Tensor; 3],
    mask: Option<&Tensor>,
    keep: Option<&Keep>,
    [out, stats]: [&mut Tensor; 2],
) -> Result<()> {
    let call = Launcher::new(op, problem, &inputs, mask, keep, false)?;
    call.check_first_keys()?;
    let block = call.variant.forward();
    let [query, key, value] = &call.views[..] else { return Ok(()) };
    let [q, k, v] = [query, key, value].map(|view| call.operand(view));
    let args = call.args(
        [q, k, v, KernelOperand::Write(out)],
        StatsArgs { stats: KernelOperand::Write(stats), ..StatsArgs::default() },
    )?;
    let args = call.boxes(args, [(query, 128), (key, 128), (value, 128)])?;
    let args = call.computing(args, problem.depth + problem.value_depth);
    let files = call.variant.either((FORWARD, "forward.cu"), (WARPGROUP_FORWARD, "warpgroup_forward.cu"));
    call.launch(files, "attention_forward", block, (problem.heads, problem.queries), args)
}

/// The gradients of query, key, value and scores that are wanted. Inputs are query, key, value, output and its gradient.
pub(super) fn backward(
    op: &'static str,
    problem: &Problem,
    inputs: [&Tensor; 5],
    stats: &Tensor,
    (mask, keep): (Option<&Tensor>, Option<&Keep>),
    [dquery, dkey, dvalue, slopes]: &mut [Option<Tensor>; 4],
) -> Result<()> {
    let call = Launcher::new(op, problem, &inputs, mask, keep, slopes.is_some())?;
    let stats = stats.contiguous()?;
    let rows = problem.heads * problem.queries;
    let sums = call.gpu.scratch(op, 2 * rows * wide_dtype(inputs[0].dtype()).size())?;
    let [query, key, value, out, dy] = &call.views[..] else { return Ok(()) };
    let numbers = |slopes| StatsArgs { stats: KernelOperand::Whole(&stats), sums: Some(&sums), slopes };
    if rows > 0 {
        let read = [query, key, value, out, dy].map(KernelOperand::Read);
        let args = call.args(read, numbers(KernelOperand::None))?;
        let args = [query, key, value].into_iter().fold(args, |args, view| view.unread(args));
        let block = BlockSize { rows: 32, threads: 256, bytes: 0 };
        call.launch((SUMS, "sums.cu"), "attention_sums", block, (1, rows), args)?;
    }
    if dkey.is_some() || dvalue.is_some() {
        let [q, k, v, g] = [query, key, value, dy].map(|view| call.operand(view));
        let slots = [
            q,
            k,
            v,
            KernelOperand::None,
            g,
            KernelOperand::None,
            KernelOperand::write_if(dkey),
            KernelOperand::write_if(dvalue),
        ];
        // Scores and their gradients once more, then dk = ds' q and dv = p' dy.
        let args = call.args(slots, numbers(KernelOperand::None))?;
        let args = call.boxes(args, [(query, 64), (key, 128), (value, 128), (dy, 64)])?;
        let args = call.computing(args, 2 * (problem.depth + problem.value_depth));
        let (made, block) = ((problem.heads / problem.group, problem.keys), call.variant.keys());
        let files = call.variant.either((KEYS, "backward_keys.cu"), (WARPGROUP_KEYS, "warpgroup_keys.cu"));
        call.launch(files, "attention_backward_keys", block, made, args)?;
    }
    if dquery.is_some() || slopes.is_some() {
        let [q, k, v, g] = [query, key, value, dy].map(|view| call.operand(view));
        let slots = [q, k, v, KernelOperand::None, g, KernelOperand::write_if(dquery)];
        // Scores and their gradients once more, then dq = ds k.
        let args = call.args(slots, numbers(KernelOperand::write_if(slopes)))?;
        let args = call.boxes(args, [(query, 128), (key, 64), (value, 64), (dy, 128)])?;
        let args = call.computing(args, 2 * problem.depth + problem.value_depth);
        let (made, block) = ((problem.heads, problem.queries), call.variant.queries());
        let files = call
            .variant
            .either((QUERIES, "backward_queries.cu"), (WARPGROUP_QUERIES, "warpgroup_queries.cu"));
        call.launch(files, "attention_backward_queries", block, made, args)?;
    }
    Ok(())
}

/// Sets `out` to the factors that dropout multiplies probabilities with.
pub(super) fn keep(
    op: &'static str,
    query: &Tensor,
    keys: usize,
    keep: &Keep,
    out: &mut Tensor,
) -> Result<()> {
    let shape = query.shape();
    let heads = shape[..shape.len() - 2].iter().product();
    let queries = query.size(-2)?;
    let problem =
        Problem { heads, group: 1, queries, keys, depth: 0, value_depth: 0, causal: false, scale: 1.0 };
    let call = Launcher::new(op, &problem, &[query], None, Some(keep), false)?;
    let slots = [KernelOperand::None, KernelOperand::None, KernelOperand::None, KernelOperand::Write(out)];
    let args = call.args(slots, StatsArgs::default())?;
    let block = BlockSize { rows: 256, threads: 256, bytes: 0 };
    let words = heads * queries * keys.div_ceil(32);
    call.launch((KEEP, "keep.cu"), "attention_keep", block, (usize::from(words > 0), words), args)
}

/// An operand of a kernel: its pointer and its strides.
#[derive(Default)]
enum KernelOperand<'a> {
    #[default]
    None,
    Read(&'a StridedView),
    /// A tensor whose dimensions before the heads are contiguous, as those of all results are.
    Whole(&'a Tensor),
    /// The same, to write.
    Write(&'a mut Tensor),
}

impl<'a> KernelOperand<'a> {
    fn write_if(tensor: &'a mut Option<Tensor>) -> KernelOperand<'a> {
        tensor.as_mut().map_or(KernelOperand::None, KernelOperand::Write)
    }

    /// Adds the pointer, and the strides of batch, head and row, to the arguments.
    fn operand(self, args: Args<'a>) -> Result<Args<'a>> {
        let strides = match &self {
            KernelOperand::None => [0; 3],
            KernelOperand::Read(view) => view.strides(),
            KernelOperand::Whole(tensor) => strides_of(tensor)?,
            KernelOperand::Write(tensor) => strides_of(tensor)?,
        };
        Ok(self.pointer(args)?.value(strides))
    }

    fn pointer(self, args: Args<'a>) -> Result<Args<'a>> {
        match self {
            KernelOperand::None => Ok(args.value(0u64)),
            KernelOperand::Read(view) => view.pointer(args),
            KernelOperand::Whole(tensor) => args.read(tensor),
            KernelOperand::Write(tensor) => args.write(tensor),
        }
    }
}

/// The strides of batch, head and row of a result.
fn strides_of(tensor: &Tensor) -> Result<[u64; 3]> {
    let strides = four(tensor.shape(), tensor.strides());
    let got = || format!("a result of shape {:?} with strides {:?}", tensor.shape(), tensor.strides());
    let [batch, head, row, _] = strides
        .ok_or_else(|| Error::shape("attention", got(), "dimensions before the heads that lie together"))?;
    Ok([batch, head, row].map(|n| n as u64))
}

/// The statistics of each query, and the scores' gradient.
#[derive(Default)]
struct StatsArgs<'a> {
    stats: KernelOperand<'a>,
    sums: Option<&'a Scratch>,
    slopes: KernelOperand<'a>,
}

/// What the launches of one call have in common.
struct Launcher<'c> {
    op: &'static str,
    gpu: &'static Gpu,
    problem: &'c Problem,
    keep: Option<&'c Keep>,
    views: Vec<StridedView>,
    mask: Option<StridedView>,
    variant: Variant,
    /// Query heads of each batch item.
    heads: usize,
}

impl<'c> Launcher<'c> {
    fn new(
        op: &'static str,
        problem: &'c Problem,
        inputs: &[&Tensor],
        mask: Option<&Tensor>,
        keep: Option<&'c Keep>,
        slopes: bool,
    ) -> Result<Launcher<'c>> {
        let query = inputs[0];
        let gpu = query.device().gpu()?;
        let depth = problem.deepest();
        if depth > DEPTH_MAX {
            let wanted = format!("depths of at most {DEPTH_MAX} on a GPU");
            return Err(Error::shape(op, format!("a depth of {depth}"), wanted));
        }
        let scores = problem.scores_shape(query);
        let mut variant = Variant {
            dtype: query.dtype(),
            depth,
            mask: mask.map_or(0, |mask| match mask.dtype() {
                DType::Bool => 1,
                DType::I64 => 3,
                _ => 2,
            }),
            dropout: keep.is_some(),
            slopes,
            packets: true,
            warpgroups: false,
        };
        let sizes = [problem.queries, problem.keys, problem.depth, problem.value_depth];
        variant.warpgroups = gpu.capability().0 == 9 && variant.goes_with_warpgroups(sizes);
        let view = |tensor: &&Tensor| match variant.warpgroups {
            true => StridedView::of_boxes(op, tensor),
            false => StridedView::operand(op, tensor),
        };
        let views: Vec<StridedView> = inputs.iter().map(view).collect::<Result<_>>()?;
        variant.packets = views.iter().all(StridedView::is_packed);
        Ok(Launcher {
            op,
            gpu,
            problem,
            keep,
            views,
            mask: mask.map(|mask| StridedView::mask(op, mask, &scores)).transpose()?,
            variant,
            heads: if query.rank() > 2 { query.size(-3)? } else { 1 },
        })
    }

    /// The kernels' argument `Problem` (`problem.cuh`), field by field.
    fn args<'a, const N: usize>(
        &'a self,
        operands: [KernelOperand<'a>; N],
        numbers: StatsArgs<'a>,
    ) -> Result<Args<'a>> {
        let p = self.problem;
        let mut args = Args::new(self.op, self.gpu);
        for slot in operands.into_iter().chain(std::iter::repeat_with(KernelOperand::default)).take(8) {
            args = slot.operand(args)?;
        }
        args = match &self.mask {
            Some(mask) => mask.pointer(args)?.value(mask.strides::<4>()),
            None => args.value([0u64; 5]),
        };
        args = numbers.stats.pointer(args)?;
        args = match numbers.sums {
            Some(sums) => args.scratch(sums),
            None => args.value(0u64),
        };
        args = numbers.slopes.pointer(args)?;
        args = match self.keep {
            Some(keep) => {
                let first = keep.dropout.batch_offset * keep.all + keep.first;
                args.value([keep.threshold, first, keep.all]).draws(keep.dropout.stream)
            }
            None => args.value([0u64; 7]),
        };
        let batches = p.heads.checked_div(self.heads).unwrap_or(0);
        let sizes = [batches, self.heads, p.group, p.queries, p.keys, p.depth, p.value_depth];
        let mut counts = [i32::from(p.causal); 8];
        for (count, size) in counts.iter_mut().zip(sizes) {
            let wrong = |_| Error::range(self.op, format!("a size of {size}"), "sizes below 2^31");
            *count = i32::try_from(size).map_err(wrong)?;
        }
        Ok(args.value([p.scale, self.keep.map_or(1.0, |keep| keep.scale)]).value(counts))
    }

    /// What a kernel reads by a pointer, unless it does so by a map.
    fn operand<'a>(&self, view: &'a StridedView) -> KernelOperand<'a> {
        self.variant.either(KernelOperand::Read(view), KernelOperand::None)
    }

    /// Kernels of warpgroups have further arguments: the maps of what they read, in boxes of so many rows.
    fn boxes<'a, const N: usize>(
        &self,
        args: Args<'a>,
        operands: [(&'a StridedView, usize); N],
    ) -> Result<Args<'a>> {
        match self.variant.warpgroups {
            true => operands.into_iter().try_fold(args, |args, (view, rows)| view.boxes(args, rows)),
            false => Ok(args),
        }
    }

    /// The kernel does so many multiplications and additions for each score that the causal mask does not hide.
    fn computing<'a>(&self, args: Args<'a>, each: usize) -> Args<'a> {
        let flops = 2 * (self.problem.heads * self.problem.scores_seen() * each) as u64;
        args.with_traffic(|t| Traffic { flops, ..t })
    }

    /// Launches the check of first visible keys, which reports wrong ones as a fault of the device.
    fn check_first_keys(&self) -> Result<()> {
        let (heads, rows) = (self.problem.heads, self.problem.queries);
        if self.variant.mask != 3 || heads * rows == 0 {
            return Ok(());
        }
        let args = self.args([], StatsArgs::default())?.faults()?;
        let block = BlockSize { rows: 256, threads: 256, bytes: 0 };
        self.launch((FIRST_KEYS, "first_keys.cu"), "attention_first_keys", block, (heads, rows), args)
    }

    /// Launches a kernel for so many heads of so many rows.
    fn launch(
        &self,
        (files, name): (&'static [File], &str),
        entry: &str,
        block: BlockSize,
        (heads, rows): (usize, usize),
        args: Args<'_>,
    ) -> Result<()> {
        let general = block.bytes > 0 && !self.variant.on_tensor_cores();
        let (files, name) = if general { (GENERAL, "general.cu") } else { (files, name) };
        let defines = self.variant.defines(block);
        let defines = defines.each_ref().map(|(name, value)| (*name, value.as_str()));
        let program = Program { name, files, defines: &defines };
        let blocks = heads * rows.div_ceil(block.rows);
        if blocks > i32::MAX as usize {
            return Err(Error::range(self.op, format!("{blocks} blocks"), "below 2^31"));
        }
        let grid = Grid::new(blocks, block.threads).shared(block.bytes);
        self.gpu.kernel(self.op, &program, entry)?.launch(grid, args)
    }
}
