//! `y` = the mean of each window of an image.
//!
//! Derivative: each pixel's sum of `dy` over its windows, each over its divisor: the transposed map, whose derivative is
//! the mean again. Nothing is saved but the windows.

use std::sync::Arc;

use phalanx_kernels::{self as kernels, PoolOptions, Windows};

use super::linear_map::record_linear;
use crate::{Result, Var, begins};

impl Var {
    /// The mean of each window of `[channels, h, w]` or `[n, channels, h, w]`. With `count_include_pad` the zeros of
    /// the margin count as pixels.
    ///
    /// # Errors
    /// If the windows do not fit the images or are dilated.
    pub fn avg_pool2d(&self, options: &PoolOptions, count_include_pad: bool) -> Result<Var> {
        let windows = Windows::fixed("avg_pool2d", image("avg_pool2d", self)?, options, count_include_pad)?;
        pool("avg_pool2d", self, Arc::new(windows))
    }

    /// The means of `size` windows that cover the image, as equal as they can be.
    ///
    /// # Errors
    /// If the images have no pixels.
    pub fn adaptive_avg_pool2d(&self, size: [usize; 2]) -> Result<Var> {
        const OP: &str = "adaptive_avg_pool2d";
        pool(OP, self, Arc::new(Windows::adaptive(OP, image(OP, self)?, size)?))
    }
}

/// Height and width.
pub(super) fn image(op: &'static str, x: &Var) -> Result<[usize; 2]> {
    match x.shape() {
        [_, h, w] | [_, _, h, w] => Ok([*h, *w]),
        other => {
            let wanted = "[channels, h, w] or [n, channels, h, w]";
            Err(phalanx_tensor::Error::shape(op, format!("{other:?}"), wanted).into())
        }
    }
}

fn pool(op: &'static str, x: &Var, windows: Arc<[Windows; 2]>) -> Result<Var> {
    begins();
    let y = kernels::mean_pool2d(x.tensor(), &windows)?;
    record_linear(op, x, y, move |dy| unpool(op, dy, windows.clone()))
}

fn unpool(op: &'static str, dy: &Var, windows: Arc<[Windows; 2]>) -> Result<Var> {
    begins();
    let dx = kernels::mean_unpool2d(dy.tensor(), &windows)?;
    record_linear(op, dy, dx, move |x| pool(op, x, windows.clone()))
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::PoolOptions;

    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        let options =
            PoolOptions { stride: [2, 1], padding: [1, 1], ceil_mode: true, ..PoolOptions::new([3, 2]) };
        for count_include_pad in [false, true] {
            check_twice(&[&[2, 5, 4]], |v| v[0].tanh()?.avg_pool2d(&options, count_include_pad));
        }
        check_twice(&[&[1, 2, 5, 4]], |v| v[0].tanh()?.adaptive_avg_pool2d([2, 3]));
    }
}
