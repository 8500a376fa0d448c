//! Rows that lie across the tensor: neighbouring ones are turned, several at a time, worked on and turned back.

use std::ops::Range;

use phalanx_tensor::{Result, Tensor};

use super::{Call, Row, RowKernel, Rowwise};
use crate::gemm::with_scratch;
use crate::real::Real;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector, dispatch};
use crate::source::Source;

/// The side of a square that is turned.
const SIDE: usize = LANES_MAX;
/// Columns that are worked on together, at most.
const COLUMNS_MAX: usize = 16 * SIDE;
/// Elements of the columns that are worked on together, about: what fits into a second-level cache.
const ELEMENTS: usize = 192 * 1024;
/// Elements of a column, at most.
const LENGTH_MAX: usize = 16 * 1024;

/// Whether [`run`] takes columns of `n` elements, `inner` of them side by side.
pub(crate) fn fits(n: usize, inner: usize) -> bool {
    n <= LENGTH_MAX && inner >= SIDE / 2
}

/// Runs `kernel` over the columns of the inputs, seen as `[outer, n, inner]`, and writes them to those of `y`, which is new and
/// contiguous. The kernel is not told the columns' numbers.
pub(crate) fn run<T: Real, const N: usize>(
    op: &'static str,
    kernel: &impl RowKernel<T::Wide, N>,
    [n, inner]: [usize; 2],
    inputs: [&Tensor; N],
    y: &mut Tensor,
) -> Result<()> {
    run_by::<T, N>(op, &|row| dispatch(Call { kernel, row }), [n, inner], inputs, y)
}

fn run_by<T: Real, const N: usize>(
    op: &'static str,
    kernel: Rowwise<'_, T::Wide, N>,
    [n, inner]: [usize; 2],
    inputs: [&Tensor; N],
    y: &mut Tensor,
) -> Result<()> {
    let sources: [Source<'_, T>; N] = Source::open_all(op, inputs, y.shape())?;
    let (pool, numel, slab) = (y.device().pool()?, y.numel(), n * inner);
    if numel == 0 {
        return Ok(());
    }
    let pieces = (4 * pool.threads()).div_ceil(numel / slab).min(inner.div_ceil(SIDE));
    let width = inner.div_ceil(pieces).next_multiple_of(SIDE);
    let mut target = y.write::<T>(op)?;
    let mut blocks: Vec<Block<'_, T>> = Vec::new();
    for (i, target) in target[..numel].chunks_mut(slab).enumerate() {
        let known = blocks.len();
        blocks.extend(
            (0..inner).step_by(width).map(|column| Block { first: i * slab + column, y: Vec::new() }),
        );
        for row in target.chunks_mut(inner) {
            blocks[known..].iter_mut().zip(row.chunks_mut(width)).for_each(|(block, y)| block.y.push(y));
        }
    }
    pool.for_each_chunk(&mut blocks, 1, |_, blocks| {
        blocks.iter_mut().for_each(|block| block.run(kernel, inner, &sources));
    });
    Ok(())
}

/// Some neighbouring columns, worked on by one thread.
struct Block<'a, T> {
    /// The first element's number.
    first: usize,
    /// A part of each row of the output.
    y: Vec<&'a mut [T]>,
}

impl<T: Real> Block<'_, T> {
    fn run<const N: usize>(
        &mut self,
        kernel: Rowwise<'_, T::Wide, N>,
        inner: usize,
        sources: &[Source<'_, T>; N],
    ) {
        let (n, width) = (self.y.len(), self.y.first().map_or(0, |y| y.len()));
        // A cache line more than whole ones, so that the columns' elements do not share a place in the cache.
        let room = n.next_multiple_of(SIDE) + SIDE;
        let strip = (ELEMENTS / room).clamp(SIDE, COLUMNS_MAX).min(width).next_multiple_of(SIDE);
        with_scratch(SIDE * strip + room + N * strip * room, |scratch| {
            let (band, rest) = scratch.split_at_mut(SIDE * strip);
            let (y, x) = rest.split_at_mut(room);
            for column in (0..width).step_by(strip) {
                let count = strip.min(width - column);
                for (source, x) in sources.iter().zip(x.chunks_mut(strip * room)) {
                    gather(source, [self.first + column, inner], [n, count], band, x, room);
                }
                for column in 0..count {
                    let row = std::array::from_fn(|k| &x[(k * strip + column) * room..][..n]);
                    kernel(Row { index: 0, x: row, y: &mut y[..n], stats: &mut [], sums: &mut [] });
                    x[column * room..][..n].copy_from_slice(&y[..n]);
                }
                self.scatter(x, room, band, inner, column..column + count);
            }
        });
    }

    /// Turns columns back, by way of a band of rows.
    fn scatter(
        &mut self,
        from: &[T::Wide],
        room: usize,
        band: &mut [T::Wide],
        inner: usize,
        columns: Range<usize>,
    ) {
        let strip = band.len() / SIDE;
        for (i, rows) in self.y.chunks_mut(SIDE).enumerate() {
            let below = rows[0].as_ptr().wrapping_add(SIDE * inner + columns.start);
            dispatch(Near { at: below, apart: inner, count: columns.len() });
            let shape = [columns.len().next_multiple_of(SIDE), SIDE];
            let from = &from[i * SIDE..];
            dispatch(Turn { shape, from, from_row: room, to: &mut *band, to_row: strip });
            for (y, row) in rows.iter_mut().zip(band.chunks(strip)) {
                T::narrow_all(&row[..columns.len()], &mut y[columns.clone()]);
            }
        }
    }
}

/// Turns `n` rows of `count` elements, the first at `first`, `apart` elements from each other, into columns, by way of a band of
/// rows.
fn gather<T: Real>(
    source: &Source<'_, T>,
    [first, apart]: [usize; 2],
    [n, count]: [usize; 2],
    band: &mut [T::Wide],
    to: &mut [T::Wide],
    room: usize,
) {
    let (strip, shape) = (band.len() / SIDE, [SIDE, count.next_multiple_of(SIDE)]);
    for row in (0..n).step_by(SIDE) {
        if let Some(at) = source.address(first + (row + SIDE) * apart) {
            dispatch(Near { at, apart, count });
        }
        for (i, to) in band.chunks_mut(strip).take(n - row).enumerate() {
            source.copy_wide(first + (row + i) * apart, &mut to[..count]);
        }
        dispatch(Turn { shape, from: &*band, from_row: strip, to: &mut to[row..], to_row: room });
    }
}

/// Asks for the elements of the next band, which need not exist: rows are pages apart, and a write that waits for its page
/// holds up those behind it.
struct Near<T> {
    at: *const T,
    apart: usize,
    count: usize,
}

impl<T: Real> Kernel for Near<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        const LINE_BYTES: usize = 64;
        for row in 0..SIDE {
            for column in (0..self.count).step_by(LINE_BYTES / size_of::<T>()) {
                S::F32::prefetch_far(self.at.wrapping_add(row * self.apart + column).cast());
            }
        }
    }
}

/// `to[j, i] = from[i, j]`, in squares: rows and columns are multiples of `SIDE`.
struct Turn<'a, W> {
    /// `from`'s.
    shape: [usize; 2],
    from: &'a [W],
    from_row: usize,
    to: &'a mut [W],
    to_row: usize,
}

impl<W: Float> Kernel for Turn<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let ([rows, columns], lanes) = (self.shape, <W::Vec<S> as Vector>::LANES);
        for i in (0..rows).step_by(lanes) {
            for j in (0..columns).step_by(lanes) {
                let from = &self.from[i * self.from_row + j..];
                let mut square = [W::Vec::<S>::zero(); LANES_MAX];
                for (row, vector) in square[..lanes].iter_mut().enumerate() {
                    *vector = W::Vec::<S>::load(&from[row * self.from_row..]);
                }
                W::Vec::<S>::turn(&mut square);
                for (column, lanes) in square[..lanes].iter().enumerate() {
                    lanes.store(&mut self.to[(j + column) * self.to_row + i..]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::fits;
    use crate::ops::{cast, log_softmax, softmax, softmax_backward};

    #[test]
    fn columns_have_the_bits_of_rows() {
        let bits = |t: &Tensor| cast(t, DType::F64).unwrap().contiguous().unwrap().to_vec::<f64>().unwrap();
        for [outer, n, inner] in [[1, 129, 33], [3, 7, 8], [2, 40, 300], [1, 5000, 17]] {
            assert!(fits(n, inner));
            let values: Vec<f64> = (0..outer * n * inner).map(|i| (i as f64 * 0.37).sin() * 5.0).collect();
            let x = Tensor::from_slice(&values, &[outer, n, inner], Device::CPU).unwrap();
            for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
                let x = cast(&x, dtype).unwrap();
                let rows = x.transpose(1, 2).unwrap().contiguous().unwrap();
                for f in [|x: &Tensor| softmax(x, 1), |x: &Tensor| log_softmax(x, 1)] {
                    let (got, want) = (f(&x).unwrap(), f(&rows.transpose(1, 2).unwrap()).unwrap());
                    assert!(got.is_contiguous() && !want.is_contiguous(), "one of them is by rows");
                    assert!(bits(&got) == bits(&want), "{dtype:?} [{outer}, {n}, {inner}]");
                }
                let turned = rows.transpose(1, 2).unwrap();
                let got = softmax_backward(&x, &softmax(&x, 1).unwrap(), 1).unwrap();
                let want = softmax_backward(&turned, &softmax(&turned, 1).unwrap(), 1).unwrap();
                assert!(bits(&got) == bits(&want), "backward, {dtype:?} [{outer}, {n}, {inner}]");
            }
        }
    }
}
