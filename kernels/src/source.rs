//! A tensor's elements in row-major order, block by block, whatever its strides and however it is broadcast.

use std::ops::Range;

use phalanx_tensor::{Element, Loops, Read, Result, Tensor};

use crate::real::{Real, for_real};
use crate::simd::Float;

/// Elements that a block holds at most: small enough for all blocks of an operation to stay in the first-level
/// cache, large enough to hide what a block costs.
pub(crate) const BLOCK: usize = 1024;

/// An open tensor, seen in a shape that it broadcasts to.
pub(crate) struct Source<'a, T> {
    elements: Read<'a, T>,
    offset: usize,
    /// `None` if the elements lie together. Boxed: an open tensor is moved about, and most have none.
    loops: Option<Box<Loops<1>>>,
}

impl<'a, T: Element> Source<'a, T> {
    /// Opens `tensor`, whose shape broadcasts to `shape`.
    #[inline]
    pub(crate) fn open(op: &'static str, tensor: &'a Tensor, shape: &[usize]) -> Result<Source<'a, T>> {
        let same = tensor.shape() == shape;
        let loops = match same && tensor.is_contiguous() {
            true => None,
            false => Some(loops_over(tensor, shape)?),
        };
        Ok(Source { elements: tensor.read(op)?, offset: tensor.offset(), loops })
    }

    /// Opens several.
    #[inline]
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

    /// Whether the elements lie together, so that no block is ever gathered.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.loops.is_none()
    }

    /// Elements `start .. start + len` in row-major order: where they lie if they lie together, else gathered
    /// into `scratch`, which must have room.
    #[inline]
    pub(crate) fn block<'b>(&'b self, start: usize, len: usize, scratch: &'b mut [T]) -> &'b [T] {
        let Some(loops) = &self.loops else { return &self.elements[self.offset + start..][..len] };
        self.gather(loops, start, &mut scratch[..len], |to, from| *to = from);
        &scratch[..len]
    }

    /// Where element `start` lies, if all lie together; it need not exist.
    pub(crate) fn address(&self, start: usize) -> Option<*const T> {
        self.is_contiguous().then(|| self.elements.as_ptr().wrapping_add(self.offset + start))
    }

    /// Copies the elements from `start` on.
    pub(crate) fn copy_to(&self, start: usize, to: &mut [T]) {
        match &self.loops {
            None => to.copy_from_slice(&self.elements[self.offset + start..][..to.len()]),
            Some(loops) => self.gather(loops, start, to, |to, from| *to = from),
        }
    }

    /// Calls `put` for each element of a slice with the elements from `start` on.
    fn gather<U>(&self, loops: &Loops<1>, start: usize, to: &mut [U], put: impl Fn(&mut U, T)) {
        for_each_part(loops, start, to.len(), |part, at, stride| {
            let (part, from) = (&mut to[part], &self.elements[self.offset + at..]);
            match stride {
                0 => part.iter_mut().for_each(|to| put(to, from[0])),
                1 => part.iter_mut().zip(from).for_each(|(to, &x)| put(to, x)),
                _ => part.iter_mut().zip(from.iter().step_by(stride)).for_each(|(to, &x)| put(to, x)),
            }
        });
    }
}

/// All elements as f64, for the few that a kernel needs before it starts. Not by way of a tensor, which a meta device
/// would have to count too.
pub(crate) fn values_f64(op: &'static str, x: &Tensor) -> Result<Vec<f64>> {
    for_real!(op, x.dtype(), T => {
        let source = Source::<T>::open(op, x, x.shape())?;
        let value = |i| source.wide(i, 1, &mut [<T as Real>::Wide::ZERO])[0].to_f64();
        Ok((0..x.numel()).map(value).collect())
    })
}

impl<T: Real> Source<'_, T> {
    /// All elements in the type that is computed in, if they lie together in it.
    #[inline]
    pub(crate) fn all_wide(&self) -> Option<&[T::Wide]> {
        if self.is_contiguous() { T::as_wide(&self.elements[self.offset..]) } else { None }
    }

    /// Whether [`Source::wide`] finds the elements where they lie and needs no scratch.
    pub(crate) fn is_wide(&self) -> bool {
        self.is_contiguous() && T::as_wide(&[]).is_some()
    }

    /// [`Source::copy_to`] in the type that is computed in.
    pub(crate) fn copy_wide(&self, start: usize, to: &mut [T::Wide]) {
        match &self.loops {
            None => T::widen_all(&self.elements[self.offset + start..][..to.len()], to),
            Some(loops) => self.gather(loops, start, to, |to, from: T| *to = from.widen()),
        }
    }

    /// [`Source::block`] in the type that is computed in.
    #[inline]
    pub(crate) fn wide<'b>(&'b self, start: usize, len: usize, scratch: &'b mut [T::Wide]) -> &'b [T::Wide] {
        match &self.loops {
            None => {
                let block = &self.elements[self.offset + start..][..len];
                if let Some(wide) = T::as_wide(block) {
                    return wide;
                }
                T::widen_all(block, &mut scratch[..len]);
            }
            Some(loops) => self.gather(loops, start, &mut scratch[..len], |to, from: T| *to = from.widen()),
        }
        &scratch[..len]
    }
}

/// The loops over a tensor broadcast to `shape`.
#[inline(never)]
fn loops_over(tensor: &Tensor, shape: &[usize]) -> Result<Box<Loops<1>>> {
    let seen = tensor.broadcast_to(shape)?;
    Ok(Box::new(Loops::new(shape, [seen.strides()])))
}

/// Calls `f(part, at, stride)` for the parts of `len` elements from number `start` on that lie a stride apart: which
/// they are, counted from `start`, and where the first lies.
#[inline]
pub(crate) fn for_each_part(
    loops: &Loops<1>,
    start: usize,
    len: usize,
    mut f: impl FnMut(Range<usize>, usize, usize),
) {
    let (inner, [stride]) = (loops.inner(), loops.inner_strides());
    let (mut run, mut skip, mut done) = (start / inner.max(1), start % inner.max(1), 0);
    while done < len {
        let count = (inner - skip).min(len - done);
        f(done..done + count, loops.start(run)[0] + skip * stride, stride);
        (run, skip, done) = (run + 1, 0, done + count);
    }
}
