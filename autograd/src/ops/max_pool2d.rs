//! `y` = the largest pixel of each window of an image; the margin is minus infinity.
//!
//! Derivative: `dy` at that pixel, summed where several windows chose one; its derivative picks those pixels again. Saves
//! the places, an i32 each. Of equal pixels the first is the largest; a NaN is larger than all.

use phalanx_kernels::{self as kernels, PoolOptions};
use phalanx_tensor::Tensor;

use super::avg_pool2d::image;
use super::linear_map::record_linear;
use crate::{Result, Var, begins};

impl Var {
    /// The largest pixel of each window of `[channels, h, w]` or `[n, channels, h, w]`.
    ///
    /// # Errors
    /// If the windows do not fit the images, or the dtype is no floating-point one.
    pub fn max_pool2d(&self, options: &PoolOptions) -> Result<Var> {
        begins();
        let (y, places) = kernels::max_pool2d(self.tensor(), options)?;
        let size = image("max_pool2d", self)?;
        record_linear("max_pool2d", self, y, move |dy| unpool(dy, &places, size))
    }
}

fn pick(x: &Var, places: &Tensor) -> Result<Var> {
    begins();
    let size = image("max_pool2d", x)?;
    let (y, places) = (kernels::max_pick2d(x.tensor(), places)?, places.clone());
    record_linear("max_pool2d", x, y, move |dy| unpool(dy, &places, size))
}

fn unpool(dy: &Var, places: &Tensor, size: [usize; 2]) -> Result<Var> {
    begins();
    let (dx, places) = (kernels::max_unpool2d(dy.tensor(), places, size)?, places.clone());
    record_linear("max_pool2d", dy, dx, move |x| pick(x, &places))
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::PoolOptions;

    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        let options =
            PoolOptions { stride: [2, 1], padding: [1, 1], ceil_mode: true, ..PoolOptions::new([3, 2]) };
        check_twice(&[&[2, 5, 4]], |v| v[0].tanh()?.max_pool2d(&options));
    }
}
