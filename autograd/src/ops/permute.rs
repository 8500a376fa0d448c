//! Dimensions in another order, as views.
//!
//! Derivative: `dy` in the old order.

use phalanx_tensor::{Dim, Dims, resolve_dims};

use super::linear_map::record_view;
use crate::{Result, Var};

impl Var {
    /// Dimension `i` of the result is dimension `dims[i]` of this.
    ///
    /// # Errors
    /// If `dims` is not a permutation of the dimensions.
    pub fn permute<D: Dim>(&self, dims: &[D]) -> Result<Var> {
        let dims = resolve_dims("permute", dims, self.rank())?;
        let y = self.tensor().permute(&dims)?;
        let mut inverse = Dims::from_elem(0, dims.len());
        dims.iter().enumerate().for_each(|(i, &d)| inverse[d] = i);
        record_view("permute", self, y, move |dy| dy.permute(&inverse))
    }

    /// Two dimensions exchanged.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn transpose(&self, a: impl Dim, b: impl Dim) -> Result<Var> {
        let (a, b) = (a.resolve(self.rank(), "transpose")?, b.resolve(self.rank(), "transpose")?);
        record_view("transpose", self, self.tensor().transpose(a, b)?, move |dy| dy.transpose(a, b))
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn permutations_have_their_derivatives() {
        check_twice(&[&[2, 3, 4]], |v| {
            let y = v[0].permute(&[2, 0, 1])?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].transpose(0, -1)?;
            y.mul(&y)
        });
    }
}
