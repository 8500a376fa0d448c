//! Pointwise operations whose result is written over an input: [`modify`] for operations in place, [`map_over`] for an input that is not needed
//! any more.

use phalanx_tensor::{Result, Tensor};

use super::order::contiguous_if_scattered;
use super::{LineFn, Lines, Pointwise, apply, cuda, map, run, update};
use crate::block_reader::{BLOCK, BlockReader, BlockScratch};
use crate::check;
use crate::dispatch::by_device;
use crate::real::{Real, for_real};

/// Buffer length for a small tensor: clearing a whole block's buffer would take longer than the operation.
const FEW: usize = BLOCK / 16;
/// Buffer length for a larger tensor.
const MANY: usize = BLOCK / 2;

/// Sets `to` to `f(to, x)` in place, for floating-point tensors; without an `x` the second element is the first
/// again. `to` may be any view that does not overlap itself; `x` has its shape and is converted to its dtype first.
pub(crate) fn modify(
    op: &'static str,
    f: impl Pointwise<2>,
    to: &mut Tensor,
    x: Option<&Tensor>,
) -> Result<()> {
    check::float(op, to)?;
    super::refuse_overlap(op, to)?;
    let x = x.map(|x| operand(op, to, x)).transpose()?;
    if let Some(order) = to.layout().memory_order() {
        let x = x.map(|x| x.permute(&order)).transpose()?;
        return modify_in_order(op, f, &mut to.permute(&order)?, x);
    }
    modify_in_order(op, f, to, x)
}

/// [`modify`] of a tensor whose dimensions are in the order of memory.
fn modify_in_order(op: &'static str, f: impl Pointwise<2>, to: &mut Tensor, x: Option<Tensor>) -> Result<()> {
    let x = x.map(contiguous_if_scattered).transpose()?;
    by_device(
        to,
        |to| for_real!(op, to.dtype(), T => modify_typed::<T>(op, &|inputs, out| run(f, inputs, out), to, x.as_ref())),
        |to| {
            let before = to.clone();
            cuda::map(op, f, [&before, x.as_ref().unwrap_or(&before)], to)
        },
    )
}

/// [`map`] of two tensors that writes the result over `y` where nothing else refers to it and it is of `x`'s shape, so that no memory
/// is taken; with the same bits.
pub(crate) fn map_over(op: &'static str, f: impl Pointwise<2>, x: &Tensor, mut y: Tensor) -> Result<Tensor> {
    if !y.is_contiguous() || !y.is_sole_owner() || !y.same_shape(x) {
        return map(op, f, [x, &y]);
    }
    check::float(op, x)?;
    check::same(op, &[x, &y])?;
    by_device(
        &mut y,
        |y| for_real!(op, y.dtype(), T => modify_typed::<T>(op, &|lines, out| run(f, swapped(lines), out), y, Some(x))),
        |y| {
            let before = y.clone();
            cuda::map(op, f, [x, &before], y)
        },
    )?;
    Ok(y)
}

/// The second input first.
fn swapped<'a, W>(Lines { x: [y, x], steps: [of_y, of_x], width }: Lines<'a, W, 2>) -> Lines<'a, W, 2> {
    Lines { x: [x, y], steps: [of_x, of_y], width }
}

fn operand(op: &'static str, to: &Tensor, x: &Tensor) -> Result<Tensor> {
    check::same_device(op, &[to, x])?;
    check::float(op, x)?;
    check::shape(op, "a tensor", x, to.shape())?;
    let x = crate::ops::cast(x, to.dtype())?;
    if to.shares_storage(&x) { x.copy() } else { Ok(x) }
}

fn modify_typed<T: Real>(
    op: &'static str,
    f: LineFn<'_, T::Wide, 2>,
    to: &mut Tensor,
    x: Option<&Tensor>,
) -> Result<()> {
    if to.numel() <= FEW { modify_by::<T, FEW>(op, f, to, x) } else { modify_by::<T, MANY>(op, f, to, x) }
}

/// In blocks of `B` elements, each of which is copied first.
fn modify_by<T: Real, const B: usize>(
    op: &'static str,
    f: LineFn<'_, T::Wide, 2>,
    to: &mut Tensor,
    x: Option<&Tensor>,
) -> Result<()> {
    let source = x.map(|x| BlockReader::<T>::open(op, x, x.shape())).transpose()?;
    update(op, to, |start, target: &mut [T]| {
        let (mut before, mut other) = ([T::zeroed(); B], BlockScratch::new());
        for (i, target) in target.chunks_mut(B).enumerate() {
            let before = &mut before[..target.len()];
            before.copy_from_slice(target);
            let before = T::input(before);
            let x = source.as_ref().map_or(before, |s| other.input(s, start + i * B, target.len()));
            apply(f, [before, x], T::output(target));
        }
    })
}
