//! `y = sum(x)` and `y = mean(x)` over dimensions.
//!
//! Derivative: `dy` repeated along the summed dimensions, over their number for the mean. Nothing is saved but the
//! shape.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, resolve_dims};

use super::linear_map::record_linear;
use crate::{Result, Var, begins};

impl Var {
    /// The sum of all elements, without dimensions.
    ///
    /// # Errors
    /// None but those of the device.
    pub fn sum_all(&self) -> Result<Var> {
        self.sum(&all_dims(self), false)
    }

    /// The sum over `dims`, which stay with size 1 if `keepdim`. Integers and bools are summed in i64.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn sum<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
        begins();
        let dims = dims_of("sum", dims, self)?;
        let y = kernels::sum(self.tensor(), &dims, keepdim)?;
        let from = Dims::from_slice(self.shape());
        record_linear("sum", self, y, move |dy| dy.spread(&from, &dims))
    }

    /// The sum over `dims` of what is no NaN; they stay with size 1 if `keepdim`. Integers and bools are summed in i64.
    /// The derivative by a NaN is 0.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn nansum<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
        let dims = dims_of("nansum", dims, self)?;
        if !self.dtype().is_float() {
            return self.sum(&dims, keepdim);
        }
        self.masked_fill(&self.isnan()?, 0.0)?.sum(&dims, keepdim)
    }

    /// The mean of all elements, without dimensions.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn mean_all(&self) -> Result<Var> {
        self.mean(&all_dims(self), false)
    }

    /// The mean over `dims`, which stay with size 1 if `keepdim`.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
    pub fn mean<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
        begins();
        let dims = dims_of("mean", dims, self)?;
        let y = kernels::mean(self.tensor(), &dims, keepdim)?;
        let from = Dims::from_slice(self.shape());
        let n: usize = dims.iter().map(|&d| from[d]).product();
        record_linear("mean", self, y, move |dy| dy.mul_scalar(1.0 / n as f64)?.spread(&from, &dims))
    }

    /// What a reduction of a tensor of shape `from` over `dims` made, with or without those dimensions, repeated
    /// along them.
    pub(super) fn spread(&self, from: &[usize], dims: &[usize]) -> Result<Var> {
        self.reshape_to(&reduced(from, dims))?.broadcast_to(from)
    }
}

/// The dimensions to reduce over; a scalar may be reduced over its only one, as it were.
pub(super) fn dims_of<D: Dim>(op: &'static str, dims: &[D], x: &Var) -> Result<Dims> {
    let mut dims = resolve_dims(op, dims, x.rank().max(1))?;
    dims.retain(|d| *d < x.rank());
    Ok(dims)
}

/// Every dimension.
pub(super) fn all_dims(x: &Var) -> Dims {
    (0..x.rank()).collect()
}

/// The shape with `dims` of size 1.
pub(super) fn reduced(from: &[usize], dims: &[usize]) -> Dims {
    from.iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect()
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn sums_and_means_have_their_derivatives() {
        check_twice(&[&[2, 3, 2]], |v| {
            let y = v[0].sum(&[0, -1], false)?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].mean(&[1], true)?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].mean_all()?;
            y.mul(&y)
        });
    }
}
