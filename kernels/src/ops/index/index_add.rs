//! Rows added by index.

use phalanx_tensor::{DType, Dim, Dims, Error, Result, Scalar, Tensor};

use super::add_rows::{ADD_FLOATS, ADD_NUMBERS};
use super::cuda::Rows;
use super::indices;
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
    let sizes = [out.shape()[dim], out.shape()[dim + 1..].iter().product()];
    let end = Rows::AddScaled(alpha);
    ADD_NUMBERS.run(out.device(), |add_rows| add_rows(OP, &index, source, sizes, &mut out, end))?;
    Ok(out)
}

/// The gradient of [`crate::index_select`] from a tensor of that shape, given that of its result: for each part the sum of
/// those of `dy` whose index names it, ascending, begun at 0.
///
/// # Errors
/// If shapes do not fit, the dtype is no floating-point one, or an index is out of range.
pub fn index_select_backward(dy: &Tensor, dim: usize, index: &Tensor, shape: &[usize]) -> Result<Tensor> {
    const OP: &str = "index_select_backward";
    let mut picked = Dims::from_slice(shape);
    picked[dim] = index.numel();
    check::shape(OP, "a gradient", dy, &picked)?;
    let index = indices(OP, index, dy)?;
    let sizes = [shape[dim], shape[dim + 1..].iter().product()];
    let mut out = Tensor::empty_for(OP, shape, dy.dtype(), dy.device())?;
    let end = Rows::Store { padding: None };
    ADD_FLOATS.run(out.device(), |add_rows| add_rows(OP, &index, dy, sizes, &mut out, end))?;
    Ok(out)
}
