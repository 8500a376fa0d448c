//! Sums of squares for the gradient norm, in an order that no cut into shards changes, and [`add_pairs_`], which puts
//! together what ranks have sent of such sums.

use std::ops::Range;

use phalanx_tensor::cuda::{Args, Gpu, Grid, Program, Scratch};
use phalanx_tensor::{DType, Device, Error, Result, Tensor};

use crate::check;
use crate::cuda::{File, PRELUDE, type_name};
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::simd::{Float, Isa, Kernel, dispatch};

/// Elements in a block of [`sum_of_squares_blocks`].
pub const NORM_BLOCK: usize = 64;
/// Blocks that a thread works on at least.
const PIECE: usize = 128;

/// The sum of squares of every 64 consecutive elements in row-major order (the last block may be shorter), in f64:
/// the leaves of the tree that a gradient norm is summed by. Eight partial sums run over the block, element `i` into
/// sum `i % 8`; they are added halves first. On a `meta` device all are 0.
///
/// # Errors
/// If the dtype is no floating-point one.
pub fn sum_of_squares_blocks(x: &Tensor) -> Result<Vec<f64>> {
    const OP: &str = "sum_of_squares_blocks";
    check::float(OP, x)?;
    let x = x.contiguous()?;
    BLOCKS.on(x.device())(OP, &x)
}

const BLOCKS: Kernels<Blocks> = Kernels { cpu: blocks_on_cpu, cuda: blocks_on_gpu };
const ROOTS: Kernels<Roots> = Kernels { cpu: roots_on_cpu, cuda: roots_on_gpu };

type Blocks = fn(&'static str, &Tensor) -> Result<Vec<f64>>;
type Roots = fn(&'static str, Device, &[Stretches], &mut Tensor) -> Result<()>;

fn blocks_on_cpu(op: &'static str, x: &Tensor) -> Result<Vec<f64>> {
    let mut sums = vec![0.0; x.numel().div_ceil(NORM_BLOCK)];
    if x.device().is_meta() {
        return Ok(sums);
    }
    for_real!(op, x.dtype(), T => fill::<T>(op, x, &mut sums))?;
    Ok(sums)
}

/// A floating-point tensor, and stretches of its blocks of [`NORM_BLOCK`] elements.
pub type Stretches = (Tensor, Vec<Range<usize>>);

/// The sum of squares of each stretch, one after another, f64 on their device: the root of the tree over its blocks' sums
/// ([`sum_of_squares_blocks`]). A pair of neighbouring blocks is added, then a pair of pairs, and so on; what has no
/// neighbour stays alone. Nothing waits for it.
///
/// # Errors
/// If a dtype is no floating-point one, a tensor is on another device, or a stretch ends behind it.
pub fn sums_of_squares(device: Device, of: &[Stretches]) -> Result<Tensor> {
    const OP: &str = "sums_of_squares";
    let together = |(x, stretches): &Stretches| {
        check::float(OP, x)?;
        let blocks = x.numel().div_ceil(NORM_BLOCK);
        if x.device() != device {
            return Err(Error::Device { op: OP, left: device, right: x.device() });
        }
        match stretches.iter().find(|part| part.start > part.end || part.end > blocks) {
            Some(part) => Err(Error::range(OP, format!("blocks {part:?}"), format!("some of {blocks}"))),
            None => Ok((x.contiguous()?, stretches.clone())),
        }
    };
    let of = of.iter().map(together).collect::<Result<Vec<Stretches>>>()?;
    let mut sums =
        Tensor::empty_for(OP, &[of.iter().map(|(_, parts)| parts.len()).sum()], DType::F64, device)?;
    ROOTS.run(device, |roots| roots(OP, device, &of, &mut sums))?;
    Ok(sums)
}

fn roots_on_cpu(op: &'static str, _: Device, of: &[Stretches], sums: &mut Tensor) -> Result<()> {
    let mut roots = Vec::with_capacity(sums.numel());
    for (x, stretches) in of {
        let blocks = sum_of_squares_blocks(x)?;
        roots.extend(stretches.iter().map(|part| dyadic(&blocks[part.clone()])));
    }
    sums.write::<f64>(op)?[..roots.len()].copy_from_slice(&roots);
    Ok(())
}

fn dyadic(blocks: &[f64]) -> f64 {
    let mut level = blocks.to_vec();
    while level.len() > 1 {
        level =
            level.chunks(2).map(|pair| pair.iter().copied().reduce(|a, b| a + b).unwrap_or(0.0)).collect();
    }
    level.first().copied().unwrap_or(0.0)
}

fn fill<T: Real>(op: &'static str, x: &Tensor, sums: &mut [f64]) -> Result<()> {
    let elements = x.read::<T>(op)?;
    let elements = &elements[x.offset()..][..x.numel()];
    x.device().pool()?.for_each_chunk(sums, PIECE, |piece, sums| {
        for (i, sum) in sums.iter_mut().enumerate() {
            let start = (piece * PIECE + i) * NORM_BLOCK;
            let block = &elements[start..elements.len().min(start + NORM_BLOCK)];
            let mut wide = [T::Wide::ZERO; NORM_BLOCK];
            T::widen_all(block, &mut wide[..block.len()]);
            *sum = dispatch(Block { wide: &wide });
        }
    });
    Ok(())
}

/// The sum of squares of one block, filled up with zeros.
struct Block<'a, T> {
    wide: &'a [T; NORM_BLOCK],
}

impl<T: Float> Kernel for Block<'_, T> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Isa>(self) -> f64 {
        let mut sums = [0.0f64; 8];
        for row in self.wide.chunks_exact(8) {
            for (sum, x) in sums.iter_mut().zip(row) {
                let x = x.to_f64();
                *sum += x * x;
            }
        }
        let [a, b, c, d, e, f, g, h] = sums;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}

const FILES: &[File] = &[PRELUDE, ("sum_of_squares.cu", include_str!("sum_of_squares.cu"))];
/// Leaves that a block of threads computes.
const LEAVES: usize = 32;
/// Nodes that a block of threads adds in pairs.
const NODES: usize = 4096;
/// Trees of a launch: its arguments stay below 4 KiB.
const TREES: usize = 240;

fn kernel(
    op: &'static str,
    gpu: &'static Gpu,
    dtype: DType,
    entry: &str,
) -> Result<phalanx_tensor::cuda::Kernel> {
    let defines = [("ELEMENT", type_name(dtype))];
    gpu.kernel(op, &Program { name: "sum_of_squares.cu", files: FILES, defines: &defines }, entry)
}

/// Computes the leaves of `x`, which is contiguous.
fn blocks_on_gpu(op: &'static str, x: &Tensor) -> Result<Vec<f64>> {
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

/// Computes the roots of the trees over stretches of leaves; the tensors are contiguous.
fn roots_on_gpu(op: &'static str, device: Device, of: &[Stretches], roots: &mut Tensor) -> Result<()> {
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

const OP: &str = "add_pairs";
/// Pairs of a launch: its arguments stay below 4 KiB.
const PAIRS: usize = 480;

/// `x[to] += x[from]` for each pair `(to, from)`, one after another, in place; `x` is f64 `[N]`, contiguous. Nothing waits for
/// it.
///
/// # Errors
/// If `x` is something else, or a pair names a place beyond it.
pub fn add_pairs_(x: &mut Tensor, pairs: &[(usize, usize)]) -> Result<()> {
    check::dtype(OP, x, DType::F64)?;
    let n = x.numel();
    if x.rank() != 1 || !x.is_contiguous() {
        let got = format!("shape {:?}, strides {:?}", x.shape(), x.strides());
        return Err(Error::shape(OP, got, "a contiguous vector"));
    }
    if let Some((to, from)) = pairs.iter().find(|(to, from)| to.max(from) >= &n) {
        return Err(Error::range(OP, format!("the pair ({to}, {from})"), format!("places below {n}")));
    }
    if x.device().is_meta() {
        x.bump_version();
        return Ok(());
    }
    ADD_PAIRS.run(x.device(), |add_pairs| add_pairs(x, pairs))
}

const ADD_PAIRS: Kernels<AddPairs> = Kernels { cpu: add_pairs_on_cpu, cuda: add_pairs_on_gpu };

type AddPairs = fn(&mut Tensor, &[(usize, usize)]) -> Result<()>;

fn add_pairs_on_cpu(x: &mut Tensor, pairs: &[(usize, usize)]) -> Result<()> {
    let (start, n) = (x.offset(), x.numel());
    let mut values = x.write::<f64>(OP)?;
    let values = &mut values[start..start + n];
    pairs.iter().for_each(|&(to, from)| values[to] += values[from]);
    Ok(())
}

fn add_pairs_on_gpu(x: &mut Tensor, pairs: &[(usize, usize)]) -> Result<()> {
    pairs.chunks(PAIRS).try_for_each(|pairs| launch(x, pairs))
}

fn launch(x: &mut Tensor, pairs: &[(usize, usize)]) -> Result<()> {
    const FILES: &[File] = &[PRELUDE, ("add_pairs.cu", include_str!("add_pairs.cu"))];
    let program = Program { name: "add_pairs.cu", files: FILES, defines: &[] };
    let gpu = x.device().gpu()?;
    let mut args = Args::new(OP, gpu).write(x)?.value(pairs.len() as u64);
    for &(to, from) in pairs {
        args = args.value([to as u32, from as u32]);
    }
    for _ in pairs.len()..PAIRS {
        args = args.value([0u32; 2]);
    }
    gpu.kernel(OP, &program, "add_pairs")?.launch(Grid::new(1, 1), args)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;
    use crate::testing::{assert_close, floats, make, tensors, values};

    #[test]
    fn the_root_adds_neighbours_first() {
        let x = make(&[64 * 5], DType::F64, &|i| [1e8, 1.0, 1.0, 1.0, 1.0][i / 64] / 8.0);
        let [a, b, c, d, e] = sum_of_squares_blocks(&x).unwrap()[..] else { panic!("five blocks") };
        let [several, last] = [vec![0..5, 1..4, 2..2], std::iter::once(4..5).collect()];
        let roots = sums_of_squares(Device::CPU, &[(x.clone(), several), (x.clone(), last)]).unwrap();
        let roots = roots.to_vec::<f64>().unwrap();
        assert_eq!(roots, [((a + b) + (c + d)) + e, (b + c) + d, 0.0, e]);
        assert_ne!(roots[0], (((a + b) + c) + d) + e);
        assert!(sums_of_squares(Device::CPU, &[(x, std::iter::once(3..6).collect())]).is_err());
    }

    #[test]
    fn blocks_are_the_sums_of_64_squares() {
        for x in tensors(&floats(-3.0, 3.0)) {
            let sums = sum_of_squares_blocks(&x).unwrap();
            let all = values(&x);
            assert_eq!(sums.len(), all.len().div_ceil(NORM_BLOCK));
            for (sum, block) in sums.iter().zip(all.chunks(NORM_BLOCK)) {
                assert_close(*sum, block.iter().map(|x| x * x).sum(), 1e-14);
            }
        }
    }

    #[test]
    fn pairs_are_added_one_after_another() {
        let all = Tensor::from_slice(&[0.0, 1e16, 1.0, 1.0], &[4], Device::CPU).unwrap();
        let mut x = all.narrow(0, 1, 3).unwrap();
        add_pairs_(&mut x, &[(1, 2), (0, 1)]).unwrap();
        assert_eq!(all.to_vec::<f64>().unwrap(), [0.0, 1e16 + 2.0, 2.0, 1.0]);
        add_pairs_(&mut x, &[(2, 2), (2, 2)]).unwrap();
        assert_eq!(all.to_vec::<f64>().unwrap()[3], 4.0);
        for wrong in [(3, 0), (0, 3)] {
            let error = add_pairs_(&mut x, &[wrong]).unwrap_err().to_string();
            assert!(error.contains("places below 3"), "{error}");
        }
        let mut matrix = x.with_shape(&[1, 3]).unwrap();
        assert!(add_pairs_(&mut matrix, &[]).is_err());
    }
}
