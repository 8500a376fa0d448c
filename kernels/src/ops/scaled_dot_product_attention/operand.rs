//! The operands of attention on a CPU. [`Heads`]: a strided tensor by heads, whose rows are read in place or widened into padded [`Rows`]. [`Mask`]: a
//! mask as tiles of numbers to add. [`HeadLayout`]: results whose heads lie in memory as an operand's do.

use phalanx_tensor::{DType, Dims, Element, Loops, Read, Result, Tensor, Write};

use super::first_keys::FirstKeys;
use super::tile::{QUERIES, Tile, Transpose};
use crate::gemm::{MatRef, SubMatMut, tile_shape};
use crate::real::Real;
use crate::scratch::{Scratch, with_scratch};
use crate::simd::{Float, Isa, Kernel, Vector, dispatch};

/// Rows are padded to multiples of so many bytes, the longest vector.
const PAD_BYTES: usize = 64;
/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Rows whose stride is a multiple of this fall into few sets of an L1 cache, and are copied.
const CROWDED_BYTES: usize = 4096;

/// A row length padded for `T`'s vectors.
pub(super) fn padded<T: Float>(len: usize) -> usize {
    len.next_multiple_of(PAD_BYTES / size_of::<T>())
}

/// A number of queries padded for the vectors of this CPU.
pub(super) fn padded_queries<T: Float>(queries: usize) -> usize {
    queries.next_multiple_of(tile_shape::<T>().lanes)
}

/// Calls `f` with slices of this thread's scratch memory, of these lengths and any content.
pub(super) fn with_slices<T: Scratch, const N: usize>(lens: [usize; N], f: impl FnOnce([&mut [T]; N])) {
    // Whole cache lines, so that each piece begins at one.
    let lens = lens.map(padded::<T>);
    with_scratch(lens.iter().sum(), |mut rest: &mut [T]| {
        f(lens.map(|len| rest.split_off_mut(..len).unwrap_or_default()));
    });
}

/// A tensor [.., rows, columns], opened for reading; the leading dimensions are the heads.
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

    /// Opens a tensor in a shape that it broadcasts to.
    pub(super) fn broadcast(op: &'static str, tensor: &'a Tensor, shape: &[usize]) -> Result<Heads<'a, T>> {
        let seen = tensor.broadcast_for(op, shape)?;
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

    /// The first element of a row.
    pub(super) fn at(&self, head: usize, row: usize) -> T {
        self.elements[self.starts[head] + row * self.row_stride]
    }

    /// The heads, without those that are the same elements as the head before (broadcast).
    pub(super) fn distinct(&self) -> impl Iterator<Item = usize> {
        (0..self.starts.len()).filter(|&head| head == 0 || self.starts[head] != self.starts[head - 1])
    }
}

impl<T: Real> Heads<'_, T> {
    /// Whether rows are read in place: they have the type that is computed in, are whole vectors long, of one at least, and do not conflict in the cache.
    fn is_ready(&self) -> bool {
        self.col_stride == 1
            && self.columns > 0
            && !(self.row_stride * size_of::<T>()).is_multiple_of(CROWDED_BYTES)
            && padded::<T::Wide>(self.columns) == self.columns
            && T::as_wide(&self.elements).is_some()
    }

    /// The length of `room` that [`Heads::rows`] needs for so many rows without further zeros.
    pub(super) fn room(&self, rows: usize) -> usize {
        if self.is_ready() { 0 } else { rows * padded::<T::Wide>(self.columns) }
    }

    /// `count` rows of a head from `first` on, widened, and rows of zeros up to `filled`: in place, if they can be read
    /// there and no zeros are wanted, else in `room`.
    pub(super) fn rows<'b>(
        &'b self,
        head: usize,
        first: usize,
        [count, filled]: [usize; 2],
        room: &'b mut [T::Wide],
    ) -> Rows<'b, T::Wide> {
        let start = self.starts[head] + first * self.row_stride;
        let width = padded::<T::Wide>(self.columns);
        if count == filled
            && self.is_ready()
            && let Some(elements) = T::as_wide(&self.elements)
        {
            // Without rows the start may lie beyond the elements.
            let elements = elements.get(start..).unwrap_or_default();
            return Rows { elements, stride: self.row_stride, width };
        }
        let room = &mut room[..filled * width];
        let (rows, rest) = room.split_at_mut(count * width);
        if self.col_stride == 1 {
            let from = self.elements.get(start..).unwrap_or_default();
            dispatch(Widen::<T> { from, stride: self.row_stride, columns: self.columns, to: rows, width });
        } else {
            for (i, to) in rows.chunks_exact_mut(width.max(1)).enumerate() {
                let at = |j: usize| self.elements[start + i * self.row_stride + j * self.col_stride];
                let (to, rest) = to.split_at_mut(self.columns);
                to.iter_mut().enumerate().for_each(|(j, to)| *to = at(j).widen());
                rest.fill(T::Wide::ZERO);
            }
        }
        rest.fill(T::Wide::ZERO);
        Rows { elements: room, stride: width, width }
    }
}

/// How many bytes ahead of their copies rows are prefetched.
const AHEAD_BYTES: usize = 4096;

/// Widens rows `stride` apart into rows of whole vectors, with zeros behind the columns.
struct Widen<'a, T: Real> {
    from: &'a [T],
    stride: usize,
    columns: usize,
    to: &'a mut [T::Wide],
    width: usize,
}

impl<T: Real> Kernel for Widen<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <T::Wide as Float>::Vec::<S>::LANES;
        let whole = self.columns - self.columns % lanes;
        let ahead = AHEAD_BYTES.div_ceil(size_of::<T>() * self.columns.max(1)) * self.stride;
        for (i, to) in self.to.chunks_exact_mut(self.width.max(1)).enumerate() {
            let from = &self.from[i * self.stride..][..self.columns];
            for line in from.chunks(LINE_BYTES / size_of::<T>()) {
                <T::Wide as Float>::Vec::<S>::prefetch(line.as_ptr().wrapping_add(ahead).cast());
            }
            let ((from, rest), (to, zeros)) = (from.split_at(whole), to.split_at_mut(whole));
            for (from, to) in from.chunks_exact(lanes).zip(to.chunks_exact_mut(lanes)) {
                T::load::<S>(from).store(to);
            }
            for (nth, to) in zeros.chunks_exact_mut(lanes).enumerate() {
                let rest = if nth == 0 { rest } else { &[] };
                T::load::<S>(rest).store(to);
            }
        }
    }
}

/// Rows of whole vectors.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, T> {
    /// From the first row's first element on.
    pub(super) elements: &'a [T],
    /// Elements from one row to the next.
    pub(super) stride: usize,
    /// Elements in a row.
    pub(super) width: usize,
}

impl<'a, T> Rows<'a, T> {
    /// The rows from number `first` on.
    pub(super) fn from(self, first: usize) -> Rows<'a, T> {
        Rows { elements: self.elements.get(first * self.stride..).unwrap_or_default(), ..self }
    }

    /// The first columns of the first rows.
    pub(super) fn matrix(self, rows: usize, cols: usize) -> MatRef<'a, T> {
        MatRef::new(self.elements, rows, cols, self.stride, 1)
    }
}

/// Stores rows without their padding, rounded, as the rows of a submatrix from number `first` on.
pub(super) fn store<T: Real>(to: &mut SubMatMut<'_, T>, first: usize, rows: &[T::Wide], width: usize) {
    for (i, row) in rows.chunks(width.max(1)).enumerate() {
        let to = to.row(first + i);
        T::narrow_all(&row[..to.len()], to);
    }
}

/// The memory layout of a result by heads: [outer, rows, across, columns], with `across` heads side by side.
#[derive(Clone, Copy)]
pub(super) struct HeadLayout {
    pub(super) outer: usize,
    rows: usize,
    pub(super) across: usize,
    columns: usize,
}

impl HeadLayout {
    /// Opens a result for writing, with its layout.
    pub(super) fn open<'a, T: Element>(
        op: &'static str,
        tensor: &'a mut Tensor,
    ) -> Result<(HeadLayout, Write<'a, T>)> {
        let (shape, lead) = (tensor.shape(), tensor.rank() - 2);
        let across = if has_heads_side_by_side(tensor) { shape[lead - 1] } else { 1 };
        let outer = shape[..lead].iter().product::<usize>() / across.max(1);
        let layout = HeadLayout { outer, rows: shape[lead], across, columns: shape[lead + 1] };
        Ok((layout, tensor.write(op)?))
    }

    /// The submatrix of each head, unless there are no rows.
    pub(super) fn heads<T>(self, data: &mut [T]) -> impl Iterator<Item = SubMatMut<'_, T>> {
        self.row_blocks(data, self.rows.max(1))
    }

    /// Submatrices of at most `height` rows of a head, in the order of the heads.
    pub(super) fn row_blocks<T>(
        self,
        mut data: &mut [T],
        height: usize,
    ) -> impl Iterator<Item = SubMatMut<'_, T>> {
        let size = self.rows * self.across * self.columns;
        (0..self.outer).flat_map(move |_| {
            let part = data.split_off_mut(..size).unwrap_or_default();
            SubMatMut::cut(part, self.rows, [self.across, self.columns], height)
        })
    }
}

/// Whether heads lie side by side, [.., T, H, D] in memory behind [.., H, T, D].
fn has_heads_side_by_side(tensor: &Tensor) -> bool {
    matches!(tensor.strides(), [.., head, row, _] if head < row)
}

/// An empty tensor whose heads lie side by side if those of `like` do; else it is contiguous.
pub(super) fn empty_as(like: &Tensor, shape: &[usize]) -> Result<Tensor> {
    if !has_heads_side_by_side(like) {
        return Tensor::empty_for("scaled_dot_product_attention", shape, like.dtype(), like.device());
    }
    let mut transposed = Dims::from_slice(shape);
    transposed.swap(shape.len() - 3, shape.len() - 2);
    Tensor::empty_for("scaled_dot_product_attention", &transposed, like.dtype(), like.device())?
        .transpose(-3, -2)
}

/// An empty tensor that holds the gradients of these three, if their heads lie side by side in one storage (as of a joint projection), in this
/// order.
pub(super) fn empty_joined(tensors: [&Tensor; 3]) -> Result<Option<Tensor>> {
    if !tensors.iter().all(|t| has_heads_side_by_side(t)) {
        return Ok(None);
    }
    let [a, b, c] = tensors.map(|t| t.transpose(-3, -2));
    let whole = Tensor::joined(&[&a?, &b?, &c?], -2)?;
    whole.map(|whole| whole.empty_like_for("scaled_dot_product_attention")?.transpose(-3, -2)).transpose()
}

/// A mask over the scores, opened for reading.
pub(super) enum Mask<'a, T> {
    None,
    /// True where a key may be seen.
    Bool(Heads<'a, u8>),
    Float(Heads<'a, T>),
    First(FirstKeys<'a>),
}

impl<'a, T: Real> Mask<'a, T> {
    pub(super) fn open(op: &'static str, mask: Option<&'a Tensor>, scores: &[usize]) -> Result<Mask<'a, T>> {
        Ok(match mask {
            None => Mask::None,
            Some(mask) if mask.dtype() == DType::Bool => Mask::Bool(Heads::broadcast(op, mask, scores)?),
            Some(mask) if mask.dtype() == DType::I64 => Mask::First(FirstKeys::open(op, mask, scores)?),
            Some(mask) => Mask::Float(Heads::broadcast(op, mask, scores)?),
        })
    }

    /// How many of the `most` queries of a head from number `query` on make a block, and the first key that they see.
    pub(super) fn block(&self, head: usize, query: usize, most: usize) -> (usize, usize) {
        match self {
            Mask::First(first) => (first.block(head, query, most), first.of(head, query)),
            _ => (most.min(QUERIES), 0),
        }
    }

    /// The numbers to add to a tile's scores, as these lie, written to the first half of `to`; `None` without a mask.
    pub(super) fn tile<'b>(&self, tile: &Tile, to: &'b mut [T::Wide]) -> Option<&'b [T::Wide]> {
        let (to, rows) = to.split_at_mut(to.len() / 2);
        match self {
            Mask::None => return None,
            Mask::Bool(mask) => mask.laid_out(tile, to, rows, |seen, to| {
                let hidden = |&seen: &u8| if seen == 0 { -T::Wide::INFINITY } else { T::Wide::ZERO };
                to.iter_mut().zip(seen).for_each(|(to, seen)| *to = hidden(seen));
            }),
            Mask::Float(mask) => mask.laid_out(tile, to, rows, T::widen_all),
            Mask::First(first) => return first.tile(tile, to),
        }
        Some(to)
    }
}

impl<T: Element> Heads<'_, T> {
    /// Sets `to` to a tile's elements [queries, keys], converted, as its scores lie: as they are, or by way of `rows` transposed.
    fn laid_out<U: Float>(
        &self,
        tile: &Tile,
        to: &mut [U],
        rows: &mut [U],
        convert: impl Fn(&[T], &mut [U]),
    ) {
        let first = self.starts[tile.head] + tile.query * self.row_stride + tile.key * self.col_stride;
        let row = |q: usize, rows: &mut [U]| {
            let from = &self.elements[first + q * self.row_stride..];
            match self.col_stride {
                1 => convert(&from[..rows.len()], rows),
                apart => {
                    rows.chunks_mut(1).enumerate().for_each(|(k, to)| convert(&from[k * apart..][..1], to))
                }
            }
        };
        if self.row_stride == 0 && !tile.by_rows {
            row(0, &mut rows[..tile.keys]);
            to.chunks_exact_mut(tile.width).zip(&*rows).take(tile.keys).for_each(|(to, &x)| to.fill(x));
            return;
        }
        let stride = padded::<U>(tile.keys);
        if tile.by_rows {
            for (q, to) in to.chunks_exact_mut(stride).take(tile.queries).enumerate() {
                let (to, rest) = to.split_at_mut(tile.keys);
                row(q, to);
                rest.fill(U::ZERO);
            }
            return;
        }
        let (filled, rest) = rows[..tile.width * stride].split_at_mut(tile.queries * stride);
        filled.chunks_exact_mut(stride).enumerate().for_each(|(q, to)| row(q, &mut to[..tile.keys]));
        rest.fill(U::ZERO);
        let rows = Rows { elements: rows, stride, width: stride };
        dispatch(Transpose { rows, factor: U::ONE, to, width: tile.width });
    }
}
