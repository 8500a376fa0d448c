//! Reductions on a GPU: the launches of `reduce.cu` ([`fold`]) and of `each.cu` ([`each`]). How many threads take an output depends on the shape
//! alone, and so does the order of additions.

use phalanx_tensor::cuda::{Args, Gpu, Grid, Kernel, Program, Scratch};
use phalanx_tensor::{DType, Loops, Result, Tensor};

use super::{Combine, ReduceView, Term};
use crate::cuda::{File, PRELUDE, type_name};
use crate::pointwise::trace::{self, Traced, VECTOR};
use crate::real::wide_dtype;
use crate::rows::cuda::ROWS;

const FILES: &[File] = &[
    PRELUDE,
    VECTOR,
    ROWS,
    ("view.cuh", include_str!("view.cuh")),
    ("reduce.cu", include_str!("reduce.cu")),
];
/// Blocks that keep a large device busy; a number of its own, so that the order of sums is the same on every device.
const BLOCKS: usize = 1024;
/// Elements of an output up to which one warp reduces it.
const WARP_MAX: usize = 1024;
/// Threads of a larger team, and of a block of columns.
const THREADS: usize = 256;
/// Rows that a thread of a block of columns takes at once.
const SIDE: usize = 4;

/// What is stored for an output, as CUDA text of its reduced numbers.
pub(crate) struct Finish {
    /// CUDA statements: see `view.cuh`'s `Output`.
    pub(crate) text: &'static str,
    /// `a` and `b` there.
    pub(crate) numbers: [f64; 2],
}

/// Where results go.
pub(crate) enum Destination<'a> {
    /// A tensor, in its dtype.
    Tensor(&'a mut Tensor),
    /// Numbers of the type that is computed in.
    Scratch(&'a Scratch),
}

/// The type that terms are computed in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precision {
    /// The type that elements are computed in.
    Plain,
    /// f64.
    Double,
}

/// The counterpart of [`super::fold`] on a GPU. `shifts` holds a number for each output, of the type that is computed in.
pub(crate) fn fold<C: Combine, F: Term<K>, const K: usize>(
    op: &'static str,
    view: &ReduceView,
    (_, term): (C, F),
    precision: Precision,
    shifts: Option<&Scratch>,
    target: Destination<'_>,
    finish: &Finish,
) -> Result<()> {
    let term = trace::function(|[x, shift]| term.of(x, shift));
    let merge = trace::function(|[a, b]| [C::merge(a, b)]);
    let traced = TracedFold { terms: K, term, merge, start: C::START };
    fold_traced(op, view, &traced, precision, shifts, target, finish)
}

/// A term and a merge as CUDA text, with the neutral element.
struct TracedFold {
    terms: usize,
    term: Traced,
    merge: Traced,
    start: f64,
}

fn fold_traced(
    op: &'static str,
    view: &ReduceView,
    traced: &TracedFold,
    precision: Precision,
    shifts: Option<&Scratch>,
    target: Destination<'_>,
    finish: &Finish,
) -> Result<()> {
    let gpu = view.input.device().gpu()?;
    let dtype = view.input.dtype();
    let computed = if precision == Precision::Double { DType::F64 } else { wide_dtype(dtype) };
    let result = match &target {
        Destination::Tensor(out) => out.dtype(),
        Destination::Scratch(_) => wide_dtype(dtype),
    };
    let TracedFold { terms, term, merge, start } = traced;
    let plan = ThreadPlan::new(view, 16 / dtype.size());
    let names = Names { dtype, computed, result, terms: *terms, term, merge, finish: finish.text };
    let kernel = |entry| names.kernel(op, gpu, plan.team, entry);
    let outputs = view.outputs();
    let parts = (plan.parts > 1).then(|| gpu.scratch(op, outputs * terms * plan.parts * 8)).transpose()?;
    let operand = ViewArgs::of(op, view)?;
    let mut target = target;
    let args = output(Args::new(op, gpu), &mut target, parts.as_ref(), finish)?;
    let args = shifts_of(operand.put(args, view)?, shifts).value(plan.part_len as u64).value(*start);
    let (entry, grid) = plan.launch(view);
    let args = if entry == "columns" { args.value(plan.lanes as u64) } else { args };
    kernel(entry)?.launch(grid, term.pass(args, computed))?;
    let Some(parts) = parts else { return Ok(()) };
    let args = output(Args::new(op, gpu), &mut target, None, finish)?.scratch(&parts);
    let args = shifts_of(args.value(plan.parts as u64), shifts).value(*start).value(outputs as u64);
    kernel("finish")?.launch(Grid::new(outputs.div_ceil(4), 128), args)
}

/// Scratch memory for a number for each output, of the type that is computed in.
pub(crate) fn numbers(op: &'static str, view: &ReduceView) -> Result<Scratch> {
    let bytes = wide_dtype(view.input.dtype()).size();
    view.input.device().gpu()?.scratch(op, view.outputs() * bytes)
}

/// Adds the argument `Output` of `view.cuh`.
fn output<'a>(
    args: Args<'a>,
    target: &'a mut Destination<'_>,
    parts: Option<&Scratch>,
    finish: &Finish,
) -> Result<Args<'a>> {
    let args = match target {
        Destination::Tensor(out) => args.write(out)?,
        Destination::Scratch(scratch) => args.scratch(scratch),
    };
    let args = match parts {
        Some(parts) => args.scratch(parts),
        None => args.value(0u64),
    };
    Ok(args.value(finish.numbers))
}

fn shifts_of<'a>(args: Args<'a>, shifts: Option<&Scratch>) -> Args<'a> {
    match shifts {
        Some(shifts) => args.scratch(shifts),
        None => args.value(0u64),
    }
}

/// The macros that a program is compiled with.
struct Names<'a> {
    dtype: DType,
    computed: DType,
    result: DType,
    terms: usize,
    term: &'a Traced,
    merge: &'a Traced,
    finish: &'static str,
}

impl Names<'_> {
    fn kernel(&self, op: &'static str, gpu: &'static Gpu, team: usize, entry: &str) -> Result<Kernel> {
        let (team, terms) = (team.to_string(), self.terms.to_string());
        let defines = [
            ("ELEMENT", type_name(self.dtype)),
            ("COMPUTED", type_name(self.computed)),
            ("RESULT", type_name(self.result)),
            ("TEAM", &team),
            ("PACKETS", "0"),
            ("TERMS", &terms),
            ("TERM", self.term.text),
            ("MERGE", self.merge.text),
            ("FINISH", self.finish),
        ];
        gpu.kernel(op, &Program { name: "reduce.cu", files: FILES, defines: &defines }, entry)
    }
}

/// How a shape is spread over threads.
struct ThreadPlan {
    /// Threads for each output, if its elements are neighbours.
    team: usize,
    /// Threads side by side along the outputs, if these are neighbours.
    lanes: usize,
    /// Blocks of columns.
    tiles: usize,
    /// Blocks along n.
    parts: usize,
    part_len: usize,
}

impl ThreadPlan {
    /// `len` elements are a packet.
    fn new(view: &ReduceView, len: usize) -> ThreadPlan {
        let (n, inner) = (view.n, view.inner);
        if inner == 1 && n <= WARP_MAX {
            return ThreadPlan { team: 32, lanes: 0, tiles: 0, parts: 1, part_len: n.max(1) };
        }
        let lanes = inner.div_ceil(len).next_power_of_two().min(32);
        let tiles = view.outer * inner.div_ceil(lanes * len);
        // Each thread is to have a few packets.
        let (blocks, least) = match inner {
            1 => (view.outer, THREADS * len * 4),
            _ => (tiles, THREADS / lanes * SIDE * 2),
        };
        let parts = (BLOCKS / blocks.max(1)).clamp(1, n.div_ceil(least).max(1));
        let part_len = n.div_ceil(parts).max(1).next_multiple_of(len.max(SIDE));
        ThreadPlan { team: THREADS, lanes, tiles, parts: n.div_ceil(part_len).max(1), part_len }
    }

    fn launch(&self, view: &ReduceView) -> (&'static str, Grid) {
        let (rows_a_block, threads) = if self.team == 32 { (4, 128) } else { (1, THREADS as u32) };
        match view.inner {
            1 => ("rows", Grid::new(view.outer.div_ceil(rows_a_block), threads).by(self.parts, 1)),
            _ => ("columns", Grid::new(self.tiles, threads).by(self.parts, 1)),
        }
    }
}

/// The argument `View` of `view.cuh`: where the elements lie.
struct ViewArgs<'a> {
    tensor: &'a Tensor,
    /// A contiguous copy of the elements, unless they can be read in place.
    gathered: Option<Scratch>,
    outer: [u64; 3],
    run: [u64; 3],
}

impl<'a> ViewArgs<'a> {
    fn of(op: &'static str, view: &'a ReduceView) -> Result<ViewArgs<'a>> {
        let tensor = &view.input;
        if let Some((outer, run)) = runs(view) {
            return Ok(ViewArgs { tensor, gathered: None, outer, run });
        }
        let (n, inner) = (view.n as u64, view.inner as u64);
        let (outer, run) = ([view.outer.max(1) as u64, 0, n * inner], [n, 0, inner]);
        Ok(ViewArgs { tensor, gathered: Some(Scratch::of(op, tensor)?), outer, run })
    }

    fn put<'b>(&'b self, args: Args<'b>, view: &ReduceView) -> Result<Args<'b>> {
        let args = match &self.gathered {
            Some(scratch) => args.scratch(scratch),
            None => args.read(self.tensor)?,
        };
        let args = args.value([view.inner as u64, view.n as u64, view.outputs() as u64]);
        Ok(args.value(self.outer).value(self.run))
    }
}

/// The strides of the outer and of the reduced dimensions, each as `[length of a run, stride of runs, stride within]`,
/// if there are so few of them that kernels can read the elements in place.
fn runs(view: &ReduceView) -> Option<([u64; 3], [u64; 3])> {
    let (shape, strides) = (view.input.shape(), view.input.strides());
    let take = |from: usize, count: usize| {
        let mut end = from;
        let mut product = 1;
        while product != count && end < shape.len() {
            product *= shape[end];
            end += 1;
        }
        end
    };
    let first = take(0, view.outer);
    let second = take(first, view.n);
    let group = |from: usize, to: usize, count: usize| {
        let loops = Loops::new(&shape[from..to], [&strides[from..to]]);
        match (loops.sizes(), loops.strides()) {
            ([_], [[stride]]) => Some([count as u64, 0, *stride as u64]),
            ([_, run], [[outer], [stride]]) => Some([*run as u64, *outer as u64, *stride as u64]),
            _ => None,
        }
    };
    let (outer, run) = (group(0, first, view.outer)?, group(first, second, view.n)?);
    let inner = group(second, shape.len(), view.inner)?;
    let together = |[_, between, stride]: [u64; 3]| between == 0 && stride == 1;
    let fits = if view.inner == 1 { run[2] == 1 || view.n == 1 } else { together(inner) };
    (fits && view.input.numel() > 0).then_some((outer, run))
}

/// Elements of any type as numbers.
pub(crate) const VALUE: File = ("value.cuh", include_str!("value.cuh"));
const EACH: &[File] = &[PRELUDE, VALUE, ("each.cu", include_str!("each.cu"))];
/// Bytes of a part's result.
const BEST_BYTES: usize = 16;

/// How elements are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MergeKind {
    /// The sum of integers, in i64.
    Add,
    /// The product, in f64 or i64.
    Multiply,
    /// The largest, and the first place that it is at.
    Largest,
    /// The smallest.
    Smallest,
}

impl MergeKind {
    /// The dtype that elements of a dtype are compared or merged in.
    fn value(self, dtype: DType) -> DType {
        match self {
            _ if !dtype.is_float() => DType::I64,
            MergeKind::Add | MergeKind::Multiply => DType::F64,
            MergeKind::Largest | MergeKind::Smallest => wide_dtype(dtype),
        }
    }
}

/// The counterpart of [`super::fold_each`] on a GPU: sets `values`, and `places` (i64) if they are wanted.
pub(crate) fn each(
    op: &'static str,
    view: &ReduceView,
    kind: MergeKind,
    values: &mut Tensor,
    mut places: Option<&mut Tensor>,
) -> Result<()> {
    let (gpu, dtype) = (view.input.device().gpu()?, view.input.dtype());
    let (n, inner, outputs) = (view.n, view.inner, view.outputs());
    let (entry, threads, blocks, least) = match inner {
        1 if n <= 256 => ("rows", 32, outputs, n),
        1 => ("rows", 256, outputs, 2048),
        _ => ("columns", 256, outputs.div_ceil(256), 64),
    };
    let parts = (BLOCKS / blocks.max(1)).clamp(1, n.div_ceil(least.max(1)).max(1));
    let part_len = n.div_ceil(parts).max(1);
    let parts = n.div_ceil(part_len).max(1);
    let name = format!("{kind:?}");
    let defines = [
        ("STORED", stored(dtype)),
        ("VALUE", type_name(kind.value(dtype))),
        ("KIND", &name),
        ("RESULT", stored(values.dtype())),
    ];
    let program = Program { name: "each.cu", files: EACH, defines: &defines };
    let merged = (parts > 1).then(|| gpu.scratch(op, outputs * parts * BEST_BYTES)).transpose()?;
    let gathered = (!view.input.is_contiguous()).then(|| Scratch::of(op, &view.input)).transpose()?;
    let args = Args::new(op, gpu).write(values)?.write_if(places.as_deref_mut())?;
    let args = match &merged {
        Some(merged) => args.scratch(merged),
        None => args.value(0u64),
    };
    let args = match &gathered {
        Some(gathered) => args.scratch(gathered),
        None => args.read(&view.input)?,
    };
    let args = args.value(n as u64).value(part_len as u64);
    let args = if inner == 1 { args } else { args.value(inner as u64).value(outputs as u64) };
    gpu.kernel(op, &program, entry)?.launch(Grid::new(blocks, threads).by(parts, 1), args)?;
    let Some(merged) = merged else { return Ok(()) };
    let args = Args::new(op, gpu).write(values)?.write_if(places)?.value(0u64).scratch(&merged);
    let args = args.value(parts as u64).value(outputs as u64);
    gpu.kernel(op, &program, "finish")?.launch(Grid::new(outputs.div_ceil(4), 128), args)
}

/// The CUDA name of the type that elements are stored in.
pub(crate) fn stored(dtype: DType) -> &'static str {
    if dtype == DType::Bool { "u8" } else { type_name(dtype) }
}
