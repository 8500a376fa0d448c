//! Operations on the rows that lie along one dimension of a tensor.

use phalanx_tensor::{Result, Tensor};

use crate::check;
use crate::dispatch::by_device;
use crate::real::{Real, for_real};
use crate::rows::columns::{self, ColumnKernel};
use crate::rows::cuda::RowProgram;
use crate::rows::{self, Outputs, RowKernel, Shape};
use crate::simd::Float;

/// A kernel for rows of a wide type, and for columns.
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
    let turn = |t: &Tensor| if t.rank() == 0 { t.with_shape(&[1]) } else { t.transpose(dim, -1) };
    let mut turned = inputs.map(Tensor::clone);
    for t in &mut turned {
        *t = turn(t)?;
    }
    // A CPU reads rows that lie across memory in place, unless they are few or long; a GPU's kernels read rows only.
    let [n, inner] =
        [dim, dim + 1].map(|from| shape.get(from..).map_or(1, |sizes| sizes.iter().product::<usize>()));
    let n = n / inner.max(1);
    if !inputs[0].device().is_cuda() && !turned[0].is_contiguous() && columns::fits(n, inner) {
        let mut y = Tensor::empty_for(op, shape, inputs[0].dtype(), inputs[0].device())?;
        match y.device().is_meta() {
            true => y.bump_version(),
            false => for_real!(op, y.dtype(), T => {
                columns::run::<T, N>(op, &kernel, [n, inner], inputs, Some(&mut y), (&mut [], 0))
            })?,
        }
        return Ok(y);
    }
    let mut y = Tensor::empty_for(op, turned[0].shape(), turned[0].dtype(), turned[0].device())?;
    by_device(
        &mut y,
        |y| for_real!(op, y.dtype(), T => rows_of::<T, N>(op, &kernel, turned.each_ref(), y)),
        |y| rows::cuda::map(op, program, turned.each_ref(), y),
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
    let shape = Shape { rows: y.numel() / width.max(1), width, stats: 0, sums: 0 };
    rows::run::<T, N>(op, kernel, shape, inputs, Outputs { y: Some(y), stats: &mut [] })?;
    Ok(())
}
