//! `s = x + residual` and `y`, the root-mean-square normalisation of `s`, in one pass.
//!
//! Derivative: `dx = dresidual = ds + ` [`rms_norm`](super::rms_norm)'s for `dy`, added in that pass; `dw` is the latter's.
//! Shapes: `x`, `residual`, `s` and `y` [.., n..], `w` [n..]. Saves `s`, `w` and a number a row.

use phalanx_kernels as kernels;
use phalanx_tensor::Dims;

use super::layer_norm::{Form, record_added};
use crate::{Result, Var, begins};

impl Var {
    /// `self + residual`, of one shape, and its [`Var::rms_norm`]: the values of [`Var::add`] and that, to the bit.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn add_rms_norm(
        &self,
        residual: &Var,
        normalized_shape: &[usize],
        weight: Option<&Var>,
        eps: f64,
    ) -> Result<(Var, Var)> {
        begins();
        let ([x, r], w) = ([self, residual].map(Var::tensor), weight.map(Var::tensor));
        let made = kernels::add_rms_norm(x, r, normalized_shape, w, eps)?;
        let form = Form { shape: Dims::from_slice(normalized_shape), centred: false, eps };
        let inputs = [self, residual].into_iter().chain(weight);
        record_added("add_rms_norm", form, inputs, weight.is_some(), made)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        for width in [1, 7, 33] {
            let (x, w) = (&[2, width][..], &[width][..]);
            check_twice(&[x, x, w], |v| v[0].add_rms_norm(&v[1], w, Some(&v[2]), 1e-2));
        }
        check_twice(&[&[1, 129], &[1, 129]], |v| v[0].add_rms_norm(&v[1], &[129], None, 1e-2));
        check_twice(&[&[0, 5], &[0, 5], &[5]], |v| v[0].add_rms_norm(&v[1], &[5], Some(&v[2]), 1e-2));
        check_twice(&[&[2, 3, 2], &[2, 2, 3]], |v| {
            v[0].transpose(1, 2)?.add_rms_norm(&v[1], &[2, 3], None, 1e-2)
        });
    }
}
