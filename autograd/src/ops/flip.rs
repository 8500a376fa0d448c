//! The order along dimensions reversed.
//!
//! Derivative: `dy` reversed in the same way.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, resolve_dims};

use super::linear_map::record_view;
use crate::{Result, Var};

impl Var {
    /// The order along each of `dims` reversed.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn flip<D: Dim>(&self, dims: &[D]) -> Result<Var> {
        let dims = resolve_dims("flip", dims, self.rank())?;
        record_view("flip", self, kernels::flip(self.tensor(), &dims)?, move |dy| dy.flip(&dims))
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn reversals_have_their_derivatives() {
        check_twice(&[&[2, 3, 2]], |v| {
            let y = v[0].flip(&[0, -1])?.mul(&v[0])?;
            y.mul(&y)
        });
    }
}
