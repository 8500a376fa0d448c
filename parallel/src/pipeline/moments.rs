//! [`Moments`]: what [`DeferredBatchNorm`](super::DeferredBatchNorm) knows of the micro-batches so far, on their device: no host
//! waits for a GPU.

use phalanx_kernels::{add, div_scalar, mul, mul_scalar, sub};
use phalanx_nn::BatchNorm;
use phalanx_tensor::{Category, Context, Tensor};

use crate::Result;

/// Moments of the channels of a batch.
pub(super) struct Moments {
    /// Elements of a channel.
    count: f64,
    /// Of each channel: [C] in f64.
    mean: Tensor,
    /// Of each channel the sum of the squares of the distances from its mean: [C] in f64.
    squares: Tensor,
}

impl Moments {
    /// The moments of `count` elements a channel with this mean and unbiased variance.
    ///
    /// # Errors
    /// If the device has no room.
    pub(super) fn new(count: f64, mean: Tensor, variance: &Tensor) -> Result<Moments> {
        let _category = Context::with(|c| c.category = Category::Buffers);
        Ok(Moments { count, mean, squares: mul_scalar(variance, (count - 1.0).into())? })
    }

    /// The moments of both parts together, by Chan, Golub and LeVeque's formula; never a difference of large squares.
    ///
    /// # Errors
    /// If the device has no room.
    pub(super) fn with(&self, part: &Moments) -> Result<Moments> {
        let _category = Context::with(|c| c.category = Category::Buffers);
        let count = self.count + part.count;
        let apart = sub(&part.mean, &self.mean)?;
        let mean = add(&self.mean, &mul_scalar(&apart, (part.count / count).into())?)?;
        let between = mul_scalar(&mul(&apart, &apart)?, (self.count * part.count / count).into())?;
        Ok(Moments { count, mean, squares: add(&self.squares, &add(&part.squares, &between)?)? })
    }

    /// Moves a layer's running statistics towards these, the variance unbiased, and counts a batch.
    ///
    /// # Errors
    /// If the device has no room.
    pub(super) fn commit(&self, norm: &BatchNorm) -> Result<()> {
        norm.track(&self.mean, &div_scalar(&self.squares, (self.count - 1.0).into())?)?;
        Ok(())
    }
}
