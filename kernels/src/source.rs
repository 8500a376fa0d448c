//! A tensor's elements in row-major order, block by block, whatever its strides and however it is broadcast.

use phalanx_tensor::{Element, Layout, Loops, Read, Result, Tensor};

use crate::real::Real;

/// Elements that a block holds at most: small enough for all blocks of an operation to stay in the first-level
/// cache, large enough to hide what a block costs.
pub(crate) const BLOCK: usize = 1024;

/// An open tensor, seen in a shape that it broadcasts to.
pub(crate) struct Source<'a, T> {
    elements: Read<'a, T>,
    offset: usize,
    contiguous: bool,
    loops: Loops<1>,
}

impl<'a, T: Element> Source<'a, T> {
    /// Opens `tensor`, whose shape broadcasts to `shape`.
    pub(crate) fn open(op: &'static str, tensor: &'a Tensor, shape: &[usize]) -> Result<Source<'a, T>> {
        let same = tensor.shape() == shape;
        let seen: Layout =
            if same { tensor.layout().clone() } else { tensor.broadcast_to(shape)?.layout().clone() };
        Ok(Source {
            elements: tensor.read(op)?,
            offset: seen.offset(),
            contiguous: seen.is_contiguous(),
            loops: Loops::new(seen.shape(), [seen.strides()]),
        })
    }

    /// Opens several.
    pub(crate) fn open_all<const N: usize>(
        op: &'static str,
        tensors: [&'a Tensor; N],
        shape: &[usize],
    ) -> Result<[Source<'a, T>; N]> {
        let mut opened = [const { None }; N];
        for (slot, tensor) in opened.iter_mut().zip(tensors) {
            *slot = Some(Source::open(op, tensor, shape)?);
        }
        Ok(opened.map(|source| source.unwrap_or_else(|| unreachable!("every slot was filled"))))
    }

    /// Elements `start .. start + len` in row-major order: where they lie if they lie together, else gathered
    /// into `scratch`, which must have room.
    #[inline]
    pub(crate) fn block<'b>(&'b self, start: usize, len: usize, scratch: &'b mut [T]) -> &'b [T] {
        if self.contiguous {
            return &self.elements[self.offset + start..][..len];
        }
        self.gather(start, &mut scratch[..len], |to, from| *to = from);
        &scratch[..len]
    }

    /// Copies the elements from `start` on.
    pub(crate) fn copy_to(&self, start: usize, to: &mut [T]) {
        if self.contiguous {
            to.copy_from_slice(&self.elements[self.offset + start..][..to.len()]);
        } else {
            self.gather(start, to, |to, from| *to = from);
        }
    }

    /// Calls `put` for each element of a slice with the elements from `start` on.
    fn gather<U>(&self, start: usize, to: &mut [U], put: impl Fn(&mut U, T)) {
        let (inner, stride) = (self.loops.inner(), self.loops.inner_strides()[0]);
        let (mut run, mut skip, mut done) = (start / inner.max(1), start % inner.max(1), 0);
        while done < to.len() {
            let count = (inner - skip).min(to.len() - done);
            let from = self.offset + self.loops.start(run)[0] + skip * stride;
            let part = &mut to[done..done + count];
            match stride {
                0 => part.iter_mut().for_each(|to| put(to, self.elements[from])),
                1 => part.iter_mut().zip(&self.elements[from..from + count]).for_each(|(to, &x)| put(to, x)),
                _ => {
                    let strided = self.elements[from..].iter().step_by(stride);
                    part.iter_mut().zip(strided).for_each(|(to, &x)| put(to, x));
                }
            }
            (run, skip, done) = (run + 1, 0, done + count);
        }
    }
}

impl<T: Real> Source<'_, T> {
    /// All elements in the type that is computed in, if they lie together in it.
    #[inline]
    pub(crate) fn all_wide(&self) -> Option<&[T::Wide]> {
        if self.contiguous { T::as_wide(&self.elements[self.offset..]) } else { None }
    }

    /// [`Source::block`] in the type that is computed in.
    #[inline]
    pub(crate) fn wide<'b>(&'b self, start: usize, len: usize, scratch: &'b mut [T::Wide]) -> &'b [T::Wide] {
        if self.contiguous {
            let block = &self.elements[self.offset + start..][..len];
            if let Some(wide) = T::as_wide(block) {
                return wide;
            }
            block.iter().zip(&mut *scratch).for_each(|(&x, to)| *to = x.widen());
        } else {
            self.gather(start, &mut scratch[..len], |to, from: T| *to = from.widen());
        }
        &scratch[..len]
    }
}
