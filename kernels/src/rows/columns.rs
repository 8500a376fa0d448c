//! Rows that lie across memory, computed as columns: each vector holds one element of several rows. A softmax along the first dimension is
//! computed so. Sums have the order of [`super::lanes`], so that a column has the bits that it has as a row.
//!
//! ```text
//!  a slab [n, inner], read row by row into groups of SIDE columns      one group at a time is handed to the ColumnKernel
//!    row 0:  | group 0 | group 1 | ..                                    x[0][..SIDE], x[1][..SIDE], .. : vectors across columns
//!    row 1:  | group 0 | group 1 | ..
//! ```

use phalanx_tensor::{Result, Tensor};

use crate::block_reader::BlockReader;
use crate::real::Real;
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector, dispatch};

/// Columns that a kernel computes at a time: a group.
pub(crate) const SIDE: usize = LANES_MAX;
/// Columns that are prefetched together, at most: a row's part of so many is long enough to hide a TLB miss.
const COLUMNS_MAX: usize = 16 * SIDE;
/// Elements of the columns that are read together, about: a group should fit the L2 cache, all of them the L3 cache.
const ELEMENTS: usize = 1024 * 1024;
/// Elements of a column, at most.
const LENGTH_MAX: usize = 16 * 1024;
/// Accumulator vectors of a row's sum in [`super::lanes`].
const CHAINS: usize = 4;

/// Whether [`run`] takes columns of `n` elements, `inner` of them side by side.
pub(crate) fn fits(n: usize, inner: usize) -> bool {
    n <= LENGTH_MAX && inner >= SIDE / 2
}

/// A group of neighbouring columns, row by row; what is beyond the last column may be anything.
pub(crate) struct Columns<'a, T, const N: usize> {
    /// The first one's number.
    pub(crate) first: usize,
    /// How many there are.
    pub(crate) count: usize,
    /// The inputs' rows. The output's, if there is one, take the place of the first.
    pub(crate) x: [&'a mut [[T; SIDE]]; N],
    /// A row for each number that is kept of a column.
    pub(crate) stats: &'a mut [[T; SIDE]],
}

/// What an operation does to a group of columns: the same as its [`super::RowKernel`], with the same bits.
pub(crate) trait ColumnKernel<T: Float, const N: usize>: Sync {
    /// The computation. To be marked `#[inline(always)]`.
    fn run<S: Isa>(&self, columns: Columns<'_, T, N>);
}

type ColumnsFn<'a, T, const N: usize> = &'a (dyn Fn(Columns<'_, T, N>) + Sync);

/// Runs `kernel` over the columns of the inputs, seen as `[outer, n, inner]`: a column has n elements. Results go to the columns of `y`, which is
/// new and contiguous, and `kept` numbers of each column to `stats`.
pub(crate) fn run<T: Real, const N: usize>(
    op: &'static str,
    kernel: &impl ColumnKernel<T::Wide, N>,
    [n, inner]: [usize; 2],
    inputs: [&Tensor; N],
    y: Option<&mut Tensor>,
    (stats, kept): (&mut [T::Wide], usize),
) -> Result<()> {
    run_by::<T, N>(
        op,
        &|columns| dispatch(RunColumns { kernel, columns }),
        [n, inner],
        inputs,
        y,
        (stats, kept),
    )
}

fn run_by<T: Real, const N: usize>(
    op: &'static str,
    kernel: ColumnsFn<'_, T::Wide, N>,
    [n, inner]: [usize; 2],
    inputs: [&Tensor; N],
    y: Option<&mut Tensor>,
    (stats, kept): (&mut [T::Wide], usize),
) -> Result<()> {
    let (numel, slab) = (inputs[0].numel(), n * inner);
    if numel == 0 {
        return Ok(());
    }
    let sources: [BlockReader<'_, T>; N] = BlockReader::open_all(op, inputs, inputs[0].shape())?;
    let (pool, outer) = (inputs[0].device().pool()?, numel / slab);
    let pieces = (4 * pool.threads()).div_ceil(outer).min(inner.div_ceil(SIDE));
    let width = inner.div_ceil(pieces).next_multiple_of(SIDE);
    let mut target = y.map(|y| y.write::<T>(op)).transpose()?;
    let target = target.as_mut().map_or(&mut [][..], |y| &mut y[..numel]);
    let mut blocks: Vec<ColumnBlock<'_, T>> = Vec::new();
    for slab in 0..outer {
        let starts = (0..inner).step_by(width);
        blocks.extend(starts.map(|column| ColumnBlock {
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
struct ColumnBlock<'a, T: Real> {
    slab: usize,
    column: usize,
    width: usize,
    /// A part of each row of the output.
    y: Vec<&'a mut [T]>,
    stats: &'a mut [T::Wide],
}

impl<T: Real> ColumnBlock<'_, T> {
    fn run<const N: usize>(
        &mut self,
        kernel: ColumnsFn<'_, T::Wide, N>,
        [n, inner]: [usize; 2],
        sources: &[BlockReader<'_, T>; N],
        kept: usize,
    ) {
        let strip =
            (ELEMENTS / (N * n).max(1)).clamp(SIDE, COLUMNS_MAX).min(self.width).next_multiple_of(SIDE);
        // One row more than needed, so that the groups' rows do not fall into the same sets of the cache.
        let (groups, room) = (strip / SIDE, n + 1);
        let mut band = [T::Wide::ZERO; COLUMNS_MAX];
        with_scratch((N * groups * room + kept) * SIDE, |scratch| {
            let (x, stats) = scratch.as_chunks_mut().0.split_at_mut(N * groups * room);
            for column in (0..self.width).step_by(strip) {
                let count = strip.min(self.width - column);
                let first = self.slab * n * inner + self.column + column;
                for (source, x) in sources.iter().zip(x.chunks_mut(groups * room)) {
                    for row in 0..n {
                        let at = |row| source.address(first + row * inner).filter(|_| row < n);
                        prefetch_row(at(row + AHEAD), count);
                        let from = source.wide(first + row * inner, count, &mut band);
                        dispatch(ScatterRow { from, to: &mut x[row..], room });
                    }
                }
                for group in 0..count.div_ceil(SIDE) {
                    let mut parts = x.chunks_mut(groups * room);
                    let start = column + group * SIDE;
                    let count = SIDE.min(self.width - start);
                    kernel(Columns {
                        first: self.slab * inner + self.column + start,
                        count,
                        x: std::array::from_fn(|_| match parts.next() {
                            Some(part) => &mut part[group * room..][..n],
                            None => &mut [],
                        }),
                        stats: &mut *stats,
                    });
                    for (i, to) in self.stats.chunks_mut(kept.max(1)).skip(start).take(count).enumerate() {
                        to.iter_mut().zip(stats.iter()).for_each(|(to, row)| *to = row[i]);
                    }
                }
                for row in 0..self.y.len() {
                    prefetch_row(self.y.get(row + AHEAD).map(|to| to[column..].as_ptr()), count);
                    let to = &mut self.y[row][column..][..count];
                    dispatch(GatherRow { from: &x[row..], room, to });
                }
            }
        });
    }
}

/// How many rows ahead elements are prefetched.
const AHEAD: usize = 8;

/// Prefetches elements that are read or written soon. Rows are pages apart, so the hardware prefetches none, and a store that
/// misses the TLB delays the stores behind it.
fn prefetch_row<T: Real>(at: Option<*const T>, count: usize) {
    if let Some(at) = at {
        dispatch(PrefetchRow { at, count });
    }
}

struct PrefetchRow<T> {
    at: *const T,
    count: usize,
}

impl<T: Real> Kernel for PrefetchRow<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        const LINE_BYTES: usize = 64;
        for column in (0..self.count).step_by(LINE_BYTES / size_of::<T>()) {
            S::F32::prefetch_far(self.at.wrapping_add(column).cast());
        }
    }
}

/// Copies a row into groups of columns, whose rows of this number are `room` rows apart.
struct ScatterRow<'a, T> {
    from: &'a [T],
    to: &'a mut [[T; SIDE]],
    room: usize,
}

impl<T: Float> Kernel for ScatterRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = T::Vec::<S>::LANES;
        for (from, to) in self.from.chunks(SIDE).zip(self.to.chunks_mut(self.room)) {
            for (from, to) in from.chunks(lanes).zip(to[0].chunks_exact_mut(lanes)) {
                let full = from.len() == lanes;
                let x = if full { T::Vec::<S>::load(from) } else { Vector::load_partial(from, T::ZERO) };
                x.store(to);
            }
        }
    }
}

/// Copies a row back from the groups, and rounds it.
struct GatherRow<'a, T: Real> {
    from: &'a [[T::Wide; SIDE]],
    to: &'a mut [T],
    room: usize,
}

impl<T: Real> Kernel for GatherRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <T::Wide as Float>::Vec::<S>::LANES;
        for (to, from) in self.to.chunks_mut(SIDE).zip(self.from.chunks(self.room)) {
            for (to, from) in to.chunks_mut(lanes).zip(from[0].chunks_exact(lanes)) {
                T::store::<S>(Vector::load(from), to);
            }
        }
    }
}

struct RunColumns<'a, K, T, const N: usize> {
    kernel: &'a K,
    columns: Columns<'a, T, N>,
}

impl<T: Float, K: ColumnKernel<T, N>, const N: usize> Kernel for RunColumns<'_, K, T, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        self.kernel.run::<S>(self.columns);
    }
}

/// The vector of columns at `column` of a row.
#[inline(always)]
pub(crate) fn at<V: Vector>(row: &[V::Elem; SIDE], column: usize) -> V {
    V::load(&row[column..])
}

/// Sets the vector of columns at `column` of each row to `f(vector, row)`.
#[inline(always)]
pub(crate) fn update<V: Vector>(x: &mut [[V::Elem; SIDE]], column: usize, f: impl Fn(V, usize) -> V) {
    for (i, row) in x.iter_mut().enumerate() {
        f(at(row, column), i).store(&mut row[column..]);
    }
}

/// The sums of columns of `n` elements in the order of [`super::lanes::sums`]; `term(row)` gives a vector of columns.
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

/// Adds chain `i + apart` to chain i, for i from `first` to `end`.
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

/// The largest elements of the vector of columns at `column`, ignoring NaN; `low` if there are none.
#[inline(always)]
pub(crate) fn max<V: Vector>(x: &[[V::Elem; SIDE]], column: usize, low: V::Elem) -> V {
    let mut max = V::splat(low);
    for row in x {
        max = at::<V>(row, column).max(max);
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
                let transposed = rows.transpose(1, 2).unwrap();
                let got = softmax_backward(&x, &softmax(&x, 1).unwrap(), 1).unwrap();
                let want = softmax_backward(&transposed, &softmax(&transposed, 1).unwrap(), 1).unwrap();
                assert!(bits(&got) == bits(&want), "backward, {dtype:?} [{outer}, {n}, {inner}]");
            }
        }
    }
}
