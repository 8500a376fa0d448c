//! `y = x / (k + alpha m)^beta` with the mean `m` of the squares of `size` neighbouring channels, zeros beyond the first and
//! the last.
//!
//! Composed of `square`, `avg_pool2d` over the channels and `pow`, whose derivatives it has. The halves are computed in f32.
//! Source: Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks (2012).

use phalanx_kernels::PoolOptions;
use phalanx_tensor::Error;

use super::composed::{composed, product};
use crate::{Result, Var};

impl Var {
    /// Local response normalisation of `[n, channels, ..]` over windows of `size` channels, PyTorch's
    /// `functional.local_response_norm`.
    ///
    /// # Errors
    /// If there are fewer than three dimensions, `size` is 0, or the dtype is no floating-point one.
    pub fn local_response_norm(&self, size: usize, alpha: f64, beta: f64, k: f64) -> Result<Var> {
        const OP: &str = "local_response_norm";
        let &[n, channels, ref places @ ..] = self.shape() else { return Err(few(self)) };
        if places.is_empty() {
            return Err(few(self));
        }
        if size == 0 || isize::try_from(size).is_err() {
            return Err(Error::range(OP, format!("size {size}"), "at least 1 channel").into());
        }
        if self.numel() == 0 {
            return Ok(self.clone());
        }
        let rows = [n, channels, product(OP, places)?];
        composed(OP, &[self], |x| {
            let margins = [(0, 0), ((size / 2) as isize, ((size - 1) / 2) as isize)];
            let squares = x[0].square()?.reshape_to(&rows)?.pad(&margins, 0.0)?;
            let windows = PoolOptions { stride: [1, 1], ..PoolOptions::new([size, 1]) };
            let means = squares.avg_pool2d(&windows, true)?.reshape_to(x[0].shape())?;
            x[0].div(&means.mul_scalar(alpha)?.add_scalar(k)?.pow_scalar(beta)?)
        })
    }
}

fn few(x: &Var) -> crate::Error {
    Error::shape(
        "local_response_norm",
        format!("{:?}", x.shape()),
        "[n, channels, ..] of three dimensions or more",
    )
    .into()
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn windows_lie_around_each_channel_and_derivatives_hold() {
        let x = Var::from_slice(&[1.0, 2.0, 3.0], &[1, 3, 1], Device::CPU).unwrap();
        let y = x.local_response_norm(2, 2.0, 1.0, 1.0).unwrap().to_vec::<f64>().unwrap();
        assert_eq!(y, [1.0 / 2.0, 2.0 / 6.0, 3.0 / 14.0]);
        for size in [1, 2, 3, 9] {
            check_twice(&[&[2, 4, 2]], |v| v[0].local_response_norm(size, 0.3, 0.75, 1.2));
        }
        assert!(x.local_response_norm(0, 1.0, 1.0, 1.0).unwrap_err().to_string().contains("size 0"));
        assert!(x.select(0, 0).unwrap().local_response_norm(2, 1.0, 1.0, 1.0).is_err());
    }
}
