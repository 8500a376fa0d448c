//! [`BucketHook`]: how a bucket's gradients are added over the ranks (torch: DDP's communication hooks). The scheduler calls it with
//! a full bucket. [`AllReduce`] is the default, [`Compress`] sends a smaller dtype, [`PowerSgd`](super::PowerSgd) thin factors.

use std::fmt;
use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dims, Tensor};

use crate::Result;
use crate::comm::{Call, Comm, Pending, Reduction};

/// Adds a bucket's gradients over the ranks. All ranks use the same hook. Where the mean is wanted
/// ([`super::Average::Mean`]) the gradients were divided before.
pub trait BucketHook: fmt::Debug + Send + Sync {
    /// Starts a bucket.
    ///
    /// # Errors
    /// If memory is short or the communicator refuses.
    fn start(&self, bucket: &Bucket<'_>, comm: &Comm) -> Result<PendingBucket>;

    /// The same hook with a state of its own, which every [`super::Ddp`] asks for; `None` of a hook without state.
    fn fresh(&self) -> Option<Arc<dyn BucketHook>> {
        None
    }
}

/// A bucket as a hook sees it.
#[derive(Clone, Copy, Debug)]
pub struct Bucket<'a> {
    /// Its number; buckets start in this order.
    pub index: usize,
    /// Its buffer, one dimension, which no other code uses until the rest is done.
    pub gradients: &'a Tensor,
    /// The gradients that lie in it, one after the other, by number: those of the trained parameters in order of their
    /// registration, one for each site. A gradient keeps its number when buckets are filled anew.
    pub parameters: &'a [usize],
    /// Their shapes.
    pub shapes: &'a [Dims],
    /// What the gradients were divided by, where the mean is wanted.
    pub divisor: Option<f64>,
}

impl Bucket<'_> {
    /// Each parameter's gradient, a view of the buffer in the parameter's shape.
    ///
    /// # Errors
    /// If the shapes want more than the buffer has.
    pub fn views(&self) -> Result<Vec<Tensor>> {
        let mut at = 0;
        let mut view = |shape: &Dims| -> Result<Tensor> {
            let elements = shape.iter().product();
            let part = self.gradients.narrow(0, at, elements)?;
            at += elements;
            Ok(part.with_shape(shape)?)
        };
        self.shapes.iter().map(&mut view).collect()
    }
}

/// Waits for the collective that [`BucketHook::start`] began, and leaves the sums in the bucket's buffer (torch:
/// the future that a communication hook returns).
pub type PendingBucket = Box<dyn FnOnce() -> Result<()> + Send>;

/// Sums in the gradients' dtype, rank 0's first.
#[derive(Clone, Copy, Debug)]
pub struct AllReduce;

impl BucketHook for AllReduce {
    fn start(&self, bucket: &Bucket<'_>, comm: &Comm) -> Result<PendingBucket> {
        let pending: Pending = comm.start(Call::all_reduce(bucket.gradients.clone(), Reduction::Sum));
        Ok(Box::new(move || Ok(pending.wait()?)))
    }
}

/// Sends gradients in a smaller dtype: each rank's is rounded, the sum is taken in f32 and rounded again.
///
/// f16 ends at 65504, where f32 and bf16 go on to 3e38. So gradients in f16 are sent divided by the number of ranks (torch's
/// `fp16_compress_hook`), unless [`super::Average::Mean`] has divided them before, and their sum is multiplied by it in the
/// gradients' dtype: a sum overflows only where the mean of the ranks, or one rank's part of it, is beyond f16. It is
/// then infinite on all ranks, and so is the norm.
#[derive(Clone, Copy, Debug)]
pub struct Compress(
    /// bf16 or f16.
    pub DType,
);

impl BucketHook for Compress {
    fn start(&self, bucket: &Bucket<'_>, comm: &Comm) -> Result<PendingBucket> {
        let ranks = (self.0 == DType::F16 && bucket.divisor.is_none()).then_some(comm.size() as f64);
        let mut gradients = bucket.gradients.clone();
        if let Some(ranks) = ranks {
            kernels::scale_(&mut gradients, 1.0 / ranks)?;
        }
        let small = kernels::cast(&gradients, self.0)?;
        let pending = comm.start(Call::all_reduce(small.clone(), Reduction::Sum));
        Ok(Box::new(move || {
            pending.wait()?;
            let sums = kernels::cast(&small, gradients.dtype())?;
            kernels::copy_(&mut gradients, &sums)?;
            Ok(ranks.map_or(Ok(()), |ranks| kernels::scale_(&mut gradients, ranks))?)
        }))
    }
}
