//! Operations on rows, such as softmax and layer norm: each row of the output depends on the same row of the inputs, and sums over rows are the
//! only thing that rows share.
//!
//! An operation implements [`RowKernel`], what it does to one row of vectors. [`run`] gathers strided inputs, widens halves, splits
//! the rows over the device's threads, and adds the sums of fixed blocks of rows in their order, so that bits do not
//! depend on the number of threads. [`along`] does it along any dimension; there, rows that lie across memory are computed as columns
//! (`columns.rs`). `lanes.rs` has the loops over the vectors of a row, `cuda.rs` the rows of a GPU.

pub(crate) mod columns;
pub(crate) mod cuda;
pub(crate) mod lanes;

use std::ops::Range;

use phalanx_tensor::{Device, Result, Tensor};

use crate::block_reader::BlockReader;
use crate::check;
use crate::dispatch::by_device;
use crate::pointwise::{PIECE, piece_of};
use crate::real::{Real, for_real};
use crate::scratch::with_scratch;
use crate::simd::{Float, Isa, Kernel, LANES_MAX, dispatch};
use columns::ColumnKernel;
use cuda::RowProgram;

/// Blocks of rows, each with sums of its own, at most.
const SUMS_MAX: usize = 64;
/// Elements of neighbouring rows that are widened, computed and rounded in one call each, unless a row has more.
const TOGETHER: usize = 1024;

/// A row, as a [`RowKernel`] gets it.
pub(crate) struct Row<'a, T, const N: usize> {
    /// Its number.
    pub(crate) index: usize,
    /// The inputs' rows.
    pub(crate) x: [&'a [T]; N],
    /// The output's row; empty if the operation has no such output. Without inputs it holds what the tensor held.
    pub(crate) y: &'a mut [T],
    /// The numbers that are kept of the row, such as its mean.
    pub(crate) stats: &'a mut [T],
    /// Sums over the rows of a block, to which the kernel adds.
    pub(crate) sums: &'a mut [T],
}

/// What an operation does to a row.
pub(crate) trait RowKernel<T: Float, const N: usize>: Sync {
    /// The row's computation. To be marked `#[inline(always)]`.
    fn run<S: Isa>(&self, row: Row<'_, T, N>);
}

/// Some neighbouring rows, from number `all.index` on: each slice of `all` holds the rows' parts one after the other.
struct Rows<'a, T, const N: usize> {
    all: Row<'a, T, N>,
    count: usize,
}

/// [`RowKernel::run`] of some rows, as a trait object, so that the frame around it is compiled once and not
/// for every kernel.
type RowsFn<'a, T, const N: usize> = &'a (dyn Fn(Rows<'_, T, N>) + Sync);

/// The sizes of an operation on rows.
#[derive(Clone, Copy)]
pub(crate) struct RowSizes {
    /// How many rows.
    pub(crate) rows: usize,
    /// Elements of an input's row.
    pub(crate) width: usize,
    /// Numbers kept of each row.
    pub(crate) stats: usize,
    /// Sums over all rows.
    pub(crate) sums: usize,
}

/// Where results go: `y` has rows of the inputs' width, or is absent; `stats` gets each row's numbers. Without inputs,
/// the kernel changes `y` in place.
pub(crate) struct Outputs<'a, W> {
    pub(crate) y: Option<&'a mut Tensor>,
    pub(crate) stats: &'a mut [W],
}

/// Runs `kernel` over the rows of the inputs (of one shape and dtype, any strides) and returns the sums.
pub(crate) fn run<T: Real, const N: usize>(
    op: &'static str,
    kernel: &impl RowKernel<T::Wide, N>,
    shape: RowSizes,
    inputs: [&Tensor; N],
    outputs: Outputs<'_, T::Wide>,
) -> Result<Vec<f64>> {
    run_added::<T, N>(op, kernel, shape, inputs, None, outputs)
}

/// [`run`] of a residual sum: with `sum`, the first two inputs are added and rounded into it, and the sum is the kernel's first input.
pub(crate) fn run_added<T: Real, const N: usize>(
    op: &'static str,
    kernel: &impl RowKernel<T::Wide, N>,
    shape: RowSizes,
    inputs: [&Tensor; N],
    sum: Option<&mut Tensor>,
    outputs: Outputs<'_, T::Wide>,
) -> Result<Vec<f64>> {
    run_by::<T, N>(op, &|rows| dispatch(RunRows { kernel, rows }), shape, inputs, sum, outputs)
}

fn run_by<T: Real, const N: usize>(
    op: &'static str,
    kernel: RowsFn<'_, T::Wide, N>,
    shape: RowSizes,
    inputs: [&Tensor; N],
    sum: Option<&mut Tensor>,
    outputs: Outputs<'_, T::Wide>,
) -> Result<Vec<f64>> {
    let like = inputs.first().copied();
    let pool = like.or(outputs.y.as_deref()).map_or(Device::CPU, Tensor::device).pool()?;
    let sources: [BlockReader<'_, T>; N] =
        BlockReader::open_all(op, inputs, like.map_or(&[], Tensor::shape))?;
    let mut y = outputs.y.map(|y| Ok((y.offset(), y.write::<T>(op)?))).transpose()?;
    let y: &mut [T] = y.as_mut().map_or(&mut [], |(at, y)| &mut y[*at..][..shape.rows * shape.width]);
    let mut sum = sum.map(|sum| Ok((sum.offset(), sum.write::<T>(op)?))).transpose()?;
    let sum: &mut [T] = sum.as_mut().map_or(&mut [], |(at, sum)| &mut sum[*at..][..shape.rows * shape.width]);
    let stats = outputs.stats;
    debug_assert_eq!(stats.len(), shape.rows * shape.stats);
    let size = if shape.sums > 0 { PIECE } else { piece_of(shape.rows * shape.width) };
    let mut block = (size / shape.width.max(1)).max(1);
    if shape.sums > 0 {
        block = block.max(shape.rows.div_ceil(SUMS_MAX));
    }
    let mut total = vec![0.0; shape.sums];
    with_scratch(shape.rows.div_ceil(block) * shape.sums, |sums| {
        sums.fill(T::Wide::ZERO);
        let mut y_parts = parts(y, block * shape.width);
        let mut sum_parts = parts(sum, block * shape.width);
        let mut stats_parts = parts(stats, block * shape.stats);
        let mut sums_parts = parts(sums, shape.sums);
        let mut blocks: Vec<RowBlock<'_, T>> = (0..shape.rows.div_ceil(block))
            .map(|i| RowBlock {
                first: i * block,
                count: block.min(shape.rows - i * block),
                y: y_parts.next().unwrap_or_default(),
                sum: sum_parts.next().unwrap_or_default(),
                stats: stats_parts.next().unwrap_or_default(),
                sums: sums_parts.next().unwrap_or_default(),
            })
            .collect();
        pool.for_each_chunk(&mut blocks, 1, |_, blocks| {
            blocks.iter_mut().for_each(|block| block.run(kernel, shape, &sources));
        });
        drop(blocks);
        for block in sums.chunks(shape.sums.max(1)) {
            total.iter_mut().zip(block).for_each(|(to, x)| *to += x.to_f64());
        }
    });
    Ok(total)
}

/// The parts of a slice, one after the other; none of an empty slice.
fn parts<T>(data: &mut [T], size: usize) -> std::slice::ChunksMut<'_, T> {
    data.chunks_mut(size.max(1))
}

/// Some neighbouring rows, worked on by one thread.
struct RowBlock<'a, T: Real> {
    first: usize,
    count: usize,
    y: &'a mut [T],
    sum: &'a mut [T],
    stats: &'a mut [T::Wide],
    sums: &'a mut [T::Wide],
}

impl<T: Real> RowBlock<'_, T> {
    fn run<const N: usize>(
        &mut self,
        kernel: RowsFn<'_, T::Wide, N>,
        shape: RowSizes,
        sources: &[BlockReader<'_, T>; N],
    ) {
        let direct = T::as_wide(&[]).is_some();
        let together = (TOGETHER / shape.width.max(1)).clamp(1, self.count);
        // Whole cache lines each, as rows of tensors have: places within a page that overlap by half a line would stall (4K aliasing).
        let room = (together * shape.width).next_multiple_of(LANES_MAX);
        let places = |yes: bool| if yes { room } else { 0 };
        let gathered = sources.each_ref().map(|source| places(!source.is_wide()));
        let (wide, wide_sum) =
            (places(!direct && !self.y.is_empty()), places(!direct && !self.sum.is_empty()));
        with_scratch(gathered.iter().sum::<usize>() + wide + wide_sum, |scratch| {
            let (wide, rest) = scratch.split_at_mut(wide);
            let (wide_sum, mut rest) = rest.split_at_mut(wide_sum);
            let mut gathered = gathered.map(|len| rest.split_off_mut(..len).unwrap_or_default());
            for i in (0..self.count).step_by(together) {
                let rows = i..self.count.min(i + together);
                self.run_rows(rows, kernel, shape, sources, &mut gathered, [&mut *wide, &mut *wide_sum]);
            }
        });
    }

    /// Computes some rows of the block. Inputs that are not read in place go to `gathered`, outputs that are halves to `wide`.
    fn run_rows<const N: usize>(
        &mut self,
        rows: Range<usize>,
        kernel: RowsFn<'_, T::Wide, N>,
        shape: RowSizes,
        sources: &[BlockReader<'_, T>; N],
        gathered: &mut [&mut [T::Wide]; N],
        [wide, wide_sum]: [&mut [T::Wide]; 2],
    ) {
        let (index, count) = (self.first + rows.start, rows.len());
        let here = rows.start * shape.width..rows.end * shape.width;
        let mut gathered = gathered.iter_mut();
        let mut x = std::array::from_fn(|n| match gathered.next() {
            Some(room) => sources[n].wide(index * shape.width, here.len(), room),
            None => &[],
        });
        if !self.sum.is_empty() {
            x[0] = added::<T>([x[0], x[1]], &mut self.sum[here.clone()], wide_sum);
        }
        let y = if self.y.is_empty() { &mut [] } else { &mut self.y[here] };
        let stats = &mut self.stats[rows.start * shape.stats..rows.end * shape.stats];
        let sums = &mut *self.sums;
        if let Some(y) = T::as_wide_mut(y) {
            return kernel(Rows { all: Row { index, x, y, stats, sums }, count });
        }
        let wide = &mut wide[..y.len()];
        if N == 0 {
            T::widen_all(y, wide);
        }
        kernel(Rows { all: Row { index, x, y: wide, stats, sums }, count });
        T::narrow_all(wide, y);
    }
}

/// Sets `to` to the sum of rows, rounded, and returns it widened, in `room` if `to` is of halves.
fn added<'a, T: Real>(x: [&[T::Wide]; 2], to: &'a mut [T], room: &'a mut [T::Wide]) -> &'a [T::Wide] {
    if let Some(to) = T::as_wide_mut(to) {
        dispatch(Add { x, to });
    } else {
        let room = &mut room[..to.len()];
        dispatch(Add { x, to: room });
        T::narrow_all(room, to);
        T::widen_all(to, room);
    }
    let len = to.len();
    T::as_wide(to).unwrap_or_else(|| &room[..len])
}

struct Add<'a, T> {
    x: [&'a [T]; 2],
    to: &'a mut [T],
}

impl<T: Float> Kernel for Add<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        lanes::map(self.x, self.to, |[a, b]: [T::Vec<S>; 2]| a + b);
    }
}

/// Runs a [`RowKernel`] for some rows on the process's instruction set.
struct RunRows<'a, K, T, const N: usize> {
    kernel: &'a K,
    rows: Rows<'a, T, N>,
}

impl<T: Float, K: RowKernel<T, N>, const N: usize> Kernel for RunRows<'_, K, T, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let Rows { all, count } = self.rows;
        let [y_len, stats_len] = [all.y.len(), all.stats.len()].map(|len| len / count);
        let x_len = all.x.first().map_or(0, |x| x.len() / count);
        for i in 0..count {
            let mut x = all.x;
            for x in &mut x {
                *x = &x[i * x_len..][..x_len];
            }
            let y = &mut all.y[i * y_len..][..y_len];
            let stats = &mut all.stats[i * stats_len..][..stats_len];
            self.kernel.run::<S>(Row { index: all.index + i, x, y, stats, sums: &mut *all.sums });
        }
    }
}

/// A kernel of an operation that is computed by rows or by columns.
pub(crate) trait LineKernel<T: Float, const N: usize>: RowKernel<T, N> + ColumnKernel<T, N> {}

impl<T: Float, K: RowKernel<T, N> + ColumnKernel<T, N>, const N: usize> LineKernel<T, N> for K {}

/// A result of the inputs' shape, whose rows along `dim` are `kernel`'s of the inputs' rows, or on a GPU those of a
/// program's kernel. A tensor without dimensions has one row of one element.
pub(crate) fn along<const N: usize>(
    op: &'static str,
    kernel: impl LineKernel<f32, N> + LineKernel<f64, N>,
    program: (RowProgram, &str),
    inputs: [&Tensor; N],
    dim: usize,
) -> Result<Tensor> {
    check::float(op, inputs[0])?;
    check::same(op, &inputs)?;
    let shape = inputs[0].shape();
    inputs[1..].iter().try_for_each(|t| check::shape(op, "a tensor", t, shape))?;
    let transpose = |t: &Tensor| if t.rank() == 0 { t.with_shape(&[1]) } else { t.transpose(dim, -1) };
    let mut transposed = inputs.map(Tensor::clone);
    for t in &mut transposed {
        *t = transpose(t)?;
    }
    // A CPU reads rows that lie across memory in place, unless they are few or long; a GPU's kernels read rows only.
    let [n, inner] =
        [dim, dim + 1].map(|from| shape.get(from..).map_or(1, |sizes| sizes.iter().product::<usize>()));
    let n = n / inner.max(1);
    if !inputs[0].device().is_cuda() && !transposed[0].is_contiguous() && columns::fits(n, inner) {
        let mut y = Tensor::empty_for(op, shape, inputs[0].dtype(), inputs[0].device())?;
        match y.device().is_meta() {
            true => y.bump_version(),
            false => for_real!(op, y.dtype(), T => {
                columns::run::<T, N>(op, &kernel, [n, inner], inputs, Some(&mut y), (&mut [], 0))
            })?,
        }
        return Ok(y);
    }
    let mut y = Tensor::empty_for(op, transposed[0].shape(), transposed[0].dtype(), transposed[0].device())?;
    by_device(
        &mut y,
        |y| for_real!(op, y.dtype(), T => rows_of::<T, N>(op, &kernel, transposed.each_ref(), y)),
        |y| cuda::map(op, program, transposed.each_ref(), y),
    )?;
    if shape.is_empty() { y.with_shape(&[]) } else { y.transpose(dim, -1) }
}

fn rows_of<T: Real, const N: usize>(
    op: &'static str,
    kernel: &impl RowKernel<T::Wide, N>,
    inputs: [&Tensor; N],
    y: &mut Tensor,
) -> Result<()> {
    let width = y.size(-1)?;
    let shape = RowSizes { rows: y.numel() / width.max(1), width, stats: 0, sums: 0 };
    run::<T, N>(op, kernel, shape, inputs, Outputs { y: Some(y), stats: &mut [] })?;
    Ok(())
}
