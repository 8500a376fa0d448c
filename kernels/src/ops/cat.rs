//! Tensors joined along a dimension.

use phalanx_tensor::{Dim, Dims, Error, Result, Tensor};

use crate::check;
use crate::ops::copy::copy_;

/// The tensors one after another along `dim`; their other sizes must agree.
///
/// # Errors
/// If there is none, or ranks, other sizes, dtypes or devices differ.
pub fn cat(tensors: &[&Tensor], dim: impl Dim) -> Result<Tensor> {
    let first = tensors.first().ok_or_else(|| Error::invalid(OP, "got no tensors, wanted at least one"))?;
    cat_along(tensors, first, dim.resolve(first.rank(), OP)?)
}

const OP: &str = "cat";

fn cat_along(tensors: &[&Tensor], first: &Tensor, dim: usize) -> Result<Tensor> {
    check::same(OP, tensors)?;
    let others = |t: &Tensor| -> Dims {
        t.shape().iter().enumerate().map(|(d, &n)| if d == dim { 0 } else { n }).collect()
    };
    if let Some(odd) = tensors.iter().find(|t| t.rank() != first.rank() || others(t) != others(first)) {
        let wanted = format!("the sizes of {:?} but in dimension {dim}", first.shape());
        return Err(Error::shape(OP, format!("a tensor of shape {:?}", odd.shape()), wanted));
    }
    let mut shape = others(first);
    shape[dim] = tensors.iter().map(|t| t.shape()[dim]).sum();
    let out = Tensor::empty_for(OP, &shape, first.dtype(), first.device())?;
    let mut start = 0;
    for tensor in tensors {
        let length = tensor.shape()[dim];
        copy_(&mut out.narrow(dim, start, length)?, tensor)?;
        start += length;
    }
    Ok(out)
}
