//! Small tensors as vectors of the type that is computed in, and back.

use phalanx_tensor::{DType, Element, Result, Tensor};

use crate::real::Real;
use crate::simd::Float;
use crate::source::Source;

/// The dtype that elements of a floating-point `dtype` are computed in.
pub(crate) fn wide_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// All elements in row-major order, widened.
pub(crate) fn widened<T: Real>(op: &'static str, tensor: &Tensor) -> Result<Vec<T::Wide>> {
    let source = Source::<T>::open(op, tensor, tensor.shape())?;
    let mut wide = vec![T::Wide::ZERO; tensor.numel()];
    source.copy_wide(0, &mut wide);
    Ok(wide)
}

/// [`widened`] of a tensor that may be absent.
pub(crate) fn widened_if<T: Real>(op: &'static str, tensor: Option<&Tensor>) -> Result<Option<Vec<T::Wide>>> {
    tensor.map(|t| widened::<T>(op, t)).transpose()
}

/// All elements of a tensor that has the wide dtype already.
pub(crate) fn elements<T: Element>(op: &'static str, tensor: &Tensor) -> Result<Vec<T>> {
    let source = Source::<T>::open(op, tensor, tensor.shape())?;
    let mut elements = vec![T::zeroed(); tensor.numel()];
    source.copy_to(0, &mut elements);
    Ok(elements)
}

/// Sets the elements of a contiguous tensor, each rounded to its dtype.
pub(crate) fn store<T: Real>(op: &'static str, to: &mut Tensor, values: &[f64]) -> Result<()> {
    debug_assert!(to.is_contiguous());
    let at = to.offset();
    let mut target = to.write::<T>(op)?;
    let target = target[at..].iter_mut().zip(values);
    target.for_each(|(to, &x)| *to = T::narrow(T::Wide::from_f64(x)));
    Ok(())
}
