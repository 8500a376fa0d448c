//! Each channel of each item to mean 0 and variance 1: `group_norm` with a group a channel, whose derivative it has.
//!
//! Source: Ulyanov, Vedaldi, Lempitsky: Instance Normalization (2016).

use phalanx_tensor::Error;

use super::composed::named;
use crate::{Result, Var};

impl Var {
    /// Instance normalisation of `[n, channels, ..]` by each channel's own statistics, then scaled by `weight` and shifted by
    /// `bias`, `[channels]` each, where they are given.
    ///
    /// # Errors
    /// If a channel has one element only, whose result would be 0 whatever it is; if shapes, dtypes or devices do not fit.
    pub fn instance_norm(&self, weight: Option<&Var>, bias: Option<&Var>, eps: f64) -> Result<Var> {
        const OP: &str = "instance_norm";
        let places: Option<&[usize]> = self.shape().get(2..);
        if places.is_none_or(|places| places.iter().all(|&n| n == 1)) {
            let wanted = "[n, channels, ..] with more than one element a channel";
            return Err(Error::shape(OP, format!("{:?}", self.shape()), wanted).into());
        }
        if self.numel() == 0 && self.shape()[1] == 0 {
            return Ok(self.clone());
        }
        named(OP, self.group_norm(self.shape()[1], weight, bias, eps))
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        check_twice(&[&[2, 3, 4], &[3], &[3]], |v| v[0].instance_norm(Some(&v[1]), Some(&v[2]), 1e-2));
        check_twice(&[&[2, 2, 3, 2]], |v| v[0].instance_norm(None, None, 1e-2));
        check_twice(&[&[0, 2, 3], &[2]], |v| v[0].instance_norm(None, Some(&v[1]), 1e-2));
    }

    #[test]
    fn a_channel_of_one_element_is_refused() {
        for shape in [&[2, 3, 1][..], &[2, 3], &[2], &[2, 3, 1, 1]] {
            let x = Var::new(Tensor::zeros(shape, DType::F32, Device::CPU).unwrap());
            assert!(x.instance_norm(None, None, 1e-5).unwrap_err().to_string().starts_with("instance_norm"));
        }
    }
}
