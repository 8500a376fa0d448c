//! What operations ask of their arguments, and the errors that say so: one device, one dtype, a floating-point dtype, a given shape.
//! An operation calls these before it allocates its output: `check::float("softmax", x)?`.

use phalanx_tensor::{DType, Error, Result, Tensor};

/// All on one device: a missing copy is an error, on logical CPU devices too.
#[inline]
pub(crate) fn same_device(op: &'static str, tensors: &[&Tensor]) -> Result<()> {
    let Some((first, rest)) = tensors.split_first() else { return Ok(()) };
    match rest.iter().find(|t| t.device() != first.device()) {
        Some(other) => Err(Error::Device { op, left: first.device(), right: other.device() }),
        None => Ok(()),
    }
}

/// All on one device and of one dtype.
#[inline]
pub(crate) fn same(op: &'static str, tensors: &[&Tensor]) -> Result<()> {
    match tensors.split_first() {
        Some((first, rest)) if !rest.iter().all(|t| t.is_like(first)) => refuse_others(op, tensors),
        _ => Ok(()),
    }
}

/// The first that is on another device, else the first of another dtype.
#[cold]
fn refuse_others(op: &'static str, tensors: &[&Tensor]) -> Result<()> {
    same_device(op, tensors)?;
    let Some((first, rest)) = tensors.split_first() else { return Ok(()) };
    match rest.iter().find(|t| t.dtype() != first.dtype()) {
        Some(other) => {
            Err(Error::dtype(op, other.dtype(), format!("{}, as the first operand", first.dtype())))
        }
        None => Ok(()),
    }
}

/// A floating-point dtype.
#[inline]
pub(crate) fn float(op: &'static str, tensor: &Tensor) -> Result<()> {
    dtype_is(op, tensor, tensor.dtype().is_float(), "a floating-point dtype")
}

/// One given dtype.
pub(crate) fn dtype(op: &'static str, tensor: &Tensor, wanted: DType) -> Result<()> {
    dtype_is(op, tensor, tensor.dtype() == wanted, wanted.name())
}

#[inline]
fn dtype_is(op: &'static str, tensor: &Tensor, holds: bool, wanted: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::dtype(op, tensor.dtype(), wanted)) }
}

/// One given shape.
pub(crate) fn shape(op: &'static str, what: &str, tensor: &Tensor, wanted: &[usize]) -> Result<()> {
    if tensor.shape() == wanted {
        return Ok(());
    }
    Err(Error::shape(op, format!("{what} of shape {:?}", tensor.shape()), format!("{wanted:?}")))
}

/// The weight and bias of a normalisation of `x`, where there are any: like `x`, of the given shape.
pub(crate) fn affine(
    op: &'static str,
    x: &Tensor,
    weight_and_bias: &[Option<&Tensor>],
    wanted: &[usize],
) -> Result<()> {
    for t in weight_and_bias.iter().copied().flatten() {
        same(op, &[x, t])?;
        shape(op, "a weight or bias", t, wanted)?;
    }
    Ok(())
}

/// A number from 0 up.
#[inline]
pub(crate) fn from_zero(op: &'static str, name: &str, x: f64) -> Result<()> {
    if x >= 0.0 { Ok(()) } else { Err(Error::range(op, format!("{name} {x:?}"), "0 or more")) }
}
