//! Data parallelism: every rank holds the model, each computes on its share of the batch, gradients are added.
//!
//! ```text
//! sampler   which samples of a data set a rank draws
//! buckets   which parameters' gradients travel together, and when
//! ddp       the wrapper around a model     reducer   its buffers, and what has come to them
//! hook      how a bucket is added          same      whether the ranks hold the same model
//! ```

mod buckets;
mod ddp;
mod hook;
mod reducer;
pub(crate) mod same;
mod sampler;

pub use buckets::{Buckets, GradSize, Launcher};
pub use ddp::{Average, Ddp, DdpConfig, NoSync};
pub use hook::{AllReduce, BucketHook, Compress, Rest};
pub use sampler::{DistributedSampler, Share};
