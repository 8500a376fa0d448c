//! [`BucketHook`]: how a bucket's gradients are added over the ranks.

use std::fmt;

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Tensor};

use crate::Result;
use crate::comm::{Call, Comm, Pending, Reduction};

/// Adds a bucket's gradients over the ranks. All ranks use the same hook.
pub trait BucketHook: fmt::Debug + Send + Sync {
    /// Starts it. `gradients` is the bucket's buffer, one dimension, which nobody else uses until the rest is done.
    ///
    /// # Errors
    /// If memory is short or the communicator refuses.
    fn start(&self, bucket: usize, gradients: &Tensor, comm: &Comm) -> Result<Rest>;
}

/// What is left to do when a bucket was started; it leaves the sums in the bucket's buffer.
pub type Rest = Box<dyn FnOnce() -> Result<()> + Send>;

/// Sums in the gradients' dtype, rank 0's first.
#[derive(Clone, Copy, Debug)]
pub struct AllReduce;

impl BucketHook for AllReduce {
    fn start(&self, _bucket: usize, gradients: &Tensor, comm: &Comm) -> Result<Rest> {
        let pending: Pending = comm.start(Call::all_reduce(gradients.clone(), Reduction::Sum));
        Ok(Box::new(move || Ok(pending.wait()?)))
    }
}

/// Sends gradients in a smaller dtype: each rank's is rounded, the sum is taken in f32 and rounded again.
#[derive(Clone, Copy, Debug)]
pub struct Compress(
    /// bf16 or f16.
    pub DType,
);

impl BucketHook for Compress {
    fn start(&self, _bucket: usize, gradients: &Tensor, comm: &Comm) -> Result<Rest> {
        let small = kernels::cast(gradients, self.0)?;
        let pending = comm.start(Call::all_reduce(small.clone(), Reduction::Sum));
        let mut gradients = gradients.clone();
        Ok(Box::new(move || {
            pending.wait()?;
            let sums = kernels::cast(&small, gradients.dtype())?;
            Ok(kernels::copy_(&mut gradients, &sums)?)
        }))
    }
}
