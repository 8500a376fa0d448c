//! Views of a part: `narrow`, `slice`, `select`.
//!
//! Derivative: zeros of the input's shape with `dy` where the part lies.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, Error, Tensor};

use super::linear_map::record_view;
use crate::{Result, Var};

impl Var {
    /// Elements `start .. start + length` along `dim`, as a view.
    ///
    /// # Errors
    /// If the range is not inside the dimension.
    pub fn narrow(&self, dim: impl Dim, start: usize, length: usize) -> Result<Var> {
        let dim = dim.resolve(self.rank(), "narrow")?;
        subset("narrow", self, move |t| t.narrow(dim, start, length))
    }

    /// Python's `x[start:end:step]` along `dim`, as a view: negative bounds count from the end, and bounds beyond
    /// it are cut.
    ///
    /// # Errors
    /// If there is no such dimension or `step` is 0.
    pub fn slice(&self, dim: impl Dim, start: Option<isize>, end: Option<isize>, step: usize) -> Result<Var> {
        let dim = dim.resolve(self.rank(), "slice")?;
        let size = self.shape()[dim];
        let bound = |at: isize| match at {
            ..0 => size.saturating_sub(at.unsigned_abs()),
            _ => size.min(at.unsigned_abs()),
        };
        let (start, end) = (start.map_or(0, bound), end.map_or(size, bound));
        subset("slice", self, move |t| t.slice(dim, start, end.max(start), step))
    }

    /// The part at `index` along `dim`, which goes away; a view.
    ///
    /// # Errors
    /// If there is no such index.
    pub fn select(&self, dim: impl Dim, index: usize) -> Result<Var> {
        let dim = dim.resolve(self.rank(), "select")?;
        subset("select", self, move |t| t.select(dim, index))
    }
}

/// A view of a part of `x`.
pub(super) fn subset<F>(name: &'static str, x: &Var, view: F) -> Result<Var>
where
    F: Fn(&Tensor) -> phalanx_tensor::Result<Tensor> + Clone + Send + Sync + 'static,
{
    let from = Dims::from_slice(x.shape());
    record_view(name, x, view(x.tensor())?, move |dy| place(name, dy, &from, view.clone()))
}

/// The transposed map: zeros of a shape, with `x` in their view.
pub(super) fn place<F>(name: &'static str, x: &Var, shape: &[usize], view: F) -> Result<Var>
where
    F: Fn(&Tensor) -> phalanx_tensor::Result<Tensor> + Clone + Send + Sync + 'static,
{
    let whole = Tensor::zeros_for(name, shape, x.dtype(), x.device())?;
    let mut part = view(&whole)?;
    if part.shape() != x.shape() {
        return Err(Error::shape(name, format!("{:?}", x.shape()), format!("{:?}", part.shape())).into());
    }
    kernels::copy_(&mut part, x.tensor())?;
    record_view(name, x, whole, move |dy| subset(name, dy, view.clone()))
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn parts_have_their_derivatives() {
        check_twice(&[&[4, 3]], |v| {
            let y = v[0].narrow(0, 1, 2)?;
            y.mul(&y)
        });
        check_twice(&[&[7, 2]], |v| {
            let y = v[0].slice(0, Some(-6), Some(100), 2)?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].select(-1, 2)?;
            y.mul(&y)
        });
    }
}
