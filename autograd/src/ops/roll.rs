//! Elements moved along dimensions, those that fall off the end put in at the front.
//!
//! `y[(i + shift) mod n] = x[i]`. Derivative: `dy` moved back.

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, Error};

use super::linear_map::record_view;
use crate::{Result, Var};

impl Var {
    /// Moves the elements by `shifts[i]` along `dims[i]`, one dimension after another (which may repeat).
    ///
    /// # Errors
    /// If there are not as many shifts as dimensions, or a dimension does not exist.
    pub fn roll<D: Dim>(&self, shifts: &[isize], dims: &[D]) -> Result<Var> {
        if shifts.len() != dims.len() {
            let got = format!("{} shifts for {} dimensions", shifts.len(), dims.len());
            return Err(Error::shape("roll", got, "one shift a dimension").into());
        }
        shifts.iter().zip(dims).try_fold(self.clone(), |x, (&shift, dim)| {
            let dim = dim.resolve(x.rank(), "roll")?;
            let size = x.shape()[dim];
            if size == 0 || shift.rem_euclid(size as isize) == 0 {
                return Ok(x);
            }
            let front = shift.rem_euclid(size as isize).unsigned_abs();
            let (all, rest) = (x.tensor(), size - front);
            let y = kernels::cat(&[&all.narrow(dim, rest, front)?, &all.narrow(dim, 0, rest)?], dim)?;
            record_view("roll", &x, y, move |dy| dy.roll(&[rest as isize], &[dim]))
        })
    }

    /// [`Var::roll`] of the flattened elements, in the shape that they had.
    ///
    /// # Errors
    /// None but those of the device.
    pub fn roll_all(&self, shift: isize) -> Result<Var> {
        let shape = Dims::from_slice(self.shape());
        self.reshape_to(&[self.numel()])?.roll(&[shift], &[0])?.reshape_to(&shape)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn rolls_have_their_derivatives() {
        check_twice(&[&[3, 4]], |v| {
            let y = v[0].roll(&[1, -6], &[0, 1])?.mul(&v[0])?;
            y.mul(&y)
        });
        check_twice(&[&[3, 2]], |v| {
            let y = v[0].roll_all(-5)?.mul(&v[0])?;
            y.mul(&y)
        });
    }
}
