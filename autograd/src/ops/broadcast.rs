//! Broadcasting and its reverse, the sum over what was repeated.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dims, Error};

use super::linear_map::{record_linear, record_view};
use crate::{Result, Var};

impl Var {
    /// Repeats dimensions of size 1, and adds dimensions in front, to reach `shape`; no copy is made.
    ///
    /// Derivative: the sum over the repeated dimensions.
    ///
    /// # Errors
    /// If the shape does not broadcast to `shape`.
    pub fn broadcast_to(&self, shape: &[usize]) -> Result<Var> {
        let y = self.tensor().broadcast_to(shape)?;
        let from = Dims::from_slice(self.shape());
        record_view("broadcast_to", self, y, move |dy| dy.sum_to(&from))
    }

    /// [`Var::broadcast_to`] where a size of -1 keeps the dimension's.
    ///
    /// # Errors
    /// If the shape does not broadcast to `sizes`, or a dimension added in front is -1.
    pub fn expand(&self, sizes: &[isize]) -> Result<Var> {
        let wrong = || {
            let wanted = format!("a shape that broadcasts to {sizes:?}, in which -1 keeps a size");
            Error::shape("expand", format!("{:?}", self.shape()), wanted)
        };
        let lead = sizes.len().checked_sub(self.rank()).ok_or_else(wrong)?;
        let size = |(i, &n): (usize, &isize)| match n {
            -1 => i.checked_sub(lead).map(|i| self.shape()[i]),
            n => usize::try_from(n).ok(),
        };
        let shape: Option<Dims> = sizes.iter().enumerate().map(size).collect();
        self.broadcast_to(&shape.ok_or_else(wrong)?)
    }

    /// The tensor `repeats[i]` times along dimension `i`; more repeats than dimensions add dimensions in front.
    ///
    /// # Errors
    /// If there are fewer repeats than dimensions.
    pub fn repeat(&self, repeats: &[usize]) -> Result<Var> {
        let Some(lead) = repeats.len().checked_sub(self.rank()) else {
            let wanted = format!("at least {}, one a dimension of {:?}", self.rank(), self.shape());
            return Err(Error::shape("repeat", format!("{} repeats", repeats.len()), wanted).into());
        };
        let sizes = || {
            repeats.iter().enumerate().map(|(i, &r)| (r, i.checked_sub(lead).map_or(1, |i| self.shape()[i])))
        };
        let once: Dims = sizes().flat_map(|(_, n)| [1, n]).collect();
        let apart: Dims = sizes().flat_map(|(r, n)| [r, n]).collect();
        let merged: Dims = sizes().map(|(r, n)| r * n).collect();
        self.reshape_to(&once)?.broadcast_to(&apart)?.reshape_to(&merged)
    }

    /// The reverse of [`Var::broadcast_to`]: sums over what was repeated from `shape`. Itself if the shapes agree.
    ///
    /// # Errors
    /// If `shape` does not broadcast to this shape.
    pub fn sum_to(&self, shape: &[usize]) -> Result<Var> {
        if self.shape() == shape {
            return Ok(self.clone());
        }
        let lead = self.rank().saturating_sub(shape.len());
        let repeated = |d: &usize| *d < lead || (shape[*d - lead] == 1 && self.shape()[*d] != 1);
        let dims: Dims = (0..self.rank()).filter(repeated).collect();
        let y = kernels::sum(self.tensor(), &dims, true)?.with_shape(shape)?;
        let from = Dims::from_slice(self.shape());
        record_linear("sum_to", self, y, move |dy| dy.broadcast_to(&from))
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn repetitions_have_their_derivatives() {
        check_twice(&[&[2, 1]], |v| {
            let y = v[0].expand(&[3, -1, 4])?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].repeat(&[2, 1, 3])?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].sum_to(&[3])?;
            y.mul(&y)
        });
    }
}
