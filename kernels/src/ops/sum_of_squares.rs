//! Sums of squares for the gradient norm, in an order that no cut into shards changes.

use phalanx_tensor::{Result, Tensor};

use crate::check;
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
    let mut sums = vec![0.0; x.numel().div_ceil(NORM_BLOCK)];
    if x.device().is_meta() {
        return Ok(sums);
    }
    for_real!(OP, x.dtype(), T => fill::<T>(OP, &x, &mut sums))?;
    Ok(sums)
}

fn fill<T: Real>(op: &'static str, x: &Tensor, sums: &mut [f64]) -> Result<()> {
    let elements = x.read::<T>(op)?;
    let elements = &elements[x.offset()..][..x.numel()];
    x.device().pool()?.for_each_chunk(sums, PIECE, |piece, sums| {
        for (i, sum) in sums.iter_mut().enumerate() {
            let start = (piece * PIECE + i) * NORM_BLOCK;
            let block = &elements[start..elements.len().min(start + NORM_BLOCK)];
            let mut wide = [T::Wide::ZERO; NORM_BLOCK];
            wide.iter_mut().zip(block).for_each(|(to, x)| *to = x.widen());
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
    use crate::testing::{assert_close, floats, tensors, values};

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
