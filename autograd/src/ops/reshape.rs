//! The same elements in another shape.
//!
//! Derivative: `dy` in the old shape. A view where strides can express it, else a copy.

use phalanx_tensor::{Dim, Dims, Error, resolve_dims, resolve_shape};

use super::linear_map::record_view;
use crate::{Result, Var};

impl Var {
    /// The elements in row-major order in another shape, in which one size may be -1 and is inferred.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape(&self, shape: &[isize]) -> Result<Var> {
        self.reshape_to(&resolve_shape("reshape", self.shape(), shape)?)
    }

    /// [`Var::reshape`] to a shape without -1.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape_to(&self, shape: &[usize]) -> Result<Var> {
        let from = Dims::from_slice(self.shape());
        record_view("reshape", self, self.tensor().with_shape(shape)?, move |dy| dy.reshape_to(&from))
    }

    /// Dimensions `start ..= end` made one. A scalar becomes `[1]`.
    ///
    /// # Errors
    /// If there are no such dimensions, or `end` comes before `start`.
    pub fn flatten(&self, start: impl Dim, end: impl Dim) -> Result<Var> {
        let rank = self.rank().max(1);
        let (start, end) = (start.resolve(rank, "flatten")?, end.resolve(rank, "flatten")?);
        if start > end {
            return Err(Error::range("flatten", format!("{start} to {end}"), "a start up to the end").into());
        }
        let mut shape = Dims::from_slice(self.shape());
        if shape.is_empty() {
            shape.push(1);
        }
        let size = shape[start..=end].iter().product();
        shape.drain(start + 1..=end);
        shape[start] = size;
        self.reshape_to(&shape)
    }

    /// A dimension of size 1 put in before `dim`; -1 puts it last.
    ///
    /// # Errors
    /// If there is no such place.
    pub fn unsqueeze(&self, dim: impl Dim) -> Result<Var> {
        let mut shape = Dims::from_slice(self.shape());
        shape.insert(dim.resolve(self.rank() + 1, "unsqueeze")?, 1);
        self.reshape_to(&shape)
    }

    /// Those of `dims` that have size 1 taken out; the others stay.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn squeeze<D: Dim>(&self, dims: &[D]) -> Result<Var> {
        let dims = resolve_dims("squeeze", dims, self.rank().max(1))?;
        self.squeeze_where(|d| dims.contains(&d))
    }

    /// Every dimension of size 1 taken out.
    ///
    /// # Errors
    /// None but those of the device.
    pub fn squeeze_all(&self) -> Result<Var> {
        self.squeeze_where(|_| true)
    }

    fn squeeze_where(&self, out: impl Fn(usize) -> bool) -> Result<Var> {
        let sizes = self.shape().iter().enumerate();
        let kept: Dims = sizes.filter(|&(d, &n)| n != 1 || !out(d)).map(|(_, &n)| n).collect();
        self.reshape_to(&kept)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn other_shapes_have_their_derivatives() {
        check_twice(&[&[2, 3, 1]], |v| {
            let y = v[0].reshape(&[3, -1])?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3, 1]], |v| {
            let y = v[0].flatten(0, -2)?.squeeze(&[-1])?.unsqueeze(-1)?;
            y.mul(&y)
        });
        check_twice(&[&[1, 3, 1]], |v| {
            let y = v[0].squeeze_all()?;
            y.mul(&y)
        });
    }
}
