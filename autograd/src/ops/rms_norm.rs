//! `y = x / sqrt(mean(x²) + eps) * w` over the last dimensions.
//!
//! Derivative, with `xhat` the normalised row, `r` its inverse root and `g = dy w`: `dx = r (g - xhat mean(g xhat))` and
//! `dw = sum(dy xhat)` over the rows. Shapes: `x` [.., n..], `w` [n..]. Saves `x`, `w` and `r`.
//! Source: Zhang, Sennrich: Root Mean Square Layer Normalization (2019).

use phalanx_kernels as kernels;
use phalanx_tensor::Dims;

use super::layer_norm::{Form, record_norm};
use crate::{Result, Var, begins};

impl Var {
    /// Root-mean-square normalisation over the last dimensions, which must be `normalized_shape`, then scaled by
    /// `weight` if given.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn rms_norm(&self, normalized_shape: &[usize], weight: Option<&Var>, eps: f64) -> Result<Var> {
        begins();
        let made = kernels::rms_norm(self.tensor(), normalized_shape, weight.map(Var::tensor), eps)?;
        let form = Form { shape: Dims::from_slice(normalized_shape), centred: false, eps };
        record_norm("rms_norm", form, [self].into_iter().chain(weight), weight.is_some(), made)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        check_twice(&[&[3, 5], &[5]], |v| v[0].rms_norm(&[5], Some(&v[1]), 1e-2));
        check_twice(&[&[3, 2, 3]], |v| v[0].rms_norm(&[2, 3], None, 1e-2));
    }
}
