//! [`combine`]: the elements of several ranks become one on a GPU, in order of the ranks. Its slow twin is what the backends on
//! the CPU do ([`crate::comm::reduction`]).

use phalanx_kernels::cuda::{PRELUDE, type_name};
use phalanx_tensor::cuda::{Args, Gpu, Grid, Kernel, Program};
use phalanx_tensor::{DType, Result, Tensor};

use crate::comm::Reduction;

const FILES: &[(&str, &str)] = &[PRELUDE, ("combine.cu", include_str!("combine.cu"))];

/// Loads the kernel of [`combine`], which must not be done while a GPU waits for another one.
pub(super) fn prepare(op: &'static str, gpu: &'static Gpu, dtype: DType, by: Reduction) -> Result<Kernel> {
    let defines = defines(dtype, by);
    gpu.kernel(op, &Program { name: "combine.cu", files: FILES, defines: &defines }, "combine")
}

/// `out` becomes the reduction of all ranks' elements: `own` are those of rank `place`, `others` of the rest, one after another.
/// `out` may be `own`.
pub(super) fn combine(
    op: &'static str,
    out: &mut Tensor,
    own: &Tensor,
    others: &Tensor,
    place: usize,
    by: Reduction,
) -> Result<()> {
    let gpu = out.device().gpu()?;
    let count = out.numel();
    let ranks = others.numel() / count.max(1) + 1;
    let [stride, numel, ranks, place] = [count, count, ranks, place].map(|n| n as u64);
    // The output first: it may be `own`, which is then not locked again.
    let args = Args::new(op, gpu).write(out)?.read(own)?.read(others)?;
    let args = args.value(stride).value(numel).value(ranks).value(place);
    let threads = count.div_ceil(16 / own.dtype().size());
    prepare(op, gpu, own.dtype(), by)?.launch(Grid::over(gpu, threads, 256), args)
}

fn defines(dtype: DType, by: Reduction) -> [(&'static str, &'static str); 3] {
    let by = match by {
        Reduction::Sum => "sum",
        Reduction::Prod => "product",
        Reduction::Max => "largest",
        Reduction::Min => "smallest",
    };
    let float = if dtype.is_float() { "1" } else { "0" };
    // Truth values are 0 and 1.
    let element = if dtype == DType::Bool { DType::U8 } else { dtype };
    [("ELEM", type_name(element)), ("FLOAT", float), ("BY", by)]
}
