//! Rows added by index.

use phalanx_tensor::{DType, Dim, Dims, Error, Result, Scalar, Tensor, bf16, f16};

use super::add_rows::add_rows;
use super::summand::Summand;
use super::{cuda, indices};
use crate::check;

/// `x`, with `alpha` times part `i` of `source` added to its part `index[i]` along `dim`, for each `i`. Floats and
/// integers; what goes to one part is summed first, in ascending order.
///
/// # Errors
/// If there is no such dimension, shapes do not fit, dtypes or devices differ, or an index is out of range.
pub fn index_add(x: &Tensor, dim: impl Dim, index: &Tensor, source: &Tensor, alpha: f64) -> Result<Tensor> {
    add_along(x, dim.resolve(x.rank(), OP)?, index, source, alpha)
}

const OP: &str = "index_add";

fn add_along(x: &Tensor, dim: usize, index: &Tensor, source: &Tensor, alpha: f64) -> Result<Tensor> {
    check::same(OP, &[x, source])?;
    if x.dtype() != DType::Bool {
        Scalar::Float(alpha).fitting(OP, x.dtype())?;
    }
    let mut shape = Dims::from_slice(x.shape());
    shape[dim] = index.numel();
    check::shape(OP, "a source", source, &shape)?;
    if index.rank() > 1 {
        return Err(Error::shape(OP, format!("an index of shape {:?}", index.shape()), "one dimension"));
    }
    let index = indices(OP, index, x)?;
    let mut out = x.copy()?;
    if out.device().is_meta() {
        return Ok(out);
    }
    if out.device().is_cuda() && x.dtype() != DType::Bool {
        let inner = out.shape()[dim + 1..].iter().product();
        let rows = out.shape()[dim];
        cuda::add_rows(OP, &index, source, [rows, inner], &mut out, cuda::Rows::AddScaled(alpha))?;
        return Ok(out);
    }
    match x.dtype() {
        DType::F64 => add::<f64>(OP, &index, source, dim, alpha, &mut out)?,
        DType::F32 => add::<f32>(OP, &index, source, dim, alpha, &mut out)?,
        DType::BF16 => add::<bf16>(OP, &index, source, dim, alpha, &mut out)?,
        DType::F16 => add::<f16>(OP, &index, source, dim, alpha, &mut out)?,
        DType::I64 => add::<i64>(OP, &index, source, dim, alpha, &mut out)?,
        DType::I32 => add::<i32>(OP, &index, source, dim, alpha, &mut out)?,
        DType::U8 => add::<u8>(OP, &index, source, dim, alpha, &mut out)?,
        DType::Bool => return Err(Error::dtype(OP, DType::Bool, "a number dtype")),
    }
    Ok(out)
}

fn add<T: Summand>(
    op: &'static str,
    index: &Tensor,
    source: &Tensor,
    dim: usize,
    alpha: f64,
    out: &mut Tensor,
) -> Result<()> {
    let (rows, inner) = (out.shape()[dim], out.shape()[dim + 1..].iter().product());
    let put = |to: &mut [T], sums: &[T::Sum]| {
        let add = |(to, &sum): (&mut T, &T::Sum)| *to = T::narrow(T::add(to.widen(), T::scale(sum, alpha)));
        to.iter_mut().zip(sums).for_each(add);
    };
    add_rows::<T, T>(op, index, source, rows, inner, out, put, |_| {})
}
