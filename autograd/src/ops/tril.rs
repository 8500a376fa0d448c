//! The lower and the upper triangle of matrices, zero elsewhere.
//!
//! Derivative: the same triangle of `dy`.

use phalanx_kernels as kernels;

use super::linear_map::record_linear;
use crate::{Result, Var, begins};

impl Var {
    /// Of each matrix (the last two dimensions) the elements on and below a diagonal, 0 above it. Diagonal 0 is the
    /// main one, positive ones lie above it.
    ///
    /// # Errors
    /// If there are fewer than two dimensions.
    pub fn tril(&self, diagonal: isize) -> Result<Var> {
        begins();
        record_linear("tril", self, kernels::tril(self.tensor(), diagonal)?, move |dy| dy.tril(diagonal))
    }

    /// Of each matrix the elements on and above a diagonal, 0 below it.
    ///
    /// # Errors
    /// If there are fewer than two dimensions.
    pub fn triu(&self, diagonal: isize) -> Result<Var> {
        begins();
        record_linear("triu", self, kernels::triu(self.tensor(), diagonal)?, move |dy| dy.triu(diagonal))
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn triangles_have_their_derivatives() {
        check_twice(&[&[2, 3, 4]], |v| {
            let y = v[0].tril(1)?;
            y.mul(&y)
        });
        check_twice(&[&[4, 3]], |v| {
            let y = v[0].triu(-1)?;
            y.mul(&y)
        });
    }
}
