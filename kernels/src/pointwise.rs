//! Pointwise operations: each output element depends on the input elements of its own place only.
//!
//! An operation states what it does to vectors, once; this module broadcasts, gathers strided inputs, widens
//! halves, splits the work over the device's threads and picks the instruction set.

use phalanx_tensor::{Dims, Element, Result, Tensor, broadcast_shapes};

use crate::check;
use crate::real::{Real, for_real};
use crate::simd::{Float, Isa, Kernel, Vector, dispatch};
use crate::source::{BLOCK, Source};

/// A function of `N` elements.
pub(crate) trait Pointwise<const N: usize>: Copy + Sync {
    /// The function, on vectors. To be marked `#[inline(always)]`.
    fn eval<V: Vector>(self, x: [V; N]) -> V;
}

/// Elements that a thread works on at least: 32 KiB of f32.
pub(crate) const PIECE: usize = 8 * BLOCK;

/// The shape that all inputs broadcast to.
pub(crate) fn common_shape(op: &'static str, inputs: &[&Tensor]) -> Result<Dims> {
    let first = Dims::from_slice(inputs[0].shape());
    inputs[1..].iter().try_fold(first, |shape, t| broadcast_shapes(op, &shape, t.shape()))
}

/// Applies `f` to the broadcast inputs, which must be floating-point, of one dtype and on one device.
pub(crate) fn map<const N: usize>(
    op: &'static str,
    f: impl Pointwise<N>,
    inputs: [&Tensor; N],
) -> Result<Tensor> {
    check::float(op, inputs[0])?;
    check::same(op, &inputs)?;
    let mut out = Tensor::empty(&common_shape(op, &inputs)?, inputs[0].dtype(), inputs[0].device())?;
    map_into(op, f, inputs, &mut out)?;
    Ok(out)
}

/// [`map`] into a contiguous tensor of the broadcast shape and the inputs' dtype, which shares no storage with
/// them.
pub(crate) fn map_into<const N: usize>(
    op: &'static str,
    f: impl Pointwise<N>,
    inputs: [&Tensor; N],
    out: &mut Tensor,
) -> Result<()> {
    debug_assert!(out.is_contiguous());
    if out.device().is_meta() {
        out.bump_version();
        return Ok(());
    }
    for_real!(op, out.dtype(), T => map_typed::<T, N>(op, f, inputs, out))
}

fn map_typed<T: Real, const N: usize>(
    op: &'static str,
    f: impl Pointwise<N>,
    inputs: [&Tensor; N],
    out: &mut Tensor,
) -> Result<()> {
    let shape = Dims::from_slice(out.shape());
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let sources: [Source<'_, T>; N] = Source::open_all(op, inputs, &shape)?;
    let mut target = out.write::<T>(op)?;
    pool.for_each_chunk(&mut target[offset..offset + numel], PIECE, |piece, target| {
        let mut scratch = [[T::Wide::ZERO; BLOCK]; N];
        let mut result = [T::Wide::ZERO; BLOCK];
        for (i, target) in target.chunks_mut(BLOCK).enumerate() {
            let start = piece * PIECE + i * BLOCK;
            let mut scratch = scratch.iter_mut();
            let inputs: [&[T::Wide]; N] = std::array::from_fn(|n| match scratch.next() {
                Some(scratch) => sources[n].wide(start, target.len(), scratch),
                None => &[],
            });
            match T::as_wide_mut(target) {
                Some(out) => dispatch(Block { f, inputs, out }),
                None => {
                    dispatch(Block { f, inputs, out: &mut result[..target.len()] });
                    target.iter_mut().zip(&result).for_each(|(to, &x)| *to = T::narrow(x));
                }
            }
        }
    });
    Ok(())
}

/// One block: every slice is of the output's length.
struct Block<'a, T, F, const N: usize> {
    f: F,
    inputs: [&'a [T]; N],
    out: &'a mut [T],
}

impl<T: Float + Element, F: Pointwise<N>, const N: usize> Kernel for Block<'_, T, F, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <T::Vec<S> as Vector>::LANES;
        let whole = self.out.len() / lanes * lanes;
        let (body, tail) = self.out.split_at_mut(whole);
        for (i, out) in body.chunks_exact_mut(lanes).enumerate() {
            let x = std::array::from_fn(|n| T::Vec::<S>::load(&self.inputs[n][i * lanes..]));
            self.f.eval(x).store(out);
        }
        if !tail.is_empty() {
            let x = std::array::from_fn(|n| T::Vec::<S>::load_partial(&self.inputs[n][whole..], T::ONE));
            self.f.eval(x).store_partial(tail);
        }
    }
}

/// Applies a scalar function to the broadcast inputs, for dtypes that are not computed in vectors. `T` is the
/// inputs' stored type, `U` the output's.
pub(crate) fn map_scalar<T: Element, U: Element, const N: usize>(
    op: &'static str,
    f: impl Fn([T; N]) -> U + Sync,
    inputs: [&Tensor; N],
    out: &mut Tensor,
) -> Result<()> {
    debug_assert!(out.is_contiguous());
    if out.device().is_meta() {
        out.bump_version();
        return Ok(());
    }
    let shape = Dims::from_slice(out.shape());
    let (offset, numel, pool) = (out.offset(), out.numel(), out.device().pool()?);
    let sources: [Source<'_, T>; N] = Source::open_all(op, inputs, &shape)?;
    let mut target = out.write::<U>(op)?;
    pool.for_each_chunk(&mut target[offset..offset + numel], PIECE, |piece, target| {
        let mut scratch = [[T::zeroed(); BLOCK]; N];
        for (i, target) in target.chunks_mut(BLOCK).enumerate() {
            let start = piece * PIECE + i * BLOCK;
            let mut scratch = scratch.iter_mut();
            let inputs: [&[T]; N] = std::array::from_fn(|n| match scratch.next() {
                Some(scratch) => sources[n].block(start, target.len(), scratch),
                None => &[],
            });
            for (j, to) in target.iter_mut().enumerate() {
                *to = f(std::array::from_fn(|n| inputs[n][j]));
            }
        }
    });
    Ok(())
}
