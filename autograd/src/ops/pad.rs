//! Margins of a constant around a tensor, or crops.
//!
//! Derivative: `dy` with the margins taken off, and zeros where the input was cropped: the same with negative
//! margins.

use phalanx_kernels as kernels;
use phalanx_tensor::Scalar;
use smallvec::SmallVec;

use super::linear_map::record_view;
use crate::{Result, Var};

impl Var {
    /// Puts `before` elements of `value` before and `after` behind, along each of the last dimensions: `margins[i]`
    /// is `(before, after)` of dimension `rank - 1 - i`. Negative margins crop.
    ///
    /// # Errors
    /// If there are more margins than dimensions, or they crop more than there is.
    pub fn pad(&self, margins: &[(isize, isize)], value: impl Into<Scalar>) -> Result<Var> {
        let y = kernels::pad(self.tensor(), margins, value.into())?;
        let back: SmallVec<[(isize, isize); 4]> = margins.iter().map(|&(b, a)| (-b, -a)).collect();
        record_view("pad", self, y, move |dy| dy.pad(&back, 0))
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn margins_have_their_derivatives() {
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].pad(&[(1, 2), (0, 1)], 0.5)?;
            y.mul(&y)
        });
        check_twice(&[&[4, 3]], |v| {
            let y = v[0].pad(&[(-1, 1), (2, -3)], 0.5)?;
            y.mul(&y)
        });
    }
}
