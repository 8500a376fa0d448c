//! Rows that lie across the tensor, as columns: each vector holds one element of several neighbours, which are computed side by
//! side with the bits that they have as rows.

use phalanx_tensor::{Result, Tensor};

use crate::gemm::with_scratch;
use crate::real::Real;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector, dispatch};
use crate::source::Source;

/// Columns that are worked on together are a multiple of this.
const SIDE: usize = LANES_MAX;
/// Columns that are worked on together, at most.
const COLUMNS_MAX: usize = 16 * SIDE;
/// Elements of the columns that are worked on together, about: what leaves room in a second-level cache.
const ELEMENTS: usize = 96 * 1024;
/// Elements of a column, at most.
const LENGTH_MAX: usize = 16 * 1024;
/// Accumulators of a row's sum, at most: those of [`super::lanes::fold`].
const CHAINS: usize = 4;

/// Whether [`run`] takes columns of `n` elements, `inner` of them side by side.
pub(crate) fn fits(n: usize, inner: usize) -> bool {
    n <= LENGTH_MAX && inner >= SIDE / 2
}

/// Some neighbouring columns. Rows of inputs and outputs begin `stride` elements apart, a multiple of any vector's lanes; what
/// is beyond the last column may be anything.
pub(crate) struct Columns<'a, T, const N: usize> {
    /// The first one's number.
    pub(crate) first: usize,
    /// How many there are.
    pub(crate) count: usize,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
    /// The inputs' rows. The output's, if there is one, take the place of the first.
    pub(crate) x: [&'a mut [T]; N],
    /// A row for each number that is kept of a column.
    pub(crate) stats: &'a mut [T],
}

/// What an operation does to columns: with the bits of its [`super::RowKernel`].
pub(crate) trait ColumnKernel<T: Float, const N: usize>: Sync {
    /// The computation. To be marked `#[inline(always)]`.
    fn run<S: Isa>(&self, columns: Columns<'_, T, N>);
}

type Columnwise<'a, T, const N: usize> = &'a (dyn Fn(Columns<'_, T, N>) + Sync);

/// Runs `kernel` over the columns of the inputs, seen as `[outer, n, inner]`. Results go to the columns of `y`, which is new and
/// contiguous, and `kept` numbers of each column to `stats`.
pub(crate) fn run<T: Real, const N: usize>(
    op: &'static str,
    kernel: &impl ColumnKernel<T::Wide, N>,
    [n, inner]: [usize; 2],
    inputs: [&Tensor; N],
    y: Option<&mut Tensor>,
    (stats, kept): (&mut [T::Wide], usize),
) -> Result<()> {
    run_by::<T, N>(op, &|columns| dispatch(Call { kernel, columns }), [n, inner], inputs, y, (stats, kept))
}

fn run_by<T: Real, const N: usize>(
    op: &'static str,
    kernel: Columnwise<'_, T::Wide, N>,
    [n, inner]: [usize; 2],
    inputs: [&Tensor; N],
    y: Option<&mut Tensor>,
    (stats, kept): (&mut [T::Wide], usize),
) -> Result<()> {
    let (numel, slab) = (inputs[0].numel(), n * inner);
    if numel == 0 {
        return Ok(());
    }
    let sources: [Source<'_, T>; N] = Source::open_all(op, inputs, inputs[0].shape())?;
    let (pool, outer) = (inputs[0].device().pool()?, numel / slab);
    let pieces = (4 * pool.threads()).div_ceil(outer).min(inner.div_ceil(SIDE));
    let width = inner.div_ceil(pieces).next_multiple_of(SIDE);
    let mut target = y.map(|y| y.write::<T>(op)).transpose()?;
    let target = target.as_mut().map_or(&mut [][..], |y| &mut y[..numel]);
    let mut blocks: Vec<Block<'_, T>> = Vec::new();
    for slab in 0..outer {
        let starts = (0..inner).step_by(width);
        blocks.extend(starts.map(|column| Block {
            slab,
            column,
            width: width.min(inner - column),
            y: Vec::new(),
            stats: &mut [],
        }));
    }
    let a_slab = blocks.len() / outer;
    for (blocks, target) in blocks.chunks_mut(a_slab).zip(target.chunks_mut(slab)) {
        for row in target.chunks_mut(inner) {
            blocks.iter_mut().zip(row.chunks_mut(width)).for_each(|(block, y)| block.y.push(y));
        }
    }
    for (blocks, stats) in blocks.chunks_mut(a_slab).zip(stats.chunks_mut((inner * kept).max(1))) {
        blocks.iter_mut().zip(stats.chunks_mut(width * kept)).for_each(|(block, stats)| block.stats = stats);
    }
    pool.for_each_chunk(&mut blocks, 1, |_, blocks| {
        blocks.iter_mut().for_each(|block| block.run(kernel, [n, inner], &sources, kept));
    });
    Ok(())
}

/// Some neighbouring columns, worked on by one thread.
struct Block<'a, T: Real> {
    slab: usize,
    column: usize,
    width: usize,
    /// A part of each row of the output.
    y: Vec<&'a mut [T]>,
    stats: &'a mut [T::Wide],
}

impl<T: Real> Block<'_, T> {
    fn run<const N: usize>(
        &mut self,
        kernel: Columnwise<'_, T::Wide, N>,
        [n, inner]: [usize; 2],
        sources: &[Source<'_, T>; N],
        kept: usize,
    ) {
        let strip = (ELEMENTS / n.max(1)).clamp(SIDE, COLUMNS_MAX).min(self.width).next_multiple_of(SIDE);
        with_scratch(N * n * strip + kept * strip, |scratch| {
            let (x, stats) = scratch.split_at_mut(N * n * strip);
            for column in (0..self.width).step_by(strip) {
                let count = strip.min(self.width - column);
                let first = self.slab * n * inner + self.column + column;
                for (source, x) in sources.iter().zip(x.chunks_mut(n * strip)) {
                    for (row, to) in x.chunks_mut(strip).enumerate() {
                        if let Some(at) = source.address(first + (row + AHEAD) * inner) {
                            near(at, count);
                        }
                        source.copy_wide(first + row * inner, &mut to[..count]);
                    }
                }
                let mut parts = x.chunks_mut(n * strip);
                kernel(Columns {
                    first: self.slab * inner + self.column + column,
                    count,
                    stride: strip,
                    x: std::array::from_fn(|_| parts.next().unwrap_or_default()),
                    stats: &mut *stats,
                });
                for (to, row) in self.y.iter_mut().zip(x.chunks(strip)) {
                    near(to.as_ptr().wrapping_add(AHEAD * inner + column), count);
                    T::narrow_all(&row[..count], &mut to[column..][..count]);
                }
                for (i, to) in self.stats.chunks_mut(kept.max(1)).skip(column).take(count).enumerate() {
                    to.iter_mut().zip(stats.chunks(strip)).for_each(|(to, row)| *to = row[i]);
                }
            }
        });
    }
}

/// How many rows ahead elements are asked for.
const AHEAD: usize = 8;

/// Asks for elements that need not exist, to be read or written: rows are pages apart, so that none comes near by itself, and a
/// write that waits for its page holds up those behind it.
fn near<T: Real>(at: *const T, count: usize) {
    dispatch(Near { at, count });
}

struct Near<T> {
    at: *const T,
    count: usize,
}

impl<T: Real> Kernel for Near<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        const LINE_BYTES: usize = 64;
        for column in (0..self.count).step_by(LINE_BYTES / size_of::<T>()) {
            S::F32::prefetch_far(self.at.wrapping_add(column).cast());
        }
    }
}

struct Call<'a, K, T, const N: usize> {
    kernel: &'a K,
    columns: Columns<'a, T, N>,
}

impl<T: Float, K: ColumnKernel<T, N>, const N: usize> Kernel for Call<'_, K, T, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        self.kernel.run::<S>(self.columns);
    }
}

/// Row `row` of the vector of columns at `column`.
#[inline(always)]
pub(crate) fn at<V: Vector>(x: &[V::Elem], stride: usize, column: usize, row: usize) -> V {
    V::load(&x[row * stride + column..])
}

/// Sets the vectors of columns at `column` to `f` of them and their rows' numbers.
#[inline(always)]
pub(crate) fn update<V: Vector>(x: &mut [V::Elem], stride: usize, column: usize, f: impl Fn(V, usize) -> V) {
    for row in 0..x.len() / stride {
        let of = at::<V>(x, stride, column, row);
        f(of, row).store(&mut x[row * stride + column..]);
    }
}

/// The sums that [`super::lanes::sums`] makes of rows of `n` elements, of which `term` gives those with one number.
#[inline(always)]
pub(crate) fn sums<V: Vector>(n: usize, term: impl Fn(usize) -> V) -> V {
    let mut chains = [V::zero(); CHAINS * LANES_MAX];
    let all = CHAINS * V::LANES;
    let mut row = 0;
    while row < n {
        let chain = &mut chains[row % all];
        *chain = *chain + term(row);
        row += 1;
    }
    // Chains without elements are 0, which changes nothing.
    let known = n.min(all);
    for (apart, end) in [(V::LANES, all), (2 * V::LANES, V::LANES)] {
        let mut first = 0;
        while first < end {
            join(&mut chains, first, first + V::LANES, apart, known);
            first += 2 * V::LANES;
        }
    }
    let mut half = V::LANES / 2;
    while half > 0 {
        join(&mut chains, 0, half, half, known);
        half /= 2;
    }
    chains[0]
}

/// Adds what is `apart` to each of some chains.
#[inline(always)]
fn join<V: Vector>(
    chains: &mut [V; CHAINS * LANES_MAX],
    first: usize,
    end: usize,
    apart: usize,
    known: usize,
) {
    let mut i = first;
    while i < end && i + apart < known {
        chains[i] = chains[i] + chains[i + apart];
        i += 1;
    }
}

/// The largest elements, NaN passed over; `low` of none.
#[inline(always)]
pub(crate) fn max<V: Vector>(x: &[V::Elem], stride: usize, column: usize, low: V::Elem) -> V {
    let (mut max, mut row) = (V::splat(low), column);
    while row < x.len() {
        max = V::load(&x[row..]).max(max);
        row += stride;
    }
    max
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
