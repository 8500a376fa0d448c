//! Strided tensors as a head's kernels want them: padded rows of the wide type, and tiles of what is added to scores.

use phalanx_tensor::{DType, Element, Loops, Read, Result, Tensor};

use super::tile::Tile;
use crate::gemm::{Scratch, with_scratch};
use crate::real::Real;
use crate::simd::Float;

/// Bytes that rows are padded to: the longest vector.
const PAD_BYTES: usize = 64;

/// A row length padded for `T`'s vectors.
pub(super) fn padded<T: Float>(len: usize) -> usize {
    len.next_multiple_of(PAD_BYTES / size_of::<T>())
}

/// Calls `f` with pieces of this thread's scratch memory, of any content.
pub(super) fn carve<T: Scratch, const N: usize>(lens: [usize; N], f: impl FnOnce([&mut [T]; N])) {
    // Whole cache lines, so that each piece begins at one.
    let lens = lens.map(padded::<T>);
    with_scratch(lens.iter().sum(), |mut rest: &mut [T]| {
        f(lens.map(|len| rest.split_off_mut(..len).unwrap_or_default()));
    });
}

/// An open tensor [.., rows, columns] by heads.
pub(super) struct Heads<'a, T> {
    elements: Read<'a, T>,
    starts: Vec<usize>,
    row_stride: usize,
    col_stride: usize,
    columns: usize,
}

impl<'a, T: Element> Heads<'a, T> {
    pub(super) fn open(op: &'static str, tensor: &'a Tensor) -> Result<Heads<'a, T>> {
        Heads::broadcast(op, tensor, tensor.shape())
    }

    /// Seen in a shape that it broadcasts to.
    fn broadcast(op: &'static str, tensor: &'a Tensor, shape: &[usize]) -> Result<Heads<'a, T>> {
        let seen = tensor.broadcast_to(shape)?;
        let lead = shape.len() - 2;
        let strides = seen.strides();
        // Loops over the leading dimensions, and one more of a single element to be their run.
        let heads: usize = shape[..lead].iter().product();
        let loops = Loops::new(&shape[..lead], [&strides[..lead]]);
        let (inner, [step]) = (loops.inner().max(1), loops.inner_strides());
        let start = |head: usize| seen.offset() + loops.start(head / inner)[0] + head % inner * step;
        Ok(Heads {
            elements: tensor.read(op)?,
            starts: (0..heads).map(start).collect(),
            row_stride: strides[lead],
            col_stride: strides[lead + 1],
            columns: shape[lead + 1],
        })
    }
}

impl<T: Real> Heads<'_, T> {
    /// Rows `first ..` of a head, widened, as many as `to` has rows of `stride` for but at most `rows`; what is left is
    /// set to 0.
    pub(super) fn rows(&self, head: usize, first: usize, rows: usize, to: &mut [T::Wide], stride: usize) {
        let mut done = 0;
        for (i, to) in to.chunks_exact_mut(stride.max(1)).take(rows).enumerate() {
            let start = self.starts[head] + (first + i) * self.row_stride;
            let (to, rest) = to.split_at_mut(self.columns);
            if self.col_stride == 1 {
                T::widen_all(&self.elements[start..][..self.columns], to);
            } else {
                let at = |j: usize| self.elements[start + j * self.col_stride];
                to.iter_mut().enumerate().for_each(|(j, to)| *to = at(j).widen());
            }
            rest.fill(T::Wide::ZERO);
            done += 1;
        }
        to[done * stride..].fill(T::Wide::ZERO);
    }
}

/// Rows without their padding, rounded.
pub(super) fn store<T: Real>(to: &mut [T], from: &[T::Wide], row: usize, stride: usize) {
    for (to, from) in to.chunks_exact_mut(row.max(1)).zip(from.chunks(stride.max(1))) {
        T::narrow_all(&from[..row], to);
    }
}

/// A mask over the scores.
pub(super) enum Mask<'a, T> {
    None,
    /// True where a key may be seen.
    Bool(Heads<'a, u8>),
    Float(Heads<'a, T>),
}

impl<'a, T: Real> Mask<'a, T> {
    pub(super) fn open(op: &'static str, mask: Option<&'a Tensor>, scores: &[usize]) -> Result<Mask<'a, T>> {
        Ok(match mask {
            None => Mask::None,
            Some(mask) if mask.dtype() == DType::Bool => Mask::Bool(Heads::broadcast(op, mask, scores)?),
            Some(mask) => Mask::Float(Heads::broadcast(op, mask, scores)?),
        })
    }

    /// What is added to a tile's scores [keys, width], in `to`; nothing without a mask.
    pub(super) fn tile<'b>(&self, tile: &Tile, to: &'b mut [T::Wide]) -> Option<&'b [T::Wide]> {
        match self {
            Mask::None => return None,
            Mask::Bool(mask) => {
                mask.turned(tile, to, |seen| if seen == 0 { -T::Wide::INFINITY } else { T::Wide::ZERO });
            }
            Mask::Float(mask) => mask.turned(tile, to, T::widen),
        }
        Some(&to[..tile.keys * tile.width])
    }
}

impl<T: Element> Heads<'_, T> {
    /// A tile's elements [queries, keys] as [keys, width].
    fn turned<U: Float>(&self, tile: &Tile, to: &mut [U], f: impl Fn(T) -> U) {
        let first = self.starts[tile.head] + tile.query * self.row_stride + tile.key * self.col_stride;
        for (k, to) in to.chunks_exact_mut(tile.width).take(tile.keys).enumerate() {
            to[tile.queries..].fill(U::ZERO);
            for (q, to) in to[..tile.queries].iter_mut().enumerate() {
                *to = f(self.elements[first + k * self.col_stride + q * self.row_stride]);
            }
        }
    }
}
