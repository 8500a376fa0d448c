//! The launches of `sum_of_squares.cu`.

use phalanx_tensor::cuda::{Args, Gpu, Grid, Kernel, Program};
use phalanx_tensor::{DType, Result, Tensor};

use super::NORM_BLOCK;
use crate::cuda::{File, PRELUDE, type_name};

const FILES: &[File] = &[PRELUDE, ("sum_of_squares.cu", include_str!("sum_of_squares.cu"))];
/// Leaves that a block of threads adds.
const LEAVES: usize = 32;
/// Nodes that it joins.
const NODES: usize = 256;

fn kernel(op: &'static str, gpu: &'static Gpu, dtype: DType, entry: &str) -> Result<Kernel> {
    let defines = [("ELEMENT", type_name(dtype))];
    gpu.kernel(op, &Program { name: "sum_of_squares.cu", files: FILES, defines: &defines }, entry)
}

/// The leaves; `x` lies together.
pub(super) fn blocks(op: &'static str, x: &Tensor) -> Result<Vec<f64>> {
    let (gpu, n) = (x.device().gpu()?, x.numel());
    let count = n.div_ceil(NORM_BLOCK);
    let mut sums = Tensor::empty(&[count], DType::F64, x.device())?;
    let args = Args::new(op, gpu).write(&mut sums)?.read(x)?.value(n as u64);
    let grid = Grid::new(count.div_ceil(LEAVES), 256);
    kernel(op, gpu, x.dtype(), "leaves")?.launch(grid, args)?;
    sums.to_vec()
}

/// The root; `x` lies together.
pub(super) fn root(op: &'static str, x: &Tensor, root: &mut Tensor) -> Result<()> {
    let (gpu, n) = (x.device().gpu()?, x.numel());
    let mut count = n.div_ceil(NORM_BLOCK).div_ceil(LEAVES);
    let mut nodes = gpu.scratch(op, count * size_of::<f64>())?;
    let args = Args::new(op, gpu).scratch(&nodes).read(x)?.value(n as u64);
    kernel(op, gpu, x.dtype(), "nodes")?.launch(Grid::new(count, 256), args)?;
    let join = kernel(op, gpu, x.dtype(), "join")?;
    while count > NODES {
        let above = gpu.scratch(op, count.div_ceil(NODES) * size_of::<f64>())?;
        let args = Args::new(op, gpu).scratch(&above).scratch(&nodes).value(count as u64);
        count = count.div_ceil(NODES);
        join.launch(Grid::new(count, 256), args)?;
        nodes = above;
    }
    let args = Args::new(op, gpu).write(root)?.scratch(&nodes).value(count as u64);
    join.launch(Grid::new(1, 256), args)
}
