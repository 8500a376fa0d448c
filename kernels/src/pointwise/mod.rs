//! Pointwise operations: each output element depends on the input elements at its own position only.
//!
//! An operation implements [`Pointwise`] once, usually by the macro `pointwise!`, and calls [`map`]. This module broadcasts, gathers strided
//! inputs, widens halves, splits the work over the device's threads and picks the instruction set. On a GPU the same body becomes
//! a kernel ([`trace`]).
//!
//! ```text
//! map ── in_order (order)           the memory order of the result
//!         └── update ── apply, map_apart (block)     pieces for threads; blocks or lines for the vectors
//!                        └── run                     the body, compiled for the instruction set
//! modify, map_over (in_place)       results written over an input          cuda, trace   a GPU
//! ```

mod block;
pub(crate) mod cuda;
mod in_place;
mod order;
pub(crate) mod trace;

use phalanx_tensor::{Dims, Element, Error, Loops, Result, Tensor, broadcast_shapes};

use block::map_apart;
pub(crate) use block::{LineFn, Lines, apply, apply_to_lines, run};
use cuda::Expression;
pub(crate) use in_place::{map_over, modify};
pub(crate) use order::in_order;

use crate::block_reader::{BLOCK, BlockReader, BlockScratch, BlockSplit, for_each_part, line_width};
use crate::check;
use crate::dispatch::by_device;
use crate::real::{Real, for_real};
use crate::simd::{Float, Isa, Kernel, Vector, dispatch, each};

/// A function of `N` elements.
pub(crate) trait Pointwise<const N: usize>: Copy + Sync {
    /// The function, on vectors. To be marked `#[inline(always)]`.
    fn eval<V: Vector>(self, x: [V; N]) -> V;
}

/// Declares a [`Pointwise`] function: `pointwise!(Name, |x, y| body)`, or with numbers beside the elements
/// `pointwise!(Name { alpha }, |x| body)`. In the body `V` is the vector type.
macro_rules! pointwise {
    ($name:ident, |$($x:ident),+| $body:expr) => {
        #[derive(Clone, Copy)]
        struct $name;
        $crate::pointwise::pointwise!(@impl $name [] |$($x),+| $body);
    };
    ($name:ident { $($number:ident),+ }, |$($x:ident),+| $body:expr) => {
        #[derive(Clone, Copy)]
        struct $name {
            $($number: f64),+
        }
        $crate::pointwise::pointwise!(@impl $name [$($number),+] |$($x),+| $body);
    };
    (@impl $name:ident [$($number:ident),*] |$($x:ident),+| $body:expr) => {
        impl $crate::pointwise::Pointwise<{ [$(stringify!($x)),+].len() }> for $name {
            #[inline(always)]
            fn eval<V: $crate::simd::Vector>(self, [$($x),+]: [V; { [$(stringify!($x)),+].len() }]) -> V {
                let Self { $($number),* } = self;
                $body
            }
        }
    };
}
pub(crate) use pointwise;

/// Declares operations that apply a [`Pointwise`] function to floating-point tensors: `name(x, y) = body;`, or with numbers beside
/// the elements `name(x) { alpha } = body;`. The function takes the tensors, then the numbers.
macro_rules! elementwise {
    ($($(#[$doc:meta])* $name:ident($($x:ident),+) $({ $($number:ident),+ })? = $body:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// If the shapes do not broadcast, dtypes or devices differ, or the dtype is no floating-point one.
        pub fn $name($($x: &phalanx_tensor::Tensor),+ $($(, $number: f64)+)?) -> phalanx_tensor::Result<phalanx_tensor::Tensor> {
            $crate::pointwise::pointwise!(Function $({ $($number),+ })?, |$($x),+| $body);
            $crate::pointwise::map(stringify!($name), Function $({ $($number),+ })?, [$($x),+])
        }
    )*};
}
pub(crate) use elementwise;

/// A number in every lane.
#[inline(always)]
pub(crate) fn c<V: Vector>(x: f64) -> V {
    V::splat(V::Elem::from_f64(x))
}

/// Elements that a thread works on at least: 32 KiB of f32.
pub(crate) const PIECE: usize = 8 * BLOCK;

/// Elements of a task, in whole blocks, for a tensor of `elements`. Tasks of large tensors are larger, so that the hardware prefetches.
pub(crate) fn piece_of(elements: usize) -> usize {
    const PIECES: usize = 64;
    (elements / PIECES).clamp(PIECE, 32 * PIECE).next_multiple_of(BLOCK)
}

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
    in_order(op, inputs[0].dtype(), inputs, |inputs, out| map_into(op, f, inputs, out))
}

/// [`map`] into a tensor of the broadcast shape and the inputs' dtype, which shares no storage with them.
pub(crate) fn map_into<const N: usize>(
    op: &'static str,
    f: impl Pointwise<N>,
    inputs: [&Tensor; N],
    out: &mut Tensor,
) -> Result<()> {
    by_device(
        out,
        |out| for_real!(op, out.dtype(), T => map_typed::<T, N>(op, &|inputs, out| run(f, inputs, out), inputs, out)),
        |out| cuda::map(op, f, inputs, out),
    )
}

fn map_typed<T: Real, const N: usize>(
    op: &'static str,
    f: LineFn<'_, T::Wide, N>,
    inputs: [&Tensor; N],
    out: &mut Tensor,
) -> Result<()> {
    let sources: [BlockReader<'_, T>; N] = BlockReader::open_all(op, inputs, out.shape())?;
    let ways = (BlockSplit::of(&sources), line_width(&sources));
    update(op, out, |start, target: &mut [T]| {
        if sources.iter().all(BlockReader::is_contiguous) {
            let x = std::array::from_fn(|n| T::input(sources[n].block(start, target.len(), &mut [])));
            return apply(f, x, T::output(target));
        }
        map_apart(f, &sources, ways, start, target);
    })
}

/// Applies a scalar function to the broadcast inputs, for dtypes that have no vectors of their own; on a GPU it is
/// `expression`. `T` is the inputs' stored type, `U` the output's.
pub(crate) fn map_scalar<T: Element, U: Element, const N: usize>(
    op: &'static str,
    f: impl Fn([T; N]) -> U + Sync,
    expression: &Expression<'_>,
    inputs: [&Tensor; N],
    out: &mut Tensor,
) -> Result<()> {
    map_blocks(op, &|inputs, out| dispatch(Scalars { f: &f, inputs, out }), expression, inputs, out)
}

/// A scalar function of the elements of slices of one length.
struct Scalars<'a, T, U, F, const N: usize> {
    f: &'a F,
    inputs: [&'a [T]; N],
    out: &'a mut [U],
}

impl<T: Copy, U, F: Fn([T; N]) -> U, const N: usize> Kernel for Scalars<'_, T, U, F, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let Scalars { f, inputs, out } = self;
        assert!(inputs.iter().all(|x| x.len() == out.len())); // lets the loop go without bounds checks
        for (j, to) in out.iter_mut().enumerate() {
            *to = f(each(|n| inputs[n][j]));
        }
    }
}

/// A function of `N` slices of one length into another, a trait object as [`LineFn`] is.
pub(crate) type BlockFn<'a, T, U, const N: usize> = &'a (dyn Fn([&[T]; N], &mut [U]) + Sync);

/// [`map_scalar`] by a function of whole blocks of stored elements.
pub(crate) fn map_blocks<T: Element, U: Element, const N: usize>(
    op: &'static str,
    f: BlockFn<'_, T, U, N>,
    expression: &Expression<'_>,
    inputs: [&Tensor; N],
    out: &mut Tensor,
) -> Result<()> {
    evaluate(op, expression, inputs, out, |out| map_stored(op, f, inputs, out))
}

/// Computes `out` by `cpu`, or on a GPU as the expression of the inputs, which broadcast to it.
#[inline(always)]
pub(crate) fn evaluate<const N: usize>(
    op: &'static str,
    expression: &Expression<'_>,
    inputs: [&Tensor; N],
    out: &mut Tensor,
    cpu: impl FnOnce(&mut Tensor) -> Result<()>,
) -> Result<()> {
    by_device(out, cpu, |out| cuda::evaluate(op, expression, inputs, out))
}

/// [`map_blocks`] on a CPU.
pub(crate) fn map_stored<T: Element, U: Element, const N: usize>(
    op: &'static str,
    f: BlockFn<'_, T, U, N>,
    inputs: [&Tensor; N],
    out: &mut Tensor,
) -> Result<()> {
    let sources: [BlockReader<'_, T>; N] = BlockReader::open_all(op, inputs, out.shape())?;
    let cut = BlockSplit::of(&sources);
    update(op, out, |start, target: &mut [U]| {
        let mut scratch: [BlockScratch<T>; N] = std::array::from_fn(|_| BlockScratch::new());
        cut.blocks(start, target, |start, target| {
            let mut scratch = scratch.iter_mut();
            let inputs: [&[T]; N] = std::array::from_fn(|n| match scratch.next() {
                Some(scratch) => scratch.block(&sources[n], start, target.len()),
                None => &[],
            });
            f(inputs, target);
        });
    })
}

/// Calls `f` with pieces of `out`'s elements, each with the row-major index of its first element, on the device's
/// threads. `f` changes the elements in place. `out` may have any strides as long as it
/// does not overlap itself.
pub(crate) fn update<T: Element>(
    op: &'static str,
    out: &mut Tensor,
    f: impl Fn(usize, &mut [T]) + Sync,
) -> Result<()> {
    update_by(op, out, &f)
}

/// [`update`], compiled once for all functions.
fn update_by<T: Element>(
    op: &'static str,
    out: &mut Tensor,
    f: &(dyn Fn(usize, &mut [T]) + Sync),
) -> Result<()> {
    if !out.is_contiguous() {
        return update_strided(op, out, f);
    }
    let (offset, numel) = (out.offset(), out.numel());
    if numel <= PIECE {
        let mut target = out.write::<T>(op)?;
        f(0, &mut target[offset..offset + numel]);
        return Ok(());
    }
    let (pool, size) = (out.device().pool()?, piece_of(numel));
    let mut target = out.write::<T>(op)?;
    let target = &mut target[offset..offset + numel];
    pool.for_each_chunk(target, size, |piece, target| f(piece * size, target));
    Ok(())
}

/// [`update`] of a strided tensor: each block is copied to a contiguous buffer and back.
#[inline(never)]
fn update_strided<T: Element>(op: &'static str, out: &mut Tensor, f: &dyn Fn(usize, &mut [T])) -> Result<()> {
    refuse_overlap(op, out)?;
    let layout = out.layout().clone();
    let mut target = out.write::<T>(op)?;
    let loops = Loops::new(layout.shape(), [layout.strides()]);
    let mut scratch = [T::zeroed(); BLOCK];
    for start in (0..layout.numel()).step_by(BLOCK) {
        let block = &mut scratch[..BLOCK.min(layout.numel() - start)];
        let (at, len) = (layout.offset(), block.len());
        for_each_part(&loops, start, len, |part, from, stride| {
            let strided = target[at + from..].iter().step_by(stride);
            block[part].iter_mut().zip(strided).for_each(|(to, &x)| *to = x);
        });
        f(start, block);
        for_each_part(&loops, start, len, |part, to, stride| {
            let strided = target[at + to..].iter_mut().step_by(stride);
            strided.zip(&block[part]).for_each(|(to, &x)| *to = x);
        });
    }
    Ok(())
}

/// An error if two indices of a destination share an element.
pub(crate) fn refuse_overlap(op: &'static str, out: &Tensor) -> Result<()> {
    if out.is_contiguous() || !out.layout().overlaps_itself() {
        return Ok(());
    }
    let why =
        format!("the destination overlaps itself: shape {:?}, strides {:?}", out.shape(), out.strides());
    Err(Error::invalid(op, why))
}
