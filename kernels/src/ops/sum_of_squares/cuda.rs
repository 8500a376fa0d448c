//! The launches of `sum_of_squares.cu`.

use std::ops::Range;

use phalanx_tensor::cuda::{Args, Gpu, Grid, Kernel, Program, Scratch};
use phalanx_tensor::{DType, Device, Result, Tensor};

use super::{NORM_BLOCK, Stretches};
use crate::cuda::{File, PRELUDE, type_name};

const FILES: &[File] = &[PRELUDE, ("sum_of_squares.cu", include_str!("sum_of_squares.cu"))];
/// Leaves that a block of threads adds.
const LEAVES: usize = 32;
/// Nodes that it joins.
const NODES: usize = 4096;
/// Trees of a launch: its arguments stay below 4 KiB.
const TREES: usize = 240;

fn kernel(op: &'static str, gpu: &'static Gpu, dtype: DType, entry: &str) -> Result<Kernel> {
    let defines = [("ELEMENT", type_name(dtype))];
    gpu.kernel(op, &Program { name: "sum_of_squares.cu", files: FILES, defines: &defines }, entry)
}

/// The leaves; `x` lies together.
pub(super) fn blocks(op: &'static str, x: &Tensor) -> Result<Vec<f64>> {
    let mut sums = Tensor::empty_for(op, &[x.numel().div_ceil(NORM_BLOCK)], DType::F64, x.device())?;
    leaves(op, Args::new(op, x.device().gpu()?).write(&mut sums)?, x, 0)?;
    sums.to_vec()
}

/// Adds the leaves of `x`, the first of which is number `first`, to arguments that begin with where they go.
fn leaves<'a>(op: &'static str, to: Args<'a>, x: &'a Tensor, first: usize) -> Result<()> {
    let (gpu, n) = (x.device().gpu()?, x.numel());
    let args = to.read(x)?.value(first as u64).value(n as u64);
    let grid = Grid::new(n.div_ceil(NORM_BLOCK).div_ceil(LEAVES), 256);
    kernel(op, gpu, x.dtype(), "leaves")?.launch(grid, args)
}

/// The roots of the trees over stretches of the leaves; the tensors lie together.
pub(super) fn roots(op: &'static str, device: Device, of: &[Stretches], roots: &mut Tensor) -> Result<()> {
    let gpu = device.gpu()?;
    let counts = of.iter().map(|(x, _)| x.numel().div_ceil(NORM_BLOCK));
    let mut nodes = gpu.scratch(op, counts.sum::<usize>() * size_of::<f64>())?;
    let (mut spans, mut first) = (Vec::with_capacity(roots.numel()), 0);
    for (x, stretches) in of {
        leaves(op, Args::new(op, gpu).scratch(&nodes), x, first)?;
        spans.extend(stretches.iter().map(|part| first + part.start..first + part.end));
        first += x.numel().div_ceil(NORM_BLOCK);
    }
    while spans.iter().any(|span| span.len() > NODES) {
        let pieces: Vec<Range<usize>> = spans
            .iter()
            .flat_map(|span| span.clone().step_by(NODES).map(|start| start..span.end.min(start + NODES)))
            .collect();
        let above = gpu.scratch(op, pieces.len() * size_of::<f64>())?;
        for (number, pieces) in pieces.chunks(TREES).enumerate() {
            trees(op, gpu, Args::new(op, gpu).scratch(&above), &nodes, number * TREES, pieces)?;
        }
        let mut at = 0;
        for span in &mut spans {
            let joined = span.len().div_ceil(NODES);
            *span = at..at + joined;
            at += joined;
        }
        nodes = above;
    }
    for (number, spans) in spans.chunks(TREES).enumerate() {
        let to = Args::new(op, gpu).write(roots)?;
        trees(op, gpu, to, &nodes, number * TREES, spans)?;
    }
    Ok(())
}

/// Adds what is joined, and where, to arguments that begin with where the sums go.
fn trees(
    op: &'static str,
    gpu: &'static Gpu,
    to: Args<'_>,
    from: &Scratch,
    first: usize,
    spans: &[Range<usize>],
) -> Result<()> {
    let mut args = to.scratch(from).value(first as u64);
    for span in spans {
        args = args.value([span.start as u64, span.len() as u64]);
    }
    for _ in spans.len()..TREES {
        args = args.value([0u64; 2]);
    }
    // The program of any dtype has it.
    kernel(op, gpu, DType::F64, "trees")?.launch(Grid::new(spans.len(), 256), args)
}
