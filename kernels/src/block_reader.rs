//! A tensor's elements in row-major order, block by block, whatever its strides and however it is broadcast.

mod blocks;

use std::ops::Range;

use phalanx_tensor::{Element, Loops, Read, Result, Tensor};

use crate::data_movement::fill;
use crate::real::Input;
use crate::real::{Real, for_real};
use crate::simd::{Float, LANES_MAX, dispatch};
use blocks::{WidenLines, WidenStrided, WidenTransposed};

pub(crate) use blocks::{BlockScratch, BlockSplit, GROUP, line_width};

/// Elements that a block holds at most: small enough for all blocks of an operation to stay in the first-level
/// cache, large enough to hide what a block costs.
pub(crate) const BLOCK: usize = 1024;

/// Elements of a run that is not worth a call.
const FEW: usize = 16;
/// Elements of a run that is worth one.
const SHORT: usize = 256;

/// Sets a slice to converted elements that lie a distance apart.
type ConvertRun<'a, T, U> = &'a dyn Fn(&[T], usize, &mut [U]);

/// An open tensor, seen in a shape that it broadcasts to.
pub(crate) struct BlockReader<'a, T> {
    elements: Read<'a, T>,
    offset: usize,
    /// `None` if the elements lie together. Boxed: an open tensor is moved about, and most have none.
    loops: Option<Box<Loops<1>>>,
    /// After how many elements they are the same again, if there are few: 1 of a single number. 0 if they are not.
    period: usize,
}

impl<'a, T: Element> BlockReader<'a, T> {
    /// Opens `tensor`, whose shape broadcasts to `shape`.
    #[inline]
    pub(crate) fn open(op: &'static str, tensor: &'a Tensor, shape: &[usize]) -> Result<BlockReader<'a, T>> {
        let same = tensor.shape() == shape;
        let loops = match same && tensor.is_contiguous() {
            true => None,
            false => Some(loops_over(tensor, shape)?),
        };
        let period = loops.as_deref().map_or(0, period);
        Ok(BlockReader { elements: tensor.read(op)?, offset: tensor.offset(), loops, period })
    }

    /// Opens several.
    #[inline]
    pub(crate) fn open_all<const N: usize>(
        op: &'static str,
        tensors: [&'a Tensor; N],
        shape: &[usize],
    ) -> Result<[BlockReader<'a, T>; N]> {
        let mut opened = [const { None }; N];
        for (slot, tensor) in opened.iter_mut().zip(tensors) {
            *slot = Some(BlockReader::open(op, tensor, shape)?);
        }
        Ok(opened.map(|source| source.unwrap_or_else(|| unreachable!("every slot was filled"))))
    }
}

impl<T: Element> BlockReader<'_, T> {
    /// Whether the elements lie together, so that no block is ever gathered.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.loops.is_none()
    }

    /// Whether neighbours in row-major order lie apart, so that blocks of several rows are read faster than single ones.
    pub(crate) fn is_across(&self) -> bool {
        self.loops.as_ref().is_some_and(|loops| !matches!(loops.inner_strides(), [0] | [1]))
    }

    /// How many elements follow each other at one distance.
    pub(crate) fn run(&self) -> usize {
        self.loops.as_ref().map_or(usize::MAX, |loops| loops.inner())
    }

    /// If rows of `width` elements lie across memory and beside each other, as a transposed tensor's: how many of them, and how far
    /// apart a row's elements are.
    pub(crate) fn across(&self, width: usize) -> Option<[usize; 2]> {
        let loops = self.loops.as_deref().filter(|_| self.is_across())?;
        let (sizes, strides, [stride]) = (loops.sizes(), loops.strides(), loops.inner_strides());
        let outer = strides.len().checked_sub(2)?;
        (strides[outer] == [1] && loops.inner() == width).then(|| [sizes[outer], stride])
    }

    /// Where element `start` lies in the storage.
    fn place(&self, start: usize) -> usize {
        self.offset
            + self.loops.as_deref().map_or(start, |loops| {
                let ([stride], inner) = (loops.inner_strides(), loops.inner().max(1));
                loops.start(start / inner)[0] + start % inner * stride
            })
    }

    /// Elements `start .. start + len` in row-major order: in place if they lie together, else gathered
    /// into `scratch`, which must have room.
    #[inline]
    pub(crate) fn block<'b>(&'b self, start: usize, len: usize, scratch: &'b mut [T]) -> &'b [T] {
        if self.is_contiguous() {
            return &self.elements[self.offset + start..][..len];
        }
        self.copy_to(start, &mut scratch[..len]);
        &scratch[..len]
    }

    /// Elements `start .. start + len`, if they lie together, all or in a run.
    #[inline]
    fn contiguous_run(&self, start: usize, len: usize) -> Option<&[T]> {
        let at = match &self.loops {
            None => start,
            Some(loops) => {
                let inner = loops.inner().max(1);
                let skip = start % inner;
                if loops.inner_strides() != [1] || skip + len > inner || len == 0 {
                    return None;
                }
                loops.start(start / inner)[0] + skip
            }
        };
        Some(&self.elements[self.offset + at..][..len])
    }

    /// Where element `start` lies, if all lie together; it need not exist.
    pub(crate) fn address(&self, start: usize) -> Option<*const T> {
        self.is_contiguous().then(|| self.elements.as_ptr().wrapping_add(self.offset + start))
    }

    /// Copies the elements from `start` on.
    pub(crate) fn copy_to(&self, start: usize, to: &mut [T]) {
        let apart = |from: &[T], stride, to: &mut [T]| {
            to.iter_mut().zip(from.iter().step_by(stride)).for_each(|(to, &x)| *to = x);
        };
        self.gather(start, to, |x| x, [&|from, _, to| to.copy_from_slice(from), &apart]);
    }

    /// Sets the elements of a slice to those from `start` on, converted: those of a run that lie together by the first of `runs`,
    /// those that lie apart by the second, and single ones by `one`.
    fn gather<U: Element>(
        &self,
        start: usize,
        to: &mut [U],
        one: impl Fn(T) -> U,
        [together, apart]: [ConvertRun<'_, T, U>; 2],
    ) {
        let Some(loops) = &self.loops else {
            return together(&self.elements[self.offset + start..][..to.len()], 1, to);
        };
        for_each_part(loops, start, to.len(), |part, at, stride| {
            let (part, from) = (&mut to[part], &self.elements[self.offset + at..]);
            match stride {
                0 if part.len() < 4 * FEW => part.fill(one(from[0])),
                0 => fill(part, one(from[0])),
                1 if part.len() < FEW => part.iter_mut().zip(from).for_each(|(to, &x)| *to = one(x)),
                1 => together(&from[..part.len()], 1, part),
                _ => apart(from, stride, part),
            }
        });
    }
}

/// All elements as f64, for the few that a kernel needs before it starts. Not by way of a tensor, which a meta device
/// would have to count too.
pub(crate) fn values_f64(op: &'static str, x: &Tensor) -> Result<Vec<f64>> {
    for_real!(op, x.dtype(), T => {
        let source = BlockReader::<T>::open(op, x, x.shape())?;
        let value = |i| source.wide(i, 1, &mut [<T as Real>::Wide::ZERO])[0].to_f64();
        Ok((0..x.numel()).map(value).collect())
    })
}

impl<T: Real> BlockReader<'_, T> {
    const WIDENED: [ConvertRun<'static, T, T::Wide>; 2] =
        [&|from, _, to| T::widen_all(from, to), &|from, stride, to| {
            dispatch(WidenStrided { from, stride, to })
        }];

    /// Whether [`BlockReader::wide`] finds the elements in place and needs no scratch.
    pub(crate) fn is_wide(&self) -> bool {
        self.is_input(false)
    }

    /// [`BlockReader::copy_to`] in the type that is computed in.
    pub(crate) fn copy_wide(&self, start: usize, to: &mut [T::Wide]) {
        let runs = Self::WIDENED;
        let short = |loops: &Loops<1>| loops.inner_strides() == [1] && (FEW..SHORT).contains(&loops.inner());
        let Some(loops) = self.loops.as_deref().filter(|loops| self.is_across() || short(loops)) else {
            return self.gather(start, to, T::widen, runs);
        };
        let (inner, len) = (loops.inner().max(1), to.len());
        // Whole runs may be transposed, and short ones are copied many at a time.
        let first = start.next_multiple_of(inner).min(start + len) - start;
        let rows = (len - first) / inner;
        self.gather(start, &mut to[..first], T::widen, runs);
        let (whole, rest) = to[first..].split_at_mut(rows * inner);
        match self.is_across() {
            true => self.copy_rows(start + first, [rows, inner], inner, whole),
            false => self.copy_runs(loops, (start + first) / inner, whole),
        }
        self.gather(start + len - rest.len(), rest, T::widen, runs);
    }

    /// Whole runs from number `run` on. Those along one dimension lie equally far apart and are one call.
    fn copy_runs(&self, loops: &Loops<1>, mut run: usize, mut to: &mut [T::Wide]) {
        let (len, outer) = (loops.inner(), loops.sizes().len() - 1);
        let (side, [stride]) = match outer {
            0 => (1, [0]),
            _ => (loops.sizes()[outer - 1], loops.strides()[outer - 1]),
        };
        while !to.is_empty() {
            let lines = (side - run % side).min(to.len() / len);
            let from = &self.elements[self.offset + loops.start(run)[0]..];
            let (now, later) = to.split_at_mut(lines * len);
            dispatch(WidenLines { from, stride, len, to: now });
            (run, to) = (run + lines, later);
        }
    }

    /// `rows` rows of `width` elements, which begin `apart` elements from each other, in the type that is computed in. Of a
    /// tensor whose rows lie across memory, as a transposed one's, several are read at a time and transposed.
    pub(crate) fn copy_rows(
        &self,
        start: usize,
        [rows, width]: [usize; 2],
        apart: usize,
        to: &mut [T::Wide],
    ) {
        let across = self.across(apart).filter(|_| start % apart + width <= apart);
        let Some([side, stride]) = across else {
            if width == apart && !self.is_across() {
                return self.copy_wide(start, &mut to[..rows * width]);
            }
            let rows = to[..rows * width].chunks_mut(width.max(1)).enumerate();
            return rows.for_each(|(row, to)| match &self.loops {
                Some(_) if self.is_across() => {
                    self.gather(start + row * apart, to, T::widen, Self::WIDENED);
                }
                _ => self.copy_wide(start + row * apart, to),
            });
        };
        let mut row = 0;
        while row < rows {
            let at = start + row * apart;
            let count = (rows - row).min(side - at / apart % side).min(LANES_MAX);
            let from = &self.elements[self.place(at)..];
            let to = &mut to[row * width..][..count * width];
            dispatch(WidenTransposed { from, stride, rows: count, width, to });
            row += count;
        }
    }

    /// `lines` lines of `len` elements that begin `stride` apart in memory, the first where element `start` lies: in place or
    /// widened in `room`, and how far apart they begin there. Halves stay in place if `halves` may.
    pub(crate) fn lines<'b>(
        &'b self,
        start: usize,
        [lines, len]: [usize; 2],
        stride: usize,
        halves: bool,
        room: &'b mut [T::Wide],
    ) -> (Input<'b, T::Wide>, usize) {
        let from = &self.elements[self.place(start)..][..(lines - 1) * stride + len];
        if halves || T::as_wide(&[]).is_some() {
            return (T::input(from), stride);
        }
        dispatch(WidenLines { from, stride, len, to: &mut room[..lines * len] });
        (Input::Wide(&room[..lines * len]), len)
    }

    /// Elements `start .. start + len`: in place if they lie together, else widened in `room`. So are halves, unless `halves`
    /// says that they may stay in place.
    pub(crate) fn input<'b>(
        &'b self,
        start: usize,
        len: usize,
        halves: bool,
        room: &'b mut [T::Wide],
    ) -> Input<'b, T::Wide> {
        if halves && let Some(lying) = self.contiguous_run(start, len) {
            return T::input(lying);
        }
        Input::Wide(self.wide(start, len, room))
    }

    /// Whether [`BlockReader::input`] and [`BlockReader::lines`] need no room.
    pub(crate) fn is_input(&self, halves: bool) -> bool {
        self.is_contiguous() && (halves || T::as_wide(&[]).is_some())
    }

    /// [`BlockReader::block`] in the type that is computed in.
    #[inline]
    pub(crate) fn wide<'b>(&'b self, start: usize, len: usize, scratch: &'b mut [T::Wide]) -> &'b [T::Wide] {
        if let Some(wide) = self.contiguous_run(start, len).and_then(T::as_wide) {
            return wide;
        }
        self.copy_wide(start, &mut scratch[..len]);
        &scratch[..len]
    }
}

/// See [`BlockReader`].
fn period(loops: &Loops<1>) -> usize {
    let (inner, outer) = (loops.inner(), loops.strides().len() - 1);
    match loops.inner_strides() {
        [0] if outer == 0 => 1,
        _ if outer == 1 && loops.strides()[0] == [0] && inner <= BLOCK / 2 => inner,
        _ => 0,
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

/// All elements in row-major order, widened.
pub(crate) fn widened<T: Real>(op: &'static str, tensor: &Tensor) -> Result<Vec<T::Wide>> {
    let source = BlockReader::<T>::open(op, tensor, tensor.shape())?;
    let mut wide = vec![T::Wide::ZERO; tensor.numel()];
    source.copy_wide(0, &mut wide);
    Ok(wide)
}

/// [`widened`] of a tensor that may be absent.
pub(crate) fn widened_if<T: Real>(op: &'static str, tensor: Option<&Tensor>) -> Result<Option<Vec<T::Wide>>> {
    tensor.map(|t| widened::<T>(op, t)).transpose()
}

/// All elements of a tensor that has the wide dtype already.
pub(crate) fn elements<T: Element>(op: &'static str, tensor: &Tensor) -> Result<Vec<T>> {
    let source = BlockReader::<T>::open(op, tensor, tensor.shape())?;
    let mut elements = vec![T::zeroed(); tensor.numel()];
    source.copy_to(0, &mut elements);
    Ok(elements)
}

/// Sets the elements of a contiguous tensor, each rounded to its dtype.
pub(crate) fn store<T: Real>(op: &'static str, to: &mut Tensor, values: &[f64]) -> Result<()> {
    debug_assert!(to.is_contiguous());
    let at = to.offset();
    let mut target = to.write::<T>(op)?;
    let target = target[at..].iter_mut().zip(values);
    target.for_each(|(to, &x)| *to = T::narrow(T::Wide::from_f64(x)));
    Ok(())
}
