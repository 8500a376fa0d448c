//! Sums of squares for the gradient norm, in an order that no cut into shards changes.

mod cuda;

use std::ops::Range;

use phalanx_tensor::{DType, Device, Error, Result, Tensor};

use crate::check;
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

const BLOCKS: Kernels<Blocks> = Kernels { cpu: blocks_on_cpu, cuda: cuda::blocks };
const ROOTS: Kernels<Roots> = Kernels { cpu: roots_on_cpu, cuda: cuda::roots };

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

/// One block, filled up with zeros, which change no sum of squares.
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

#[cfg(test)]
mod tests {
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
}
