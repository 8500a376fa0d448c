//! [`BlockReader`]: a tensor's elements in row-major order, block by block, whatever its strides and however it is broadcast.
//!
//! An operation on a CPU opens its inputs with [`BlockReader::open_all`] and asks for elements `start .. start + len`. They are returned in place if
//! they lie together in memory, else gathered into a buffer of the caller's. Halves are widened meanwhile, if the caller asks for the type that is
//! computed in ([`BlockReader::wide`]). Tensors whose rows lie across memory, such as transposed ones, are read several rows at a time and
//! transposed in registers ([`BlockReader::copy_rows`]). `blocks.rs` has what several inputs that are read together share.

mod blocks;

use std::ops::Range;

use phalanx_tensor::{Element, Loops, Read, Result, Tensor};

use crate::data_movement::fill;
use crate::real::{Input, Real, for_real};
use crate::simd::{Float, LANES_MAX, dispatch};
use blocks::{WidenLines, WidenStrided, WidenTransposed};

pub(crate) use blocks::{BlockScratch, BlockSplit, GROUP, line_width};

/// Elements that a block holds at most: small enough for all blocks of an operation to stay in the L1
/// cache, large enough to amortize the overhead of a block.
pub(crate) const BLOCK: usize = 1024;

/// Shorter runs of neighbours are copied element by element: a call would take longer.
const FEW: usize = 16;
/// Runs of at least so many elements are a call each; several shorter ones are copied by one call.
const SHORT: usize = 256;

/// Sets a slice to elements of another that lie `stride` apart, converted.
type ConvertRun<'a, T, U> = &'a dyn Fn(&[T], usize, &mut [U]);

/// A tensor opened for reading, in a shape that it broadcasts to.
pub(crate) struct BlockReader<'a, T> {
    elements: Read<'a, T>,
    offset: usize,
    /// The strided loops over the elements; `None` if they are contiguous. Boxed, because readers are moved and most have none.
    loops: Option<Box<Loops<1>>>,
    /// The period after which the elements repeat, if it is short (1 of a single number); 0 if they do not repeat.
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
    /// Whether the elements are contiguous, so that no block is ever gathered.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.loops.is_none()
    }

    /// Whether neighbours in row-major order lie apart in memory, so that several rows are read faster together than one by one.
    pub(crate) fn is_across(&self) -> bool {
        self.loops.as_ref().is_some_and(|loops| !matches!(loops.inner_strides(), [0] | [1]))
    }

    /// The length of the innermost loop: so many elements follow each other with one stride.
    pub(crate) fn run(&self) -> usize {
        self.loops.as_ref().map_or(usize::MAX, |loops| loops.inner())
    }

    /// If rows of `width` elements lie across memory and beside each other, as those of a transposed tensor: how many rows lie so, and the stride
    /// of a row's elements.
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

    /// Elements `start .. start + len` in row-major order: in place if the tensor is contiguous, else gathered
    /// into `scratch`, which must have room.
    #[inline]
    pub(crate) fn block<'b>(&'b self, start: usize, len: usize, scratch: &'b mut [T]) -> &'b [T] {
        if self.is_contiguous() {
            return &self.elements[self.offset + start..][..len];
        }
        self.copy_to(start, &mut scratch[..len]);
        &scratch[..len]
    }

    /// Elements `start .. start + len` in place, if they are neighbours in memory.
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

    /// The address of element `start`, for a prefetch, if the tensor is contiguous; the element need not exist.
    pub(crate) fn address(&self, start: usize) -> Option<*const T> {
        self.is_contiguous().then(|| self.elements.as_ptr().wrapping_add(self.offset + start))
    }

    /// Copies the elements from `start` on, gathering them.
    pub(crate) fn copy_to(&self, start: usize, to: &mut [T]) {
        let apart = |from: &[T], stride, to: &mut [T]| {
            to.iter_mut().zip(from.iter().step_by(stride)).for_each(|(to, &x)| *to = x);
        };
        self.gather(start, to, |x| x, [&|from, _, to| to.copy_from_slice(from), &apart]);
    }

    /// Sets a slice to the elements from `start` on, converted: runs of neighbours by `together`, runs with a larger stride by `apart`, and the
    /// elements of short runs by `one`.
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

/// All elements as f64, for small tensors that a kernel needs before it starts. It makes no tensor, which a meta device would have to count.
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

    /// Whether [`BlockReader::wide`] finds every element in place and needs no scratch memory.
    pub(crate) fn is_wide(&self) -> bool {
        self.is_input(false)
    }

    /// [`BlockReader::copy_to`], widened to the type that is computed in.
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

    /// Copies whole runs from number `run` on. Those along one dimension are equally far apart and are one call.
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

    /// Copies `rows` rows of `width` elements, which begin `apart` elements from each other in row-major order, widened. If the rows lie across
    /// memory, as those of a transposed tensor, several are read at a time and transposed in registers.
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

    /// `lines` lines of `len` neighbours that begin `stride` apart in memory, the first at element `start`: in place, or
    /// widened into `room`; and the stride of lines there. Halves stay in place if `halves` says so.
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

    /// Elements `start .. start + len`: in place if they are neighbours, else gathered and widened into `room`. Halves are widened too, unless
    /// `halves` says that they stay in place.
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

    /// Whether [`BlockReader::input`] and [`BlockReader::lines`] find every element in place.
    pub(crate) fn is_input(&self, halves: bool) -> bool {
        self.is_contiguous() && (halves || T::as_wide(&[]).is_some())
    }

    /// [`BlockReader::block`], widened to the type that is computed in.
    #[inline]
    pub(crate) fn wide<'b>(&'b self, start: usize, len: usize, scratch: &'b mut [T::Wide]) -> &'b [T::Wide] {
        if let Some(wide) = self.contiguous_run(start, len).and_then(T::as_wide) {
            return wide;
        }
        self.copy_wide(start, &mut scratch[..len]);
        &scratch[..len]
    }
}

/// [`BlockReader::period`]: of a single number, and of rows of up to half a block that are broadcast along the dimensions before them.
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

/// Calls `f(part, at, stride)` for each run of the elements `start .. start + len`: which elements it has, counted from `start`, the place of the
/// first, and their stride.
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

/// Sets the elements of a contiguous tensor to `values`, rounded to its dtype.
pub(crate) fn store<T: Real>(op: &'static str, to: &mut Tensor, values: &[f64]) -> Result<()> {
    debug_assert!(to.is_contiguous());
    let at = to.offset();
    let mut target = to.write::<T>(op)?;
    let target = target[at..].iter_mut().zip(values);
    target.for_each(|(to, &x)| *to = T::narrow(T::Wide::from_f64(x)));
    Ok(())
}
