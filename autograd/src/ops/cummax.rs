//! The largest and the smallest element so far along a dimension, and where it was.
//!
//! Derivative: `dy` added where the values were picked. Saves the indices.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dim, Result as TensorResult, Tensor};

use crate::{Result, Var, begins};

impl Var {
    /// The largest element so far along `dim`, and its index (i64): the last of equal ones. NaN from the first NaN on.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn cummax(&self, dim: impl Dim) -> Result<(Var, Var)> {
        begins();
        picked("cummax", self, dim, kernels::cummax)
    }

    /// The smallest element so far along `dim`, and its index (i64): the last of equal ones. NaN from the first NaN on.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn cummin(&self, dim: impl Dim) -> Result<(Var, Var)> {
        begins();
        picked("cummin", self, dim, kernels::cummin)
    }
}

fn picked(
    name: &'static str,
    x: &Var,
    dim: impl Dim,
    running: fn(&Tensor, usize) -> TensorResult<Tensor>,
) -> Result<(Var, Var)> {
    let dim = dim.resolve(x.rank().max(1), name)?;
    if x.rank() == 0 {
        return Ok((x.clone(), Var::new(Tensor::zeros(&[], DType::I64, x.device())?)));
    }
    // An element that equals the best so far is the last that does.
    let best = running(x.tensor(), dim)?;
    let is_best = kernels::eq(&kernels::cast(x.tensor(), best.dtype())?, &best)?;
    let is_nan = kernels::ne(x.tensor(), x.tensor())?;
    let is_new = kernels::bitwise_or(&is_best, &is_nan)?;
    let size = x.shape()[dim];
    let mut along = vec![1; x.rank()];
    along[dim] = size;
    let places = kernels::arange(0, size as i64, 1, DType::I64, x.device())?.with_shape(&along)?;
    let is_old = kernels::eq_scalar(&is_new, 0.into())?;
    let places = kernels::masked_fill(&places.broadcast_to(x.shape())?, &is_old, 0.into())?;
    let indices = Var::new(kernels::cummax(&places, dim)?);
    Ok((x.gather(dim, &indices)?, indices))
}
