//! The mean of all pixels of an image, and its transpose.

use phalanx_tensor::{Result, Tensor};

use super::{Windows, image, piece};
use crate::gemm::with_scratch;
use crate::real::Real;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector, dispatch};

/// Partial sums of a plane: pixel i goes to sum i % SUMS, whatever the instruction set.
const SUMS: usize = 4 * LANES_MAX;

/// The divisor, if there is a single window that holds all pixels.
pub(super) fn divisor(windows: &[Windows; 2]) -> Option<f64> {
    let of_axis = |axis: &Windows| {
        let (pixels, divisor) = (axis.count == 1).then(|| axis.span(0))?;
        (pixels == (0..axis.image)).then_some(divisor as f64)
    };
    Some(of_axis(&windows[0])? * of_axis(&windows[1])?)
}

/// Each plane's sum over the divisor.
pub(super) fn pool<T: Real>(op: &'static str, x: &Tensor, divisor: f64, out: &mut Tensor) -> Result<()> {
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let plane = image(op, x)?.iter().product::<usize>();
    let source = x.read::<T>(op)?;
    let source = &source[x.offset()..][..x.numel()];
    let (planes, divisor) = (piece(plane) / plane, T::Wide::from_f64(divisor));
    pool.for_each_chunk(&mut out.write::<T>(op)?[offset..offset + numel], planes, |i, out| {
        let source = &source[i * planes * plane..][..out.len() * plane];
        match (T::as_wide(source), T::as_wide_mut(out)) {
            (Some(source), Some(out)) => dispatch(Means { source, divisor, out }),
            _ => with_scratch(source.len() + out.len(), |scratch| {
                let (wide, means) = scratch.split_at_mut(source.len());
                T::widen_all(source, wide);
                dispatch(Means { source: wide, divisor, out: &mut *means });
                T::narrow_all(means, out);
            }),
        }
    });
    Ok(())
}

/// Each pixel's share of its plane's `dy`.
pub(super) fn unpool<T: Real>(op: &'static str, dy: &Tensor, divisor: f64, out: &mut Tensor) -> Result<()> {
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let plane = image(op, out)?.iter().product::<usize>();
    let source = dy.read::<T>(op)?;
    let source = &source[dy.offset()..][..dy.numel()];
    let (chunk, divisor) = (piece(plane), T::Wide::from_f64(divisor));
    pool.for_each_chunk(&mut out.write::<T>(op)?[offset..offset + numel], chunk, |i, out| {
        for (out, dy) in out.chunks_exact_mut(plane).zip(&source[i * (chunk / plane)..]) {
            out.fill(T::narrow(dy.widen() / divisor));
        }
    });
    Ok(())
}

/// The sums of planes, one after the other, over a divisor.
struct Means<'a, V> {
    source: &'a [V],
    divisor: V,
    out: &'a mut [V],
}

impl<V: Float> Kernel for Means<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let (plane, lanes) = (self.source.len() / self.out.len(), V::Vec::<S>::LANES);
        for (out, plane) in self.out.iter_mut().zip(self.source.chunks_exact(plane)) {
            let mut sums = [V::Vec::<S>::zero(); SUMS];
            let mut blocks = plane.chunks_exact(SUMS);
            for block in &mut blocks {
                for j in 0..SUMS / lanes {
                    sums[j] = sums[j] + Vector::load(&block[j * lanes..]);
                }
            }
            let rest = blocks.remainder();
            for j in 0..SUMS / lanes {
                let rest = &rest[(j * lanes).min(rest.len())..];
                sums[j] = sums[j]
                    + match rest.len() >= lanes {
                        true => Vector::load(rest),
                        false => Vector::load_partial(rest, V::ZERO),
                    };
            }
            let mut half = SUMS / lanes / 2;
            while half > 0 {
                for j in 0..half {
                    sums[j] = sums[j] + sums[j + half];
                }
                half /= 2;
            }
            *out = sums[0].reduce_sum() / self.divisor;
        }
    }
}
